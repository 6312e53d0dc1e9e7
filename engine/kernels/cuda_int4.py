"""Weights in codes of 4 bits on a GPU, in groups along their rows (csrc/model/cuda/skinny_chain.h).

Up to four rows of x are multiplied in the chain, or by its kernel alone; for more see engine.kernels.cuda_coded. The
scales of CodedRows are words here: a float32 with the zero in its last 8 bits for each group, filled up to a multiple
of 32. Dims: N outputs, K inputs, T rows of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cuda_chain import MOST_CHAINED_ROWS, Product
from bequest.engine.kernels.cuda_coded import CodedRows

_STAGE_GROUPS = 32  # rows of groups are filled up to a multiple
_MOST_ZERO = 63


def product(rows: CodedRows, bias: Tensor | None = None, site: int | None = None) -> Product:
    """As the chain takes it."""
    return Product(rows.codes, bias, groups=rows.scales, site=site)


def most_rows(depth: int) -> int:
    """That the kernel of the chain multiplies; 0: it does not take rows of this depth."""
    return MOST_CHAINED_ROWS if _C.cuda_can_chain_linear(depth, 4) else 0


def pack(codes: Tensor, scales: Tensor, zeros: Tensor) -> CodedRows:
    """Of codes [N, K] uint8, scales [N, K / 128] float32 and zeros [N, K / 128], all on one device. Scales keep 16 bits
    of their mantissas: those of float16 and bfloat16 are exact."""
    num_rows, depth = codes.shape
    k = codes.view(num_rows, depth // 8, 8)
    low, high = k[..., [0, 4, 1, 5]], k[..., [2, 6, 3, 7]]
    bits = (scales.float().contiguous().view(torch.int32) + 0x80) & ~0xFF
    count = scales.shape[1]
    groups = torch.zeros(num_rows, -(-count // _STAGE_GROUPS) * _STAGE_GROUPS, dtype=torch.int32, device=codes.device)
    groups[:, :count] = bits | zeros.int()
    return CodedRows((low | high << 4).view(num_rows, depth // 2), groups)


def can_pack(zeros: Tensor) -> bool:
    return bool((zeros >= 0).all()) and bool((zeros <= _MOST_ZERO).all())
