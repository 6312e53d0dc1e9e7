"""Sampling, slow and obvious: sorted lists, float64, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bequest.engine import _C
from bequest.engine.types import RowSpec

Floats = npt.NDArray[np.float64]


@dataclass
class ReferenceRow:
    """One row's history. `spec` says how it samples."""

    spec: RowSpec
    outputs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = list(self.spec.output_token_ids)

    def edited(self, logits: npt.NDArray[np.float32]) -> Floats:
        bounds, penalties = self.spec.bounds, self.spec.penalties
        x = logits.astype(np.float64)
        if bounds.allowed_token_ids is not None:
            x[[v for v in range(len(x)) if v not in bounds.allowed_token_ids]] = -np.inf
        history = [*self.spec.prompt_token_ids, *self.outputs]
        for word in bounds.bad_words:
            before = len(word) - 1
            if before <= len(history) and history[len(history) - before :] == list(word[:-1]):
                x[word[-1]] = -np.inf
        if len(self.outputs) < bounds.min_tokens:
            x[list(bounds.held_back)] = -np.inf
        for token, bias in bounds.logit_bias:
            x[token] += bias
        for token in set(history):
            x[token] = x[token] / penalties.repetition if x[token] > 0 else x[token] * penalties.repetition
        for token in set(self.outputs):
            x[token] -= penalties.frequency * self.outputs.count(token) + penalties.presence
        return x

    def kept(self, x: Floats) -> list[int]:
        """Tokens that min_p, top_k and top_p leave, best first."""
        params = self.spec.draw
        order = [v for v in np.lexsort((np.arange(len(x)), -x)) if x[v] > -np.inf]
        weights = np.exp((x - x.max()) / params.temperature)
        order = [v for v in order if weights[v] >= params.min_p]
        if params.top_k:
            order = order[: params.top_k]
        cumulative = np.cumsum(weights[order]) / weights[order].sum()
        return [int(v) for v in order[: 1 + int(np.sum(cumulative < params.top_p))]] if params.top_p < 1 else order

    def scores(self, x: Floats, tokens: list[int], position: int) -> Floats:
        params = self.spec.draw
        noise = np.array([gumbel(params.seed, position, params.choice, v) for v in tokens])
        return x[tokens] / params.temperature + noise

    def sample(self, logits: npt.NDArray[np.float32], position: int) -> int:
        x = self.edited(logits)
        if self.spec.draw.greedy:
            token = int(np.argmax(x))
        else:
            kept = self.kept(x)
            token = kept[int(np.argmax(self.scores(x, kept, position)))]
        self.outputs.append(token)
        return token


def gumbel(seed: int, position: int, choice: int, token: int) -> float:
    words = _C.philox4x32([token // 4, position, choice, 0], seed)
    w = min((words[token % 4] + 0.5) / 2**32, 1 - 2**-24)
    return float(-np.log(-np.log1p(-w)))
