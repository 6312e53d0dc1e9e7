"""The table of tokens, or the output matrix, of which each rank has some rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.layers.ranks import Ranks
from bequest.engine.layers.weight import Weight


def rows_of_rank(num_rows: int, size: int) -> int:
    """That each rank has; those of the last ranks may be rows of zeros behind the vocabulary."""
    return -(-num_rows // size)


class VocabularyPart(Weight):
    """W [N, K], of which this rank has rows [first, first + rows_of_rank)."""

    def __init__(self, part: Weight, num_rows: int, ranks: Ranks) -> None:
        self._part = part
        self._num_rows = num_rows
        self._ranks = ranks
        self._first = ranks.rank * part.out_features
        self.ops = part.ops

    @property
    def out_features(self) -> int:
        return self._num_rows

    @property
    def in_features(self) -> int:
        return self._part.in_features

    @property
    def nbytes(self) -> int:
        return self._part.nbytes

    @property
    def format(self) -> str:
        return self._part.format

    def with_bias(self, bias: Tensor) -> Weight:
        own = bias[self._first : self._first + self._part.out_features]
        whole = F.pad(own, (0, self._part.out_features - len(own)))
        return VocabularyPart(self._part.with_bias(whole), self._num_rows, self._ranks)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.joined(self._part(x))[:, : self._num_rows].contiguous()

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        """One rank has the row of a token; the others add zeros."""
        if last_tokens is not None:
            known = last_tokens[(-ids - 1).clamp(min=0)]
            ids = torch.where(ids < 0, known, ids)
        own = ids - self._first
        outside = (own < 0) | (own >= self._part.out_features)
        found = self._part.rows(own.masked_fill(outside, 0))
        return self._ranks.sum(found.masked_fill_(outside[:, None], 0))
