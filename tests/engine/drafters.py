"""A drafter that knows what the paged fake is going to sample, and lies about it now and then."""

from __future__ import annotations

import random

from bequest.engine.state.sequence import Sequence
from tests.engine.paged_fake import CROSS, VOCAB, next_token


class OracleDrafter:
    """`truth`: the part of its guesses that are right."""

    def __init__(self, seed: int, truth: float, most: int = 5) -> None:
        self._draw = random.Random(seed)
        self._truth = truth
        self._most = most
        self.num_right = 0
        self.num_wrong = 0

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
