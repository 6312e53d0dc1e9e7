"""Weights in the layouts of the CPU's matrix kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels import cpu_stack
from bequest.engine.kernels.cpu_weights import PackedWeight
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Activation
from bequest.engine.layers.weight import Table, Weight


def format_of(packed: PackedWeight) -> str:
    """What its values are kept in, for people."""
    codes = packed.codes
    return str(packed.dtype).removeprefix("torch.") if codes is None else f"codes of {codes.bits} bits"


class CpuWeight(Weight):
    """Panels of float32 or bfloat16, tiles of bfloat16, or codes of a quantised file. Rows of x may overlap."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None, ops: Ops) -> None:
        self.packed = packed
        self.bias = bias  # [N] float32
        self.ops = ops

    @property
    def out_features(self) -> int:
        return self.packed.out_features

    @property
    def in_features(self) -> int:
        return self.packed.in_features

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def format(self) -> str:
        return format_of(self.packed)

    def with_bias(self, bias: Tensor) -> Weight:
        return CpuWeight(self.packed, bias, self.ops)

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.packed, self.bias)

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        assert last_tokens is None, "on the CPU the runner resolves them"
        return kernels.embedding(ids, self.packed)

    def activated(self, x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        if self.packed.can_activate:
            return kernels.activated_linear(x, self.packed, activation, self.bias, out)
        return kernels.activate(kernels.linear(x, self.packed, self.bias, out), activation)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if self.packed.can_gate:
            return kernels.gated_linear(x, self.packed, activation, self.bias)
        return super().gated(x, activation)

    def store(self, states: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
        if cpu_stack.can_store_in_cache(self.packed, kv_cache):
            cpu_stack.linear_into_cache(states, self.packed, self.bias, kv_cache, layer, slots)
        else:
            super().store(states, kv_cache, layer, slots)


class CpuRows(Table):
    """Rows in one piece each, as float32."""

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        self.values = rows.to(dtype).float().contiguous()  # [N, K]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def format(self) -> str:
        return "float32"

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        assert last_tokens is None, "on the CPU the runner resolves them"
        return torch.index_select(self.values, 0, ids)
