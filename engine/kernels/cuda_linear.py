"""Matrix products on a GPU: our own kernels for a few bfloat16 rows, cuBLAS for the rest.

Where a product is our own, the norm before it and what a layer does with its result can be part of it
(csrc/ops/cuda/skinny_linear.h); the other functions of this file are those of `linear` and its neighbours in
engine.kernels.cuda, with the same roundings, in one launch. Dims as there; N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.hidden_tap import LayerTap, tap_arguments
from bequest.engine.kernels.streams import current_stream

# By default torch lets cuBLAS add the parts of a product that it splits in bfloat16, as it may with few rows.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

MOST_STREAMED_ROWS, MOST_FUSED_ROWS, MOST_SKINNY_ROWS = 4, 16, 32  # csrc/ops/cuda/skinny_linear.h
_DEPTH_UNIT = 256
_STORE, _ADD, _GATE = range(3)  # SkinnyResult
# Where our kernels end before cuBLAS: a large weight keeps it busy enough, and beyond the rows that can be fused it is
# slower only where there are few outputs.
_SMALL_WEIGHT, _NARROW_OUTPUTS = 8 << 20, 2048  # elements


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A root-mean-square norm of rows: weight [K]. The tap sees the rows before the norm."""

    weight: Tensor
    eps: float
    tap: LayerTap | None = None


def is_fused(x: Tensor, weight: Tensor, *, normed: bool = False) -> bool:
    """Whether the product of x [T, K] with weight [N, K] is our own, fused ones too; `normed`: with a norm in front."""
    num_tokens, depth = x.shape
    if x.dtype is not torch.bfloat16 or depth % _DEPTH_UNIT != 0:
        return False
    most = MOST_FUSED_ROWS if weight.numel() <= _SMALL_WEIGHT else MOST_STREAMED_ROWS
    if not 0 < num_tokens <= most:
        return False
    return not normed or _C.cuda_skinny_linear_norms(num_tokens, depth)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] · weight [N, K]ᵀ + bias [N] → [T, N]."""
    if not is_fused(x, weight) and not _is_narrow(x, weight):
        return F.linear(x, weight, bias)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _multiply(x, weight, bias, out, _STORE)
    return out


def _is_narrow(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernel of more rows than can be fused is the faster one."""
    num_tokens, depth = x.shape
    few = MOST_FUSED_ROWS < num_tokens <= MOST_SKINNY_ROWS
    narrow = weight.shape[0] < _NARROW_OUTPUTS and weight.numel() <= _SMALL_WEIGHT
    return few and narrow and x.dtype is torch.bfloat16 and depth % _DEPTH_UNIT == 0


def normed_linear(x: Tensor, norm: RowNorm, weight: Tensor, bias: Tensor | None) -> Tensor:
    """norm(x [T, K]) · weight [N, K]ᵀ + bias [N] → [T, N]. REQUIRES: is_fused, normed"""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _multiply(x, weight, bias, out, _STORE, norm=norm)
    return out


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, norm: RowNorm | None) -> Tensor:
    """f(gate) * up → [T, I] of the product of x [T, K], normed if there is a norm, with gate and up [2 I, K].

    REQUIRES: is_fused, normed if there is a norm
    """
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _multiply(x, weight, bias, out, _GATE, activation, norm)
    return out


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """residual [T, N] += x [T, K] · weight [N, K]ᵀ + bias [N]. REQUIRES: is_fused"""
    _multiply(x, weight, bias, residual, _ADD)


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    result: int,
    activation: str = "silu",
    norm: RowNorm | None = None,
) -> None:
    num_tokens, depth = x.shape
    num_outputs = weight.shape[0]
    bf16 = torch.bfloat16
    _C.cuda_skinny_linear(
        cuda.address_of(x, bf16, num_tokens, depth),
        cuda.address_of(weight, bf16, num_outputs, depth),
        0 if bias is None else cuda.address_of(bias, bf16, num_outputs),
        cuda.address_of(out, bf16, num_tokens, num_outputs // 2 if result == _GATE else num_outputs),
        num_tokens,
        num_outputs,
        depth,
        result,
        ACTIVATION_CODES[activation],
        0 if norm is None else cuda.address_of(norm.weight, bf16, depth),
        0.0 if norm is None else norm.eps,
        *tap_arguments(None if norm is None else norm.tap, num_tokens, depth, bf16),
        current_stream(),
    )
