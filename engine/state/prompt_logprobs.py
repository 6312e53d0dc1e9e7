"""Log-probabilities of a prompt: which positions launched steps tell of, and what they told. Event-loop thread."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bequest.engine.types import IntArray, LogprobArrays, TokenLogprob


@dataclass(slots=True)
class PromptLogprobs:
    token_ids: tuple[int, ...]  # of the prompt
    top: int  # alternatives that are wanted
    told: list[TokenLogprob | None] = field(default_factory=lambda: [None])  # nothing precedes token 0
    num_planned: int = 0  # positions that launched steps tell of

    def plan(self, begin: int, end: int) -> range:
        """The positions of a chunk whose logits tell something new: p tells of token p + 1. A chunk that is computed
        again does not tell again what is known."""
        first, last = max(begin, self.num_planned), min(end, len(self.token_ids) - 1)
        if first < last:
            self.num_planned = last
        return range(first, last)

    def targets(self, told: range) -> IntArray:
        return np.asarray(self.token_ids[told.start + 1 : told.stop + 1], dtype=np.int32)

    def receive(self, arrays: LogprobArrays) -> None:
        targets = self.token_ids[len(self.told) : len(self.told) + len(arrays.chosen)]
        self.told.extend(logprob_of(arrays, i, token, self.top) for i, token in enumerate(targets))


def logprob_of(arrays: LogprobArrays, i: int, token: int, top: int) -> TokenLogprob:
    best = zip(arrays.top_ids[i, :top].tolist(), arrays.top[i, :top].tolist(), strict=True)
    return TokenLogprob(token, float(arrays.chosen[i]), int(arrays.rank[i]), tuple(best))
