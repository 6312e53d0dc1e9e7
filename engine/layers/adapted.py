"""Weights with adapters: rows of a product get what the adapter of their sequence adds to it."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine.layers.parts import Activation
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.layers.weight import Weight


def adapted(weight: Weight, adapters: StepAdapters | None) -> Weight:
    """The weight as it is in a step."""
    if adapters is None or weight.site is None or not adapters.rows.is_at(weight.site):
        return weight
    return AdaptedWeight(weight, weight.site, adapters)


class AdaptedWeight(Weight):
    """Nothing is fused with the products of rows that have an adapter. The other rows are, to the bit, what the weight
    itself makes of them: what it fuses may round otherwise than the kernels do one by one."""

    def __init__(self, weight: Weight, site: int, adapters: StepAdapters) -> None:
        self._weight, self._site, self._adapters = weight, site, adapters
        self.ops = weight.ops

    @property
    def out_features(self) -> int:
        return self._weight.out_features

    @property
    def in_features(self) -> int:
        return self._weight.in_features

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    @property
    def format(self) -> str:
        return self._weight.format

    def with_bias(self, bias: Tensor) -> Weight:
        return AdaptedWeight(self._weight.with_bias(bias), self._site, self._adapters)

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        return self._weight.rows(ids, last_tokens)

    def __call__(self, x: Tensor) -> Tensor:
        result = self._weight(x)
        self._adapters.of(len(x)).add(self._site, x.contiguous(), result)
        return result

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        return self._with_adapted(self._weight.gated(x, activation), super().gated(x, activation))

    def activated(self, x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        result = self._with_adapted(self._weight.activated(x, activation), super().activated(x, activation))
        return result if out is None else out.copy_(result)

    def _with_adapted(self, others: Tensor, own: Tensor) -> Tensor:
        """The second where a row has an adapter, [T, N] both."""
        rows = torch.tensor(self._adapters.of(len(own)).rows_at(self._site), dtype=torch.int64, device=own.device)
        others[rows] = own[rows]
        return others
