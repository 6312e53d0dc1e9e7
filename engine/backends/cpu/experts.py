"""The matrices of experts in the layouts of the CPU's matrix kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bequest.engine.backends.cpu.weights import CpuWeight
from bequest.engine.kernels.cpu_weights import PackedWeight
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Activation, Chosen


class CpuExperts(ExpertWeights):
    """One packed matrix each."""

    def __init__(self, packed: Sequence[PackedWeight], bias: Tensor | None, ops: Ops) -> None:
        """bias [E, N] float32"""
        self._experts = [
            CpuWeight(one, None if bias is None else bias[number].contiguous(), ops)
            for number, one in enumerate(packed)
        ]

    @property
    def num_experts(self) -> int:
        return len(self._experts)

    @property
    def out_features(self) -> int:
        return self._experts[0].out_features

    @property
    def in_features(self) -> int:
        return self._experts[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self._experts)

    @property
    def format(self) -> str:
        return self._experts[0].format

    def gated(self, x: Tensor, chosen: Chosen, activation: Activation) -> Tensor:
        out = torch.empty(chosen.ids.numel(), self.out_features // 2)
        for expert, rows in self._used(chosen):
            out[rows] = expert.gated(x[rows // chosen.ids.shape[1]], activation)
        return out

    def summed(self, x: Tensor, chosen: Chosen) -> Tensor:
        products = torch.empty(x.shape[0], self.out_features)
        for expert, rows in self._used(chosen):
            products[rows] = expert(x[rows])
        of_ranks = products.view(*chosen.ids.shape, self.out_features).unbind(1)
        total = torch.zeros(len(chosen.ids), self.out_features)
        for rank, given in enumerate(of_ranks):
            total += given * chosen.weights[:, rank, None]
        return total

    def _used(self, chosen: Chosen) -> Iterator[tuple[CpuWeight, Tensor]]:
        """The experts that some token takes, and which of the [T top_k] rows each gets."""
        flat = chosen.ids.flatten()
        for number in flat.unique().tolist():
            yield self._experts[number], (flat == number).nonzero().flatten()
