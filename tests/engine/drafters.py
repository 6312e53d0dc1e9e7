"""A drafter that knows what the paged fake is going to sample, and lies about it now and then."""

from __future__ import annotations

import random

from bequest.engine._C import TokenList
from bequest.engine.scheduling.policy.tuning import Tuning
from bequest.engine.state.sequence import Sequence
from tests.engine.paged_fake import CROSS, VOCAB, next_token

# Drafts for every sequence, however many there are.
DRAFTING = Tuning(draft_rows=1 << 20)


class OracleDrafter:
    """`truth`: the part of its guesses that are right. It waits now and then, whether it knows something or not."""

    def __init__(self, seed: int, truth: float, most: int = 5) -> None:
        self._draw = random.Random(seed)
        self._truth = truth
        self._most = most
        self.num_right = 0
        self.num_wrong = 0

    def guesses_of(self, sequence: Sequence) -> OracleGuesses:
        return OracleGuesses(self, sequence)

    def waits(self) -> bool:
        return self._draw.random() < 0.8

    def draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
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

    def __init__(self, drafter: OracleDrafter, sequence: Sequence) -> None:
        self.waits = False
        self.num_predicted = self.num_mispredicted = 0
        self._drafter = drafter
        self._sequence = sequence

    def look(self, tokens: TokenList, most: int) -> None:
        self.waits = most > 0 and self._drafter.waits()

    def draft(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        assert tokens is self._sequence.tokens and self.waits
        return self._drafter.draft(self._sequence, most)

    def learn(self, num_drafted: int, num_right: int) -> None:
        assert 0 <= num_right <= num_drafted
