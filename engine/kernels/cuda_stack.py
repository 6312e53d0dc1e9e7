"""All layers of a step of one bfloat16 row in one launch (csrc/model/cuda/row_stack.h).

Dims: H hidden, I inner; NQ and NKV heads of D; P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cuda import address_of
from bequest.engine.kernels.cuda_attention import CudaAttentionPlan
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap, tap_arguments
from bequest.engine.kernels.kv_view import view_of
from bequest.engine.kernels.streams import current_stream

KEY_TILE = 16  # csrc/model/cuda/row_stack.cuh: blocks hold a multiple of so many tokens
_BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class StackedLayer:
    attention_norm: Tensor  # [H]
    qkv: Tensor  # [(NQ + 2 NKV) D, H]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    output: Tensor  # [H, NQ D]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H], the gate's rows and then those of up
    down: Tensor  # [H, I]
    cache_layer: int
    index: int  # which hidden state it begins with

    @property
    def addresses(self) -> _C.RowStackLayer:
        matrices = (self.attention_norm, self.qkv, self.q_norm, self.k_norm)
        others = (self.output, self.mlp_norm, self.gate_up, self.down)
        first = tuple(0 if each is None else each.data_ptr() for each in matrices)
        return (*first, *(each.data_ptr() for each in others), self.cache_layer, self.index)


@dataclass(frozen=True, slots=True)
class StackShape:
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def arguments(self) -> _C.RowStackShape:
        return self.hidden, self.inner, self.q_heads, self.kv_heads, self.head_dim


@dataclass(frozen=True, slots=True)
class StackRule:
    """What all layers have in common."""

    eps: float
    head_eps: float
    activation: str
    scale: float  # of scores
    rope: Tensor  # [P, D] float32


def has_kernel(shape: StackShape) -> bool:
    """On the current device."""
    return _C.cuda_can_stack_row(shape.arguments)


def make_scratch(device: torch.device) -> Tensor:
    """For stacks of one stream."""
    return torch.zeros(_C.cuda_row_stack_scratch_bytes, dtype=torch.uint8, device=device)


class RowStack:
    """Layers of one shape, and their table on the device. REQUIRES: has_kernel; matrices are dense, in bfloat16"""

    def __init__(self, shape: StackShape, rule: StackRule, layers: Sequence[StackedLayer], scratch: Tensor) -> None:
        self._shape, self._rule, self._layers, self._scratch = shape, rule, layers, scratch
        self._addresses: list[_C.RowStackLayer] = []
        num_bytes = _C.cuda_row_stack_table_bytes(len(layers))
        self._table = torch.empty(num_bytes, dtype=torch.uint8, device=scratch.device)
        for layer in layers:
            self._check(layer)

    def _check(self, layer: StackedLayer) -> None:
        shape = self._shape
        attended, hidden, inner = shape.q_heads * shape.head_dim, shape.hidden, shape.inner
        address_of(layer.qkv, _BF16, attended + 2 * shape.kv_heads * shape.head_dim, hidden)
        address_of(layer.output, _BF16, hidden, attended)
        address_of(layer.gate_up, _BF16, 2 * inner, hidden)
        address_of(layer.down, _BF16, hidden, inner)
        address_of(layer.attention_norm, _BF16, hidden)
        address_of(layer.mlp_norm, _BF16, hidden)
        for norm in (layer.q_norm, layer.k_norm):
            assert norm is None or address_of(norm, _BF16, shape.head_dim)

    def is_ready(self) -> bool:
        """Whether the table has the addresses that weights have now, which change when a model has slept. It is
        written anew unless a graph is captured, which would take the copy for its own."""
        addresses = [layer.addresses for layer in self._layers]
        if addresses == self._addresses:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        table = torch.empty_like(self._table, device="cpu")
        _C.cuda_write_row_stack_table(self._shape.arguments, addresses, table.data_ptr())
        self._table.copy_(table)
        self._addresses = addresses
        return True

    def takes(self, kv_cache: Tensor, plan: CudaAttentionPlan) -> bool:
        """Whether there is a kernel for a step's only token over this cache."""
        is_plain = kv_cache.dtype is _BF16 and kv_cache.shape[4] % KEY_TILE == 0
        return is_plain and plan.single_token and self._takes_heads(kv_cache)

    def _takes_heads(self, kv_cache: Tensor) -> bool:
        return kv_cache.shape[3] == self._shape.kv_heads and kv_cache.shape[5] == self._shape.head_dim

    def run(
        self,
        residual: Tensor,
        kv_cache: Tensor,
        plan: CudaAttentionPlan,
        slot_mapping: Tensor,
        positions: Tensor,
        tap: HiddenTap | None,
    ) -> None:
        """Changes the residual [1, H]. slot_mapping int64 [1]; positions int32 [1]: the token's place in its sequence.
        REQUIRES: is_ready; takes"""
        rule, hidden = self._rule, self._shape.hidden
        tapped = None if tap is None else tap_arguments(LayerTap(tap, 0), 1, hidden, _BF16)
        scratch = address_of(self._scratch, torch.uint8, _C.cuda_row_stack_scratch_bytes)
        token = (
            address_of(positions, torch.int32, 1),
            address_of(slot_mapping, torch.int64, 1),
            plan.block_tables.data_ptr(),
            plan.work_list.data_ptr(),
        )
        rope = address_of(rule.rope, torch.float32, *rule.rope.shape)
        _C.cuda_row_stack(
            self._shape.arguments,
            (self._table.data_ptr(), len(self._layers), scratch),
            (address_of(residual, _BF16, 1, hidden), tapped),
            (rule.eps, rule.head_eps, ACTIVATION_CODES[rule.activation], rule.scale, rope),
            (view_of(kv_cache).bound, token),
            current_stream(),
        )
