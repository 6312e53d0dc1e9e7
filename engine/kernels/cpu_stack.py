"""The layers of a stack on the CPU, in one call: what is between two kernels would take as long as small ones do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import _C
from engine.kernels.cpu import AttentionPlan
from engine.kernels.cpu_activations import ACTIVATION_CODES
from engine.kernels.cpu_weights import STRIP_WIDTH, PackedWeight
from engine.kernels.hidden_tap import HiddenTap
from engine.kernels.kv_format import KV_DTYPE_CODES

_NO_TAP = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class StackNorm:
    weight: Tensor  # [H] float32
    bias: Tensor | None  # [H] of a layer norm; None: a root-mean-square norm
    eps: float


@dataclass(frozen=True, slots=True)
class StackProduct:
    weight: PackedWeight  # [N, K]
    bias: Tensor | None  # [N] float32


@dataclass(frozen=True, slots=True)
class StackCache:
    """Where a step's keys and values go, and what its queries see of them."""

    kv_cache: Tensor  # [NB, L, 2, NQ, BS, D]; an encoder's has one layer, which all of its layers use in turns
    slots: Tensor  # [T] int64
    attention: AttentionPlan
    cross: AttentionPlan | None = None  # of a decoder: the same queries over cross tables in the same cache
    bias: Tensor | None = None  # [NQ, 2 R + 1] float32 on the scores of self attention


class LayerStack:
    """Layers whose norms stand before self attention, cross attention (a decoder's) and a feed-forward layer.

    Gives, to the bit, what the kernels give when they are called one by one.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        head_dim: int,
        scale: float,
        activation: str,
        gated: bool,
        has_cross: bool,
    ) -> None:
        self._hidden = hidden
        code = ACTIVATION_CODES[activation]
        self._stack = _C.LayerStack(hidden, num_heads, head_dim, scale, code, gated, has_cross)
        self._parts: list[StackNorm | StackProduct] = []  # the stack has their addresses

    def add(self, norms: Sequence[StackNorm], products: Sequence[StackProduct]) -> None:
        """A layer: a norm for each sublayer, and two products: query, key and value [3 NQ D, H] and output; queries and
        output of cross attention; up [I, H], or gate and up [2 I, H], and down."""
        self._parts += [*norms, *products]
        self._stack.add(
            [(norm.weight.data_ptr(), _address(norm.bias, self._hidden), norm.eps) for norm in norms],
            [_description(product) for product in products],
        )

    def run(self, added: Tensor, total: Tensor, cache: StackCache, tap: HiddenTap | None = None) -> None:
        """All layers over the stream total + added, [T, H] float32 each, which is then what the last layer leaves.

        The tap stores the states that layers begin with.
        """
        num_tokens = added.shape[0]
        for rows in (added, total):
            assert rows.dtype is torch.float32 and rows.is_contiguous() and rows.shape == (num_tokens, self._hidden)
        num_blocks, num_layers, two, num_kv_heads, block_size, head_dim = cache.kv_cache.shape
        assert two == 2 and cache.kv_cache.is_contiguous() and cache.slots.shape == (num_tokens,)
        assert cache.slots.dtype is torch.int64 and cache.slots.is_contiguous()
        assert tap is None or tap.shape == (num_tokens, self._hidden), tap
        bias = cache.bias
        self._stack.run(
            added.data_ptr(),
            total.data_ptr(),
            num_tokens,
            cache.slots.data_ptr(),
            cache.kv_cache.data_ptr(),
            KV_DTYPE_CODES[cache.kv_cache.dtype],
            (num_blocks, num_layers, num_kv_heads, block_size, head_dim),
            cache.attention._plan,
            None if cache.cross is None else cache.cross._plan,
            0 if bias is None else bias.data_ptr(),
            0 if bias is None else bias.shape[1] // 2,
            _NO_TAP if tap is None else tap.addresses,
        )


def linear_into_cache(
    x: Tensor, product: StackProduct, kv_cache: Tensor, layer: int, slots: Tensor, out: Tensor | None = None
) -> None:
    """x [T, K] · weightᵀ + bias, the last columns of which are keys and values of slots [T] in the cache.

    What `linear` and `write_kv` do; columns before the keys go to `out` [T, N - 2 NKV D]. REQUIRES: can_store_in_cache
    """
    num_tokens, width = x.shape
    num_blocks, num_layers, two, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_out = product.weight.out_features - 2 * num_kv_heads * head_dim
    assert two == 2 and kv_cache.is_contiguous() and can_store_in_cache(product.weight, kv_cache), product.weight
    assert x.dtype is torch.float32 and x.is_contiguous() and width == product.weight.in_features, x.shape
    assert slots.dtype is torch.int64 and slots.is_contiguous() and slots.shape == (num_tokens,)
    if out is not None:
        assert out.dtype is torch.float32 and out.is_contiguous() and out.shape == (num_tokens, num_out), out.shape
    assert out is not None or num_out == 0
    _C.linear_into_cache(
        x.data_ptr(),
        _description(product),
        0 if out is None else out.data_ptr(),
        num_tokens,
        num_out,
        slots.data_ptr(),
        kv_cache.data_ptr(),
        (num_blocks, num_layers, num_kv_heads, block_size, head_dim),
        layer,
    )


def can_store_in_cache(weight: PackedWeight, kv_cache: Tensor) -> bool:
    """Whether the units can store keys and values [NB, L, 2, NKV, BS, D] as they come."""
    num_kv_heads, head_dim = kv_cache.shape[3], kv_cache.shape[5]
    num_out = weight.out_features - 2 * num_kv_heads * head_dim
    fits = num_out % STRIP_WIDTH == 0 and head_dim % STRIP_WIDTH == 0
    return weight.tiles and kv_cache.dtype is torch.bfloat16 and fits


def _description(product: StackProduct) -> tuple[int, int, int, int, int]:
    weight = product.weight
    bias = _address(product.bias, weight.out_features)
    return weight._address, weight._format, bias, weight.out_features, weight.in_features


def _address(values: Tensor | None, count: int) -> int:
    if values is None:
        return 0
    assert values.dtype is torch.float32 and values.is_contiguous() and values.shape == (count,), values.shape
    return values.data_ptr()
