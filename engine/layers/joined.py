"""Matrices that read the same rows but are stored otherwise: some writers give the values of attention more bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bequest.engine.layers.weight import Weight


class JoinedWeight(Weight):
    """Weights of one input, their outputs one behind the other. Layers with one run kernel by kernel."""

    def __init__(self, parts: Sequence[Weight], bias: Tensor | None) -> None:
        """The bias is that of all outputs; the parts have none."""
        self._parts = tuple(parts)
        self._bias = bias
        self.ops = parts[0].ops

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self._parts)

    @property
    def in_features(self) -> int:
        return self._parts[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def format(self) -> str:
        return " beside ".join(sorted({part.format for part in self._parts}))

    def with_bias(self, bias: Tensor) -> Weight:
        return JoinedWeight(self._parts, bias)

    def __call__(self, x: Tensor) -> Tensor:
        products = torch.cat([part(x) for part in self._parts], dim=1)
        return products if self._bias is None else products + self._bias

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        raise AssertionError("a table is one matrix")
