"""Drafts without a model: what followed the same tokens before, in the request itself, in the client's prediction, or
in what the tenant's records say (suffixes.py).

A prompt that holds the text to be edited, quoted or summed up is a good source, and so is an answer that repeats
itself. A child's prompt begins with its parent's tokens, so it finds what its ancestors said.
"""

from __future__ import annotations

from enum import IntEnum

from bequest.engine._C import NgramIndex, SuffixIndex, TokenList
from bequest.engine.drafting.pace import Account, Pace
from bequest.engine.drafting.suffixes import RecordTexts
from bequest.engine.state.guesses import Guesses
from bequest.engine.state.sequence import Sequence
from bequest.engine.types.speculation import MOST_DRAFTED, ON_CPU, DraftCosts, DraftMethod

_SHORTEST_RUN = 3  # tokens that must be the same before something is taken to follow
_LONG_RUN = 5  # that tells more than a shorter one
_SHORTEST_PREDICTED = 2  # in a prediction, which is about this answer


class _Kind(IntEnum):
    """What a guess is made by. Each has a pace of its own: the longer a run, the more of what follows it is right."""

    PREDICTION = 0
    PAIR = 1  # two tokens: what is left where an edit has broken a run
    SHORT_RUN = 2
    LONG_RUN = 3


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
        return NgramGuesses(sequence.num_prompt, wish.prediction, most, self._costs, texts)


class NgramGuesses:
    """Guesses, of one sequence."""

    def __init__(
        self,
        num_prompt: int,
        prediction: tuple[int, ...],
        most: int,
        costs: DraftCosts,
        texts: SuffixIndex | None = None,
    ) -> None:
        """`texts`: of others, that it may go on as."""
        self.waits = False
        self.num_predicted = self.num_mispredicted = 0
        self._most = most
        self._account = Account()
        # Who predicts an answer stands for it.
        self._paces = [Pace(costs, account=None if kind is _Kind.PREDICTION else self._account) for kind in _Kind]
        self._kind = _Kind.PAIR  # of the next draft
        self._known_len = num_prompt
        self._seen = NgramIndex(_SHORTEST_RUN)
        self._pairs = NgramIndex(2)
        self._texts = texts
        self._prediction = _Prediction(prediction, num_prompt) if prediction else None

    def look(self, tokens: TokenList, most: int, *, beside: bool) -> None:
        self.waits = False
        num_new, self._known_len = len(tokens) - self._known_len, len(tokens)
        most = min(most, self._most)
        if most <= 0:
            return
        self._seen.learn(tokens)
        self._pairs.learn(tokens)
        self._account.note_tokens(num_new)
        if not self._find(tokens, 1):
            return
        pace = self._paces[self._kind]
        pace.beside = beside
        self.waits = not pace.rests() and pace.length(most) > 0

    def draft(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        length = self._paces[self._kind].length(min(most, self._most))
        return self._find(tokens, length) if length else ()

    def learn(self, num_drafted: int, num_right: int) -> None:
        self._paces[self._kind].note(num_drafted, num_right)
        if self._kind is _Kind.PREDICTION:
            self.num_predicted += num_right
            self.num_mispredicted += num_drafted - num_right

    def _find(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        """Also notes what it was found by."""
        if self._prediction is not None and (found := self._prediction.follow(tokens, most)):
            self._kind = _Kind.PREDICTION
            return found
        index: NgramIndex | SuffixIndex = self._seen
        run = self._seen.run(tokens)
        if self._texts is not None and (of_texts := self._texts.run(tokens)) > run:
            index, run = self._texts, of_texts
        if run == 0:
            index = self._pairs
        self._kind = _Kind.LONG_RUN if run >= _LONG_RUN else _Kind.SHORT_RUN if run else _Kind.PAIR
        return index.follow(tokens, most)


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
