"""Attention within windows of an image on a GPU, and within all of it: csrc/attention/cuda/windows.h, whole_image.h."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cuda import address_of
from bequest.engine.kernels.streams import current_stream

_HEAD_DIM, _LONGEST = 80, 64  # that there is a kernel for


def has_kernel(dtype: torch.dtype, head_dim: int, longest: int) -> bool:
    """`longest`: patches of a window"""
    return dtype is torch.bfloat16 and head_dim == _HEAD_DIM and longest <= _LONGEST


def attend_windows(qkv: Tensor, begin: Tensor, cos_sin: Tensor) -> Tensor:
    """qkv [N, 3, NH, D]: queries, keys and values, of which the first two turn by cos_sin float32 [N, D] (cosines, then
    sines) → [N, NH, D]. Patches from begin[i] to begin[i + 1] see each other; begin int32 [W + 1].

    REQUIRES: has_kernel
    """
    count, _, num_heads, head_dim = qkv.shape
    out = qkv.new_empty(count, num_heads, head_dim)
    _C.cuda_attend_windows(
        address_of(qkv, torch.bfloat16, count, 3, num_heads, head_dim),
        address_of(begin, torch.int32, len(begin)),
        address_of(cos_sin, torch.float32, count, head_dim),
        out.data_ptr(),
        (len(begin) - 1, num_heads, head_dim**-0.5),
        current_stream(),
    )
    return out


@cache
def has_image_kernel(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype is torch.bfloat16 and _C.cuda_can_attend_image(head_dim)


def attend_image(qkv: Tensor) -> Tensor:
    """The same where all patches see each other, and queries and keys are turned.

    REQUIRES: has_image_kernel
    """
    count, _, num_heads, head_dim = qkv.shape
    out = qkv.new_empty(count, num_heads, head_dim)
    _C.cuda_attend_image(
        address_of(qkv, torch.bfloat16, count, 3, num_heads, head_dim),
        out.data_ptr(),
        (count, num_heads, head_dim, head_dim**-0.5),
        current_stream(),
    )
    return out
