"""Weights in codes of 4 bits on a GPU, in groups along their rows (csrc/model/cuda/skinny_chain.h).

Few rows of x are multiplied with the codes, in the chain or by its kernel alone; for many rows the weight becomes
bfloat16 on its way. Dims: N outputs, K inputs, T rows of x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cuda_chain import MOST_CHAINED_ROWS, Product
from bequest.engine.kernels.streams import current_stream

GROUP = 128  # values of a row that share a scale
_STAGE_GROUPS = 32  # rows of groups are filled up to a multiple
_MOST_ZERO = 63
_BF16 = torch.bfloat16
_BF16_CODE = 1  # csrc/core/dtype.h
_STORE, _ADD, _GATE = range(3)  # SkinnyResult


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """value = scale · (code - zero). As kernels read it."""

    codes: Tensor  # [N, K / 2] uint8
    groups: Tensor  # [N, K / 128 filled up] int32: float32 scales with zeros in their last 8 bits

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    @property
    def depth(self) -> int:
        return 2 * self.codes.shape[1]

    def product(self, bias: Tensor | None, site: int | None) -> Product:
        return Product(self.codes, bias, groups=self.groups, site=site)


def has_kernel(depth: int) -> bool:
    return _C.cuda_can_chain_linear(depth, 4)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor) -> Int4Rows:
    """Of codes [N, K] uint8, scales [N, K / 128] float32 and zeros [N, K / 128], all on one device. Scales keep 16 bits
    of their mantissas: those of float16 and bfloat16 are exact."""
    num_rows, depth = codes.shape
    k = codes.view(num_rows, depth // 8, 8)
    low, high = k[..., [0, 4, 1, 5]], k[..., [2, 6, 3, 7]]
    bits = (scales.float().contiguous().view(torch.int32) + 0x80) & ~0xFF
    count = scales.shape[1]
    groups = torch.zeros(num_rows, -(-count // _STAGE_GROUPS) * _STAGE_GROUPS, dtype=torch.int32, device=codes.device)
    groups[:, :count] = bits | zeros.int()
    return Int4Rows((low | high << 4).view(num_rows, depth // 2), groups)


def can_pack(zeros: Tensor) -> bool:
    return bool((zeros >= 0).all()) and bool((zeros <= _MOST_ZERO).all())


def numbers(rows: Int4Rows) -> Tensor:
    """[N, K] bfloat16"""
    out = torch.empty(rows.num_rows, rows.depth, dtype=_BF16, device=rows.codes.device)
    product = rows.product(None, None).arguments(rows.num_rows, rows.depth)
    _C.cuda_int4_rows(product, rows.groups.shape[1], out.data_ptr(), current_stream())
    return out


def is_few(x: Tensor) -> bool:
    return 0 < x.shape[0] <= MOST_CHAINED_ROWS


def linear(x: Tensor, rows: Int4Rows, bias: Tensor | None, scratch: Tensor) -> Tensor:
    """x [T, K] · Wᵀ + bias [N] → [T, N]"""
    if not is_few(x):
        return F.linear(x, numbers(rows), bias)
    out = torch.empty(x.shape[0], rows.num_rows, dtype=_BF16, device=x.device)
    _multiply(x, rows, bias, out, (_STORE, 0), scratch)
    return out


def gated_linear(x: Tensor, rows: Int4Rows, bias: Tensor | None, activation: str, scratch: Tensor) -> Tensor:
    """f(gate) * up → [T, N / 2] of gate and up in one weight. REQUIRES: is_few"""
    out = torch.empty(x.shape[0], rows.num_rows // 2, dtype=_BF16, device=x.device)
    _multiply(x, rows, bias, out, (_GATE, ACTIVATION_CODES[activation]), scratch)
    return out


def linear_into(x: Tensor, rows: Int4Rows, bias: Tensor | None, residual: Tensor, scratch: Tensor) -> None:
    """residual [T, N] += x [T, K] · Wᵀ + bias [N]. REQUIRES: is_few"""
    _multiply(x, rows, bias, residual, (_ADD, 0), scratch)


def _multiply(
    x: Tensor, rows: Int4Rows, bias: Tensor | None, out: Tensor, finish: tuple[int, int], scratch: Tensor
) -> None:
    num_tokens, depth = x.shape
    _C.cuda_chained_linear(
        (cuda.address_of(x, _BF16, num_tokens, depth), num_tokens, depth, _BF16_CODE),
        rows.product(bias, None).arguments(rows.num_rows, depth),
        cuda.address_of(out, _BF16, *out.shape),
        finish,
        cuda.address_of(scratch, torch.uint8, _C.cuda_chain_scratch_bytes),
        current_stream(),
    )
