"""Layers on the CPU in one call (csrc/model/cpu/layer_stack.h): the parts of a stack as the extension takes them.

Parts hold addresses. Whoever makes them keeps the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cpu import AttentionPlan
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cpu_experts import PackedExperts, RoutingRule
from bequest.engine.kernels.cpu_lora import LoraRows
from bequest.engine.kernels.cpu_weights import STRIP_WIDTH, PackedWeight
from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.kernels.host_arrays import address
from bequest.engine.kernels.kv_format import KV_DTYPE_CODES, KvScales

StackNorm = _C.StackNorm
StackProduct = _C.StackProduct
StackHeads = _C.StackHeads
StackAttention = _C.StackAttention
StackCross = _C.StackCross
StackFeedForward = _C.StackFeedForward
StackExperts = _C.StackExperts
StackMixer = StackAttention | StackCross | StackFeedForward | StackExperts
StackSublayer = _C.StackSublayer
StackStep = _C.StackStep
StackEmbedding = _C.StackEmbedding

_NO_SITE = -1


def norm(weight: Tensor, bias: Tensor | None, eps: float) -> StackNorm:
    """Of rows [T, H]: weight and bias [H] float32; without a bias by the root mean square."""
    (hidden,) = weight.shape
    return StackNorm(_address(weight, hidden), _address(bias, hidden), eps)


def product(weight: PackedWeight, bias: Tensor | None, site: int | None = None) -> StackProduct:
    """[T, K] → [T, N], bias [N] float32. `site`: what adapters know it by."""
    bias_address, number = _address(bias, weight.out_features), _NO_SITE if site is None else site
    return StackProduct(weight._address, weight.number, bias_address, weight.out_features, weight.in_features, number)


def experts(
    router: StackProduct,
    rule: RoutingRule,
    up: PackedExperts,
    activation: str,
    down: PackedExperts,
    shared: tuple[StackFeedForward, StackProduct | None] | None,
) -> StackExperts:
    """up [E, 2 I, H], down [E, H, I]; `shared` is what all tokens take, and its gate [1, H]."""
    return StackExperts(router, rule, up._matrices, ACTIVATION_CODES[activation], down._matrices, shared)


def heads(num_heads: int, scale: float, cache_layer: int, strip: int, scales: KvScales) -> StackHeads:
    """`strip`: which of the step's plans and slots; the scales of an fp8 cache."""
    made = StackHeads()
    made.num_heads, made.cache_layer, made.strip = num_heads, cache_layer, strip
    made.scale, made.value_scale = scale * scales.key, scales.value
    made.key_factor, made.value_factor = 1 / scales.key, 1 / scales.value
    return made


def set_head_norms(of: StackHeads, q_weight: Tensor, k_weight: Tensor, eps: float, *, over_rows: bool) -> None:
    """Weights [D] float32, or over the heads of a token at once [NQ D] and [NKV D]."""
    of.q_norm, of.k_norm = (_address(weight, weight.shape[0]) for weight in (q_weight, k_weight))
    of.norm_eps, of.norms_rows = eps, over_rows


def set_rope(of: StackHeads, cos_sin: Tensor) -> None:
    """[P, R] float32"""
    of.cos_sin = _rows(cos_sin)
    of.num_positions, of.rotary_dim = cos_sin.shape


def set_query_scales(of: StackHeads, scales: Tensor) -> None:
    """[P] float32"""
    of.query_scales = _address(scales, of.num_positions)


def set_bias(of: StackHeads, bias: Tensor) -> None:
    """[NQ, 2 R + 1] float32"""
    assert bias.shape[0] == of.num_heads and bias.shape[1] % 2 == 1, bias.shape
    of.bias, of.bias_reach = _rows(bias), bias.shape[1] // 2


def set_sinks(of: StackHeads, sinks: Tensor) -> None:
    """[NQ] float32"""
    of.sinks = _address(sinks, of.num_heads)


def step(
    slots: Sequence[Tensor], kv_cache: Tensor, plans: Sequence[AttentionPlan], cross: AttentionPlan | None = None
) -> StackStep:
    """slots [T] int64 of kv_cache [NB, L, 2, NKV, BS, D] and plans, of each strip."""
    num_blocks, num_layers, two, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert two == 2 and kv_cache.is_contiguous()
    assert all(of.dtype is torch.int64 and of.is_contiguous() and of.shape == slots[0].shape for of in slots)
    made = StackStep()
    made.num_tokens = slots[0].shape[0]
    made.set_slots([of.data_ptr() for of in slots])
    sizes = (num_blocks, num_layers, num_kv_heads, block_size, head_dim)
    made.set_cache(kv_cache.data_ptr(), KV_DTYPE_CODES[kv_cache.dtype], sizes)
    made.set_plans([plan._plan for plan in plans], None if cross is None else cross._plan)
    return made


def set_positions(of: StackStep, positions: Tensor) -> None:
    """[T] int32"""
    assert positions.dtype is torch.int32 and positions.is_contiguous() and positions.shape == (of.num_tokens,)
    of.positions = positions.data_ptr()


def set_read(of: StackStep, rows: Tensor, plan: AttentionPlan) -> None:
    """rows [R] int64, ascending; the plan is of these queries."""
    assert rows.dtype is torch.int64 and rows.is_contiguous() and plan.num_tokens == rows.shape[0]
    of.set_read(rows.data_ptr(), rows.shape[0], plan._plan)


def set_tap(of: StackStep, tap: HiddenTap, hidden: int) -> None:
    assert tap.shape == (of.num_tokens, hidden) and tap.ring.dtype is torch.float32, tap
    of.set_tap(tap.addresses)


def set_adapters(of: StackStep, rows: LoraRows) -> None:
    """Of the step's T rows."""
    of.set_adapters(rows._rows)


def embedding(ids: Tensor, table: PackedWeight, factor: float, rows: Tensor | None) -> StackEmbedding:
    """Rows ids int32 [T] of the table [V, H] times a factor, and rows float32 [P, H] by position that are added."""
    assert ids.dtype is torch.int32 and ids.is_contiguous()
    added, count = 0, 0
    if rows is not None:
        assert rows.shape[1] == table.in_features, rows.shape
        added, count = _rows(rows), rows.shape[0]
    return StackEmbedding(ids.data_ptr(), table._matrix, factor, added, count)


class LayerStack:
    """Layers that `run` runs over a stream [T, H]."""

    def __init__(self, hidden: int, *, narrows: bool) -> None:
        """`narrows`: of the rows that are read alone, the last layer's attention leaves these."""
        self._hidden = hidden
        self._stack = _C.LayerStack(hidden, narrows)

    def add(self, index: int, sublayers: Sequence[StackSublayer]) -> None:
        self._stack.add(index, list(sublayers))

    def run(
        self, step: StackStep, total: Tensor, added: Tensor | None, experts_read: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Over the stream total + added, [T, H] float32 each, changed in place. Returns what they are then. How many
        experts all layers read is added to experts_read [1] int64."""
        pending = added is not None
        added = torch.empty_like(total) if added is None else added
        for rows in (total, added):
            assert rows.dtype is torch.float32 and rows.is_contiguous(), rows.dtype
            assert rows.shape == (step.num_tokens, self._hidden), rows.shape
        stream = _C.StackStream(total.data_ptr(), added.data_ptr(), pending, total.shape[0])
        self._stack.run(step, stream, None)
        _count(stream, experts_read)
        return total[: stream.num_rows], added[: stream.num_rows] if stream.pending else None

    def run_from(
        self, step: StackStep, start: StackEmbedding, experts_read: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The same over a stream that begins with these rows, one for each token."""
        # Of numpy: torch lets go of the GIL for every array it makes, and whoever takes it then keeps it for longer
        # than all of this lasts.
        total, added = np.empty((2, step.num_tokens, self._hidden), np.float32)
        stream = _C.StackStream(address(total), address(added), False, step.num_tokens)
        self._stack.run(step, stream, start)
        _count(stream, experts_read)
        left = stream.num_rows
        return torch.from_numpy(total)[:left], torch.from_numpy(added)[:left] if stream.pending else None


def _count(stream: _C.StackStream, experts_read: Tensor | None) -> None:
    if experts_read is not None and stream.num_experts_read:
        experts_read += stream.num_experts_read


def linear_into_cache(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    kv_cache: Tensor,
    layer: int,
    slots: Tensor,
    out: Tensor | None = None,
) -> None:
    """x [T, K] · weightᵀ + bias, the last columns of which are keys and values of slots [T] in the cache.

    What `linear` and `write_kv` do; columns before the keys go to `out` [T, N - 2 NKV D]. REQUIRES: can_store_in_cache
    """
    num_tokens, width = x.shape
    num_out = weight.out_features - 2 * kv_cache.shape[3] * kv_cache.shape[5]
    assert can_store_in_cache(weight, kv_cache) and slots.shape == (num_tokens,), weight
    assert x.dtype is torch.float32 and x.is_contiguous() and width == weight.in_features, x.shape
    if out is not None:
        assert out.dtype is torch.float32 and out.is_contiguous() and out.shape == (num_tokens, num_out), out.shape
    assert out is not None or num_out == 0
    written = 0 if out is None else out.data_ptr()
    _C.linear_into_cache(x.data_ptr(), product(weight, bias), written, layer, step((slots,), kv_cache, ()))


def can_store_in_cache(weight: PackedWeight, kv_cache: Tensor) -> bool:
    """Whether the units can store keys and values [NB, L, 2, NKV, BS, D] as they come."""
    num_kv_heads, head_dim = kv_cache.shape[3], kv_cache.shape[5]
    num_out = weight.out_features - 2 * num_kv_heads * head_dim
    fits = num_out % STRIP_WIDTH == 0 and head_dim % STRIP_WIDTH == 0
    return weight.tiles and kv_cache.dtype is torch.bfloat16 and fits


def _address(values: Tensor | None, count: int) -> int:
    if values is None:
        return 0
    assert values.dtype is torch.float32 and values.is_contiguous() and values.shape == (count,), values.shape
    return values.data_ptr()


def _rows(values: Tensor) -> int:
    assert values.dtype is torch.float32 and values.is_contiguous() and values.dim() == 2, values.shape
    return values.data_ptr()
