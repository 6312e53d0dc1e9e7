"""Products of a batch of rows in tiles (csrc/ops/cuda/tile_linear.h). Dims: T rows, N outputs, K inputs."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda
from bequest.engine.kernels.hidden_tap import LayerTap, tap_arguments
from bequest.engine.kernels.streams import current_stream
from bequest.engine.kernels.weighed_rows import SQUARED, GainAhead, WeighedRows, weighed_like

_BF16 = torch.bfloat16
_BF16_CODE = 1  # csrc/core/dtype.h


class TileFormat(IntEnum):
    """What is multiplied: the weight, and rows where these are not in bfloat16."""

    BFLOAT16, FLOAT8, FLOAT8_ROWS, INT4 = range(4)


def is_tile_product(num_tokens: int, outputs: int, depth: int, format: TileFormat) -> bool:
    """Of rows [T, K] with a weight [N, K]."""
    return _C.cuda_is_tile_product(num_tokens, outputs, depth, format)


def multiply(
    x: Tensor | WeighedRows,
    product: _C.Product,
    out: Tensor,
    finish: tuple[int, int],
    *,
    tap: LayerTap | None = None,
    ahead: GainAhead | None = None,
) -> WeighedRows | None:
    """x [T, K] · Wᵀ, stored in or added to out [T, N], or gated to [T, N / 2]; `finish`: a SkinnyResult and its
    activation. The tap sees rows before their norm. Returns what is left of the sums for the norm `ahead`."""
    num_tokens, depth = x.shape
    norm: _C.WeighedNorm | None = None
    if isinstance(x, WeighedRows):
        squares = cuda.address_of(x.squares, torch.float32, num_tokens, depth // SQUARED)
        before = cuda.address_of(x.before, _BF16, num_tokens, depth)
        norm = (squares, x.eps, before, tap_arguments(tap, num_tokens, depth, _BF16))
        x = x.rows
    left: WeighedRows | None = None
    leaving: _C.NormAhead | None = None
    if ahead is not None:
        left = weighed_like(out, ahead)
        gain = cuda.address_of(ahead.weight, _BF16, out.shape[1])
        leaving = (gain, ahead.offset, left.rows.data_ptr(), left.squares.data_ptr())
    matrix = (cuda.address_of(x, _BF16, num_tokens, depth), num_tokens, depth, _BF16_CODE)
    to = cuda.address_of(out, _BF16, *out.shape)
    _C.cuda_tile_linear(matrix, product, to, finish, (norm, leaving), current_stream())
    return left
