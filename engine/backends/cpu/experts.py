"""The matrices of experts in the layouts of the CPU's matrix kernels."""

from __future__ import annotations

from torch import Tensor

from bequest.engine.backends.cpu.weights import format_of
from bequest.engine.kernels import cpu_experts
from bequest.engine.kernels.cpu_experts import PackedExperts
from bequest.engine.kernels.cpu_lora import LoraRows
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.parts import Activation, Chosen
from bequest.engine.layers.step_adapters import AdapterRows


class CpuExperts(ExpertWeights):
    """In the formats of CpuWeight."""

    def __init__(self, packed: PackedExperts) -> None:
        self.packed = packed

    @property
    def site(self) -> int | None:
        return self.packed.site

    @site.setter
    def site(self, site: int | None) -> None:
        self.packed.site = site

    @property
    def num_experts(self) -> int:
        return len(self.packed.each)

    @property
    def out_features(self) -> int:
        return self.packed.each[0].out_features

    @property
    def in_features(self) -> int:
        return self.packed.each[0].in_features

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def format(self) -> str:
        return format_of(self.packed.each[0])

    def gated(self, x: Tensor, chosen: Chosen, activation: Activation) -> Tensor:
        return cpu_experts.expert_gated(x, self.packed, chosen.ids, chosen.weights, activation)

    def summed(self, x: Tensor, chosen: Chosen) -> Tensor:
        return cpu_experts.expert_summed(x, self.packed, chosen.ids, chosen.weights)

    def with_adapters(
        self, down: ExpertWeights, x: Tensor, chosen: Chosen, activation: Activation, rows: AdapterRows
    ) -> Tensor:
        assert isinstance(down, CpuExperts) and isinstance(rows, LoraRows), "of this backend"
        return rows.experts((self.packed, down.packed), x, chosen.ids, chosen.weights, activation)
