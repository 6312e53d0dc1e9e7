"""The layers of a stack on the CPU, in one call: what is between two kernels would take as long as small ones do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cpu import AttentionPlan
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cpu_weights import STRIP_WIDTH, PackedWeight
from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.kernels.host_arrays import address
from bequest.engine.kernels.kv_format import KV_DTYPE_CODES

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
class StackEmbedding:
    """Rows of a table, and rows of another one that are added to them."""

    ids: Tensor  # [T] int32
    table: PackedWeight  # [V, H]
    positions: Tensor  # [T] int32
    rows: Tensor | None  # [P, H] float32


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
        self._run(added.data_ptr(), total.data_ptr(), num_tokens, cache, tap, None)

    def embed_and_run(
        self, embedding: StackEmbedding, cache: StackCache, tap: HiddenTap | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same over the stream that begins with the rows of tables: what it leaves, (added, total)."""
        ids, positions = embedding.ids, embedding.positions
        num_tokens = ids.shape[0]
        for numbers in (ids, positions):
            assert numbers.dtype is torch.int32 and numbers.is_contiguous() and numbers.shape == (num_tokens,)
        assert embedding.table.in_features == self._hidden
        # Of numpy: torch lets go of the GIL for every array it makes, and whoever takes it then keeps it for longer
        # than all of this lasts.
        added, total = np.empty((2, num_tokens, self._hidden), np.float32)
        rows = embedding.rows
        if rows is not None:
            assert rows.dtype is torch.float32 and rows.is_contiguous() and rows.shape[1] == self._hidden
        described = (
            ids.data_ptr(),
            embedding.table._address,
            embedding.table._format,
            embedding.table.out_features,
            positions.data_ptr(),
            0 if rows is None else rows.data_ptr(),
            0 if rows is None else rows.shape[0],
        )
        self._run(address(added), address(total), num_tokens, cache, tap, described)
        return torch.from_numpy(added), torch.from_numpy(total)

    def _run(
        self,
        added: int,
        total: int,
        num_tokens: int,
        cache: StackCache,
        tap: HiddenTap | None,
        embedding: tuple[int, int, int, int, int, int, int] | None,
    ) -> None:
        num_blocks, num_layers, two, num_kv_heads, block_size, head_dim = cache.kv_cache.shape
        assert two == 2 and cache.kv_cache.is_contiguous() and cache.slots.shape == (num_tokens,)
        assert cache.slots.dtype is torch.int64 and cache.slots.is_contiguous()
        assert tap is None or tap.shape == (num_tokens, self._hidden), tap
        bias = cache.bias
        self._stack.run(
            added,
            total,
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
            embedding,
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
