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
from bequest.engine.kernels.hidden_tap import LayerTap, TapArguments, tap_arguments
from bequest.engine.kernels.streams import current_stream

# By default torch lets cuBLAS add the parts of a product that it splits in bfloat16, as it may with few rows.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

MOST_STREAMED_ROWS = 4  # csrc/ops/cuda/skinny_linear.h
_BF16 = torch.bfloat16
_BF16_CODE = 1  # csrc/core/dtype.h
_STORE, _ADD, _GATE = range(3)  # SkinnyResult


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A root-mean-square norm of rows: weight [K]. The tap sees the rows before the norm."""

    weight: Tensor
    eps: float
    tap: LayerTap | None = None


def is_fused(x: Tensor, weight: Tensor, *, normed: bool = False) -> bool:
    """Whether the product of x [T, K] with weight [N, K] is our own, fused ones too; `normed`: with a norm in front."""
    return x.dtype is _BF16 and _C.cuda_is_fused_product(x.shape[0], weight.shape[0], weight.shape[1], normed)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] · weight [N, K]ᵀ + bias [N] → [T, N]."""
    if x.dtype is not _BF16 or not _C.cuda_is_skinny_product(x.shape[0], weight.shape[0], weight.shape[1]):
        return F.linear(x, weight, bias)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _multiply(x, weight, bias, out, _STORE)
    return out


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
    bias_address = 0 if bias is None else cuda.address_of(bias, _BF16, num_outputs)
    normed: tuple[int, float, TapArguments | None] | None = None
    if norm is not None:
        tap = tap_arguments(norm.tap, num_tokens, depth, _BF16)
        normed = (cuda.address_of(norm.weight, _BF16, depth), norm.eps, tap)
    _C.cuda_skinny_linear(
        (cuda.address_of(x, _BF16, num_tokens, depth), num_tokens, depth, _BF16_CODE),
        (cuda.address_of(weight, _BF16, num_outputs, depth), bias_address, num_outputs, depth, 0),
        cuda.address_of(out, _BF16, num_tokens, num_outputs // 2 if result == _GATE else num_outputs),
        (result, ACTIVATION_CODES[activation]),
        normed,
        current_stream(),
    )
