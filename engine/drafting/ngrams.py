"""Drafts without a model: what followed the same tokens before, in the request itself, in the client's prediction, or
in what the tenant's records say (suffixes.py).

A prompt that holds the text to be edited, quoted or summed up is a good source, and so is an answer that repeats
itself. A child's prompt begins with its parent's tokens, so it finds what its ancestors said.
"""

from __future__ import annotations

from bequest.engine._C import NgramIndex, SuffixIndex, TokenList
from bequest.engine.drafting.pace import Pace
from bequest.engine.drafting.suffixes import RecordTexts
from bequest.engine.state.guesses import Guesses
from bequest.engine.state.sequence import Sequence
from bequest.engine.types.speculation import MOST_DRAFTED, ON_CPU, DraftCosts, DraftMethod

_SHORTEST_RUN = 3  # tokens that must be the same before something is taken to follow
_SHORTEST_PREDICTED = 2  # in a prediction, which is about this answer


class NgramDrafter:
    """Makes the guesses of each sequence."""

    def __init__(self, method: DraftMethod, costs: DraftCosts = ON_CPU, most: int | None = None) -> None:
        """What a request leaves open."""
        self.texts = RecordTexts()
        self._method = method
        self._most = most or MOST_DRAFTED
        self._costs = costs

    def guesses_of(self, sequence: Sequence) -> Guesses | None:
        wish = sequence.group.request.speculation
        method = wish.method or ("ngram" if wish.prediction else self._method)  # who predicts asks for drafts
        if method == "off":
            return None
        most = min(self._most, wish.most or MOST_DRAFTED)
        texts = self.texts.of(sequence.group.request) if method == "suffix" else None
        # Who wanted the draft model's, and cannot have them, has these.
        return NgramGuesses(sequence.num_prompt, wish.prediction, most, Pace(self._costs), texts)


class NgramGuesses:
    """Guesses, of one sequence."""

    def __init__(
        self,
        num_prompt: int,
        prediction: tuple[int, ...],
        most: int,
        pace: Pace,
        texts: SuffixIndex | None = None,
    ) -> None:
        """`texts`: of others, that it may go on as."""
        self.waits = False
        self.num_predicted = self.num_mispredicted = 0
        self._most = most
        self._pace = pace
        self._seen = NgramIndex(_SHORTEST_RUN)
        self._texts = texts
        self._prediction = _Prediction(prediction, num_prompt) if prediction else None
        self._predicts = False  # the last draft was the client's

    def look(self, tokens: TokenList, most: int, *, beside: bool) -> None:
        most = min(most, self._most)
        self._pace.beside = beside
        if most <= 0 or self._pace.rests():
            self.waits = False
            return
        self._seen.learn(tokens)
        self.waits = bool(self._find(tokens, 1)) and self._pace.length(most) > 0

    def draft(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        length = self._pace.length(min(most, self._most))
        return self._find(tokens, length) if length else ()

    def learn(self, num_drafted: int, num_right: int) -> None:
        self._pace.note(num_drafted, num_right)
        if self._predicts:
            self.num_predicted += num_right
            self.num_mispredicted += num_drafted - num_right

    def _find(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        found = () if self._prediction is None else self._prediction.follow(tokens, most)
        self._predicts = bool(found)
        if found:
            return found
        if self._texts is not None and self._texts.run(tokens) > self._seen.run(tokens):
            return self._texts.follow(tokens, most)
        return self._seen.follow(tokens, most)


class _Prediction:
    """What the client expects of the answer."""

    def __init__(self, expected: tuple[int, ...], num_prompt: int) -> None:
        self._expected = TokenList(expected)
        self._num_prompt = num_prompt
        self._index = NgramIndex(_SHORTEST_PREDICTED)
        self._index.learn(self._expected)

    def follow(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        said = len(tokens) - self._num_prompt
        if said < _SHORTEST_PREDICTED:  # the beginning of both
            begins = said < len(self._expected) and tokens[self._num_prompt :] == self._expected[:said]
            return tuple(self._expected[said : said + most]) if begins else ()
        return self._index.follow(tokens, most)
