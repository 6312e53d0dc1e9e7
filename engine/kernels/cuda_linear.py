"""Matrix products on a GPU: our own kernels for a few bfloat16 rows, cuBLAS for the rest.

A weight is in the dtype of x, or in float8 with a scale for each of its rows. Where a product is our own, the norm
before it and what a layer does with its result can be part of it (csrc/ops/cuda/skinny_linear.h); the other functions
of this file are those of `linear` and its neighbours in engine.kernels.cuda, with the same roundings, in one launch.
Dims as there; N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda, cuda_tiles
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cuda_tiles import TileFormat
from bequest.engine.kernels.hidden_tap import LayerTap, TapArguments, tap_arguments
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.kernels.streams import current_stream
from bequest.engine.kernels.weighed_rows import GainAhead, WeighedRows

# By default torch lets cuBLAS add the parts of a product that it splits in bfloat16, as it may with few rows.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

MOST_STREAMED_ROWS = 4  # csrc/ops/cuda/skinny_linear.h
_CODES_UNIT = 512  # of K, the same
_MOST_GATED = 32768  # csrc/ops/cuda/activation.h: columns that are gated and rounded at once
_BF16 = torch.bfloat16
_BF16_CODE, _FP8_CODE = 1, 2  # csrc/core/dtype.h
_STORE, _ADD, _GATE = range(3)  # SkinnyResult


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A root-mean-square norm of rows: weight [K]. The tap sees the rows before the norm."""

    weight: Tensor
    eps: float
    tap: LayerTap | None = None
    offset: float = 0.0  # of the weight, which a chain of a layer with experts can add; products cannot


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """Rows of bfloat16 that have been rounded, for a weight in float8."""

    codes: Tensor  # [T, K]
    scales: Tensor  # [T] float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device


def tile_format(x: Tensor, weight: Tensor) -> TileFormat | None:
    """How the product of x [T, K] with weight [N, K] is multiplied in tiles (csrc/ops/cuda/tile_linear.h), if it is.
    With a weight in float8 a batch of more rows is rounded to it."""
    if x.dtype is not _BF16:
        return None
    sizes = x.shape[0], weight.shape[0], weight.shape[1]
    formats = (TileFormat.FLOAT8, TileFormat.FLOAT8_ROWS) if weight.dtype is FP8 else (TileFormat.BFLOAT16,)
    return next((each for each in formats if cuda_tiles.is_tile_product(*sizes, each)), None)


def takes_weighed(x: WeighedRows, weight: Tensor) -> bool:
    """Whether the product of the norm of x [T, K] with weight [N, K] is one of what has been left for that norm."""
    return tile_format(x.rows, weight) is TileFormat.BFLOAT16


def is_fused(x: Tensor, weight: Tensor, *, normed: bool = False) -> bool:
    """Whether the product of x [T, K] with weight [N, K] is our own, fused ones too; `normed`: with a norm in front,
    which tiles take only where something has been left for it (`takes_weighed`)."""
    if not normed and tile_format(x, weight) is not None:
        return True
    sizes = x.shape[0], weight.shape[0], weight.shape[1]
    if weight.dtype is FP8 and (x.shape[0] > MOST_STREAMED_ROWS or weight.shape[1] % _CODES_UNIT):
        return False
    return x.dtype is _BF16 and _C.cuda_is_fused_product(*sizes, normed)


def is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether the product itself is our own, where fused ones are not."""
    return x.dtype is _BF16 and _C.cuda_is_skinny_product(x.shape[0], weight.shape[0], weight.shape[1])


def is_rounded(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of x [T, K] with weight [N, K] is of rows in float8: the weight is, and rows are many."""
    if weight.dtype is not FP8 or x.dtype is not _BF16 or len(x) == 0:
        return False
    return tile_format(x, weight) is TileFormat.FLOAT8_ROWS or not is_fused(x, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """x [T, K] · weight [N, K]ᵀ + bias [N] → [T, N]. With a weight in float8 many rows are rounded to it."""
    is_ours = is_fused(x, weight)
    if scales is not None and not is_ours:
        return _scaled_linear(float8_rows(x), weight, scales, bias)
    if not is_ours and not is_skinny(x, weight):
        return F.linear(x, weight, bias)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _multiply(x, weight, bias, out, _STORE, scales=scales)
    return out


def rounded_linear(x: Float8Rows, weight: Tensor, bias: Tensor | None, scales: Tensor) -> Tensor:
    """The same of rows that have been rounded. REQUIRES: is_rounded"""
    if not _is_tiled(x, weight):
        return _scaled_linear(x, weight, scales, bias)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=_BF16, device=x.device)
    _multiply(x, weight, bias, out, _STORE, scales=scales)
    return out


def _is_tiled(x: Float8Rows, weight: Tensor) -> bool:
    return takes_float8_tiles(x.shape[0], weight)


def takes_float8_tiles(num_tokens: int, weight: Tensor) -> bool:
    """Whether so many rows are multiplied with weight [N, K] in tiles, in float8 both."""
    outputs, depth = weight.shape
    return weight.dtype is FP8 and cuda_tiles.is_tile_product(num_tokens, outputs, depth, TileFormat.FLOAT8_ROWS)


def float8_like(x: Tensor) -> Float8Rows:
    """Memory for x [T, K], rounded."""
    codes = torch.empty(x.shape, dtype=FP8, device=x.device)
    return Float8Rows(codes, torch.empty(len(x), dtype=torch.float32, device=x.device))


def float8_rows(x: Tensor) -> Float8Rows:
    """x [T, K], rounded."""
    num_tokens, depth = x.shape
    to = float8_like(x)
    if num_tokens > 0:
        rows = (cuda.address_of(x, _BF16, num_tokens, depth), num_tokens, depth, _BF16_CODE)
        _C.cuda_float8_rows(rows, to.codes.data_ptr(), to.scales.data_ptr(), current_stream())
    return to


def normed_float8_rows(x: Tensor, norm: RowNorm, residual: Tensor | None) -> Float8Rows:
    """norm(x [T, K]), rounded, in one launch; with a residual as `cuda.rms_norm`."""
    num_tokens, depth = x.shape
    to = float8_like(x)
    _C.cuda_rms_norm_float8(
        (cuda.address_of(x, _BF16, num_tokens, depth), num_tokens, depth, _BF16_CODE),
        (cuda.address_of(norm.weight, _BF16, depth), norm.eps, norm.offset),
        0 if residual is None else cuda.address_of(residual, _BF16, num_tokens, depth),
        (to.codes.data_ptr(), to.scales.data_ptr()),
        tap_arguments(norm.tap, num_tokens, depth, _BF16),
        current_stream(),
    )
    return to


def gated_float8_rows(gate_up: Tensor, activation: str) -> Float8Rows:
    """f(gate) * up of gate_up [T, 2 K], rounded, in one launch unless a row is too long for it."""
    num_tokens, doubled = gate_up.shape
    depth = doubled // 2
    if depth > _MOST_GATED:
        return float8_rows(cuda.gated_activation(gate_up, activation))
    to = float8_like(gate_up[:, :depth])
    rows = (cuda.address_of(gate_up, _BF16, num_tokens, doubled), num_tokens, doubled, _BF16_CODE)
    codes = (to.codes.data_ptr(), to.scales.data_ptr())
    _C.cuda_gated_activation(rows, 0, codes, ACTIVATION_CODES[activation], current_stream())
    return to


def _scaled_linear(x: Float8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """By cuBLAS or what torch has beside it. REQUIRES: 16 divides N and K"""
    product = torch._scaled_mm(
        x.codes, weight.t(), x.scales[:, None], scales[None, :], out_dtype=_BF16, use_fast_accum=True
    )
    return product if bias is None else product.add_(bias)


def normed_linear(
    x: Tensor | WeighedRows, norm: RowNorm, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """norm(x [T, K]) · weight [N, K]ᵀ + bias [N] → [T, N]. REQUIRES: is_fused, normed; of rows that have been left for
    the norm takes_weighed"""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=_BF16, device=weight.device)
    _multiply(x, weight, bias, out, _STORE, norm=norm, scales=scales)
    return out


def rounded_gated_linear(x: Float8Rows, weight: Tensor, bias: Tensor | None, activation: str, scales: Tensor) -> Tensor:
    """`gated_linear` of rows that have been rounded. REQUIRES: is_rounded"""
    if not _is_tiled(x, weight):
        return cuda.gated_activation(_scaled_linear(x, weight, scales, bias), activation)
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=_BF16, device=x.device)
    _multiply(x, weight, bias, out, _GATE, activation, scales=scales)
    return out


def gated_linear(
    x: Tensor | WeighedRows,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    norm: RowNorm | None,
    scales: Tensor | None = None,
) -> Tensor:
    """f(gate) * up → [T, I] of the product of x [T, K], normed if there is a norm, with gate and up [2 I, K].

    REQUIRES: is_fused, normed if there is a norm; of rows that have been left for it takes_weighed
    """
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=_BF16, device=weight.device)
    _multiply(x, weight, bias, out, _GATE, activation, norm, scales)
    return out


def linear_into(
    x: Tensor | Float8Rows,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    scales: Tensor | None = None,
    ahead: GainAhead | None = None,
) -> WeighedRows | None:
    """residual [T, N] += x [T, K] · weight [N, K]ᵀ + bias [N]. Returns what it leaves for the norm `ahead`, which tiles
    of weights in bfloat16 do. REQUIRES: is_fused; of rows in float8 takes_float8_tiles"""
    return _multiply(x, weight, bias, residual, _ADD, scales=scales, ahead=ahead)


def _multiply(
    x: Tensor | Float8Rows | WeighedRows,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    result: int,
    activation: str = "silu",
    norm: RowNorm | None = None,
    scales: Tensor | None = None,
    ahead: GainAhead | None = None,
) -> WeighedRows | None:
    num_tokens, depth = x.shape
    num_outputs = weight.shape[0]
    bias_address = 0 if bias is None else cuda.address_of(bias, _BF16, num_outputs)
    stored, scales_address = _BF16, 0
    if scales is not None:
        stored, scales_address = FP8, cuda.address_of(scales, torch.float32, num_outputs)
    product = (cuda.address_of(weight, stored, num_outputs, depth), bias_address, num_outputs, depth, scales_address, 0)
    finish = (result, ACTIVATION_CODES[activation])
    if isinstance(x, WeighedRows):
        return cuda_tiles.multiply(x, product, out, finish, tap=None if norm is None else norm.tap)
    tiles = TileFormat.FLOAT8_ROWS if isinstance(x, Float8Rows) else None if norm else tile_format(x, weight)
    to = cuda.address_of(out, _BF16, num_tokens, num_outputs // 2 if result == _GATE else num_outputs)
    if tiles is TileFormat.FLOAT8_ROWS:
        rounded = x if isinstance(x, Float8Rows) else float8_rows(x)
        rows = (rounded.codes.data_ptr(), num_tokens, depth, _FP8_CODE)
        _C.cuda_float8_tile_linear(rows, rounded.scales.data_ptr(), product, to, finish, current_stream())
        return None
    assert isinstance(x, Tensor)
    if tiles is not None:
        return cuda_tiles.multiply(x, product, out, finish, ahead=ahead if tiles is TileFormat.BFLOAT16 else None)
    normed: tuple[int, float, TapArguments | None] | None = None
    if norm is not None:
        tap = tap_arguments(norm.tap, num_tokens, depth, _BF16)
        normed = (cuda.address_of(norm.weight, _BF16, depth), norm.eps, tap)
    rows = (cuda.address_of(x, _BF16, num_tokens, depth), num_tokens, depth, _BF16_CODE)
    _C.cuda_skinny_linear(rows, product, to, finish, normed, current_stream())
    return None
