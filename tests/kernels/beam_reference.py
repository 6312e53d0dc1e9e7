"""Beam candidates the slow way, in float64, and a comparison that knows which orders rounding may change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceGroup:
    num_rows: int
    k: int
    allowed: Sequence[int] | None = None
    bias: Sequence[tuple[int, float]] = ()
    forbidden: Sequence[int] = ()
    items: frozenset[tuple[int, ...]] | None = None
    ends: Sequence[int] = ()
    prefixes: Sequence[tuple[int, ...]] = field(default=())  # of each row, in the catalogue

    def permitted(self, row: int, vocab: int) -> npt.NDArray[np.bool_]:
        mask = np.zeros(vocab, np.bool_)
        if self.items is None:
            mask[:] = True
        else:
            prefix = self.prefixes[row]
            mask[[item[len(prefix)] for item in self.items if item[: len(prefix)] == prefix != item]] = True
            if prefix in self.items:
                mask[list(self.ends)] = True
        if self.allowed is not None:
            inside = np.zeros(vocab, np.bool_)
            inside[list(self.allowed)] = True
            mask &= inside
        mask[list(self.forbidden)] = False
        return mask


@dataclass(frozen=True)
class Expected:
    score: Floats  # [rows, V], -inf where masked
    logprob: Floats  # [rows, V]
    edited: Floats  # [rows, V] logits with bias
    bad: npt.NDArray[np.bool_]  # [rows]


def expect(group: ReferenceGroup, logits: npt.NDArray[np.float32], cumulative: npt.NDArray[np.float32]) -> Expected:
    """logits [rows, V] of the group alone."""
    x = logits.astype(np.float64)
    bad = np.isnan(x).any(1) | (x == math.inf).any(1) | (x == -math.inf).all(1) | np.isnan(cumulative)
    x = np.where(bad[:, None], 0.0, x)
    top = x.max(1, keepdims=True)
    logprob = x - top - np.log(np.exp(x - top).sum(1, keepdims=True))
    bias = np.zeros(x.shape[1])
    for token, value in group.bias:
        bias[token] += value
    permitted = np.zeros(x.shape, np.bool_)
    for r in range(group.num_rows):
        permitted[r] = group.permitted(r, x.shape[1]) & ~bad[r]
    score = np.where(permitted, cumulative.astype(np.float64)[:, None] + logprob + bias, -math.inf)
    return Expected(score, logprob, (logits + bias.astype(np.float32)).astype(np.float64), bad)


def check_group(
    group: ReferenceGroup,
    expected: Expected,
    score: npt.NDArray[np.float32],
    row: npt.NDArray[np.int32],
    token: npt.NDArray[np.int32],
    logprob: npt.NDArray[np.float32],
    tolerance: float = 2e-5,
) -> None:
    """One group's results [K]. What stands within the tolerance of each other may be exchanged, but only if it is not
    exactly equal: rows with the same score and logits of the same value have one right order."""
    finite = np.isfinite(expected.score)
    count = min(group.k, int(finite.sum()))
    assert (token[count:] == -1).all() and (row[count:] == -1).all()
    assert (score[count:] == -math.inf).all() and (logprob[count:] == -math.inf).all()
    token, row, score, logprob = token[:count], row[:count], score[:count], logprob[:count]
    assert len(set(zip(row.tolist(), token.tolist(), strict=True))) == count
    assert ((token >= 0) & (row >= 0)).all() and (np.diff(score) <= 0).all()
    scale = np.maximum(1.0, np.abs(score))
    assert (np.abs(score - expected.score[row, token]) <= tolerance * scale).all()
    assert (np.abs(logprob - expected.logprob[row, token]) <= tolerance * np.maximum(1.0, np.abs(logprob))).all()
    best = np.sort(expected.score[finite])[::-1][:count]
    assert (np.abs(score - best) <= tolerance * scale).all()
    edited = expected.edited[row, token]
    tied = score[1:] == score[:-1]
    same_row = row[1:] == row[:-1]
    assert (row[1:] >= row[:-1])[tied].all()
    assert (edited[1:] <= edited[:-1])[tied & same_row].all()
    assert (token[1:] > token[:-1])[tied & same_row & (edited[1:] == edited[:-1])].all()
    # Of equal logits in a row the lower tokens are there.
    for r in set(row.tolist()):
        chosen = token[row == r]
        last = chosen[np.lexsort((chosen, -expected.edited[r, chosen]))][-1]
        equal = np.flatnonzero((expected.edited[r] == expected.edited[r, last]) & finite[r])
        assert set(equal[equal <= last].tolist()) <= set(chosen.tolist())
