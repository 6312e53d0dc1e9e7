"""Drafters that know what is going to be sampled, and lie about it now and then."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from bequest.engine._C import TokenList
from bequest.engine.scheduling.policy.tuning import Tuning
from bequest.engine.state.sequence import Sequence as Choice
from tests.engine.paged_fake import CROSS, VOCAB, next_token

# Drafts for every sequence, however many there are.
DRAFTING = Tuning(draft_rows=1 << 20)


class OracleDrafter:
    """Of the paged fake. `truth`: the part of its guesses that are right. It waits now and then, whether it knows
    something or not."""

    def __init__(self, seed: int, truth: float, most: int = 5) -> None:
        self._draw = random.Random(seed)
        self._truth = truth
        self._most = most
        self.num_right = 0
        self.num_wrong = 0

    def guesses_of(self, sequence: Choice) -> OracleGuesses:
        return OracleGuesses(self, sequence)

    def waits(self) -> bool:
        return self._draw.random() < 0.8

    def draft(self, sequence: Choice, most: int) -> tuple[int, ...]:
        request = sequence.group.request
        encoder = () if request.encoder is None else request.encoder.token_ids
        history = [*(CROSS + token for token in encoder), *sequence.tokens[:]]
        drafts: list[int] = []
        for _ in range(min(most, self._draw.randint(0, self._most))):
            token = next_token(history, sequence.group.seed, sequence.choice, request.params.greedy)
            right = self._draw.random() < self._truth
            self.num_right += right
            self.num_wrong += not right
            drafts.append(token if right else (token + self._draw.randrange(1, VOCAB)) % VOCAB)
            history.append(drafts[-1])
        return tuple(drafts)


class OracleGuesses:
    """Guesses, of one sequence."""

    def __init__(self, drafter: OracleDrafter, sequence: Choice) -> None:
        self.waits = False
        self.num_predicted = self.num_mispredicted = 0
        self._drafter = drafter
        self._sequence = sequence

    def look(self, tokens: TokenList, most: int, *, beside: bool) -> None:
        self.waits = most > 0 and self._drafter.waits()

    def draft(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        assert tokens is self._sequence.tokens and self.waits
        return self._drafter.draft(self._sequence, most)

    def learn(self, num_drafted: int, num_right: int) -> None:
        assert 0 <= num_right <= num_drafted


class RecordedDrafter:
    """Knows the answers of an earlier run, by request and choice, and lies about them now and then."""

    def __init__(self, seed: int, truth: float, said: Mapping[tuple[str, int], Sequence[int]], most: int = 6) -> None:
        self._draw = random.Random(seed)
        self._truth = truth
        self._said = said
        self._most = most
        self.num_drafted = 0

    def guesses_of(self, sequence: Choice) -> RecordedGuesses:
        said = self._said.get((sequence.group.request.id, sequence.choice), ())
        return RecordedGuesses(self, sequence.num_prompt, said)

    def draft(self, known: Sequence[int], most: int) -> tuple[int, ...]:
        drafts = [*known[: min(most, self._draw.randint(1, self._most))]]
        for i in range(len(drafts)):
            if self._draw.random() >= self._truth:
                drafts[i] = self._draw.choice(drafts) + self._draw.randrange(2)
        self.num_drafted += len(drafts)
        return tuple(drafts)


class RecordedGuesses:
    """Guesses, of one sequence."""

    def __init__(self, drafter: RecordedDrafter, num_prompt: int, said: Sequence[int]) -> None:
        self.waits = False
        self.num_predicted = self.num_mispredicted = 0
        self._drafter = drafter
        self._num_prompt = num_prompt
        self._said = said

    def look(self, tokens: TokenList, most: int, *, beside: bool) -> None:
        self.waits = most > 0 and len(tokens) - self._num_prompt < len(self._said)

    def draft(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        return self._drafter.draft(self._said[len(tokens) - self._num_prompt :], most)

    def learn(self, num_drafted: int, num_right: int) -> None:
        assert 0 <= num_right <= num_drafted
