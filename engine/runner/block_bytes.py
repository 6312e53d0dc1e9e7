"""The blocks of a cache in the host's memory as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine.kernels.kv_format import FP8
from bequest.engine.types.blocks import BlockBytes, BlockLayout


def layout_of(kv_cache: Tensor, windows: tuple[int, ...]) -> BlockLayout:
    """`kv_cache`: [NB, L, 2, NKV, BS, D]; windows: of its strips"""
    dtype = "fp8_e4m3" if kv_cache.dtype is FP8 else str(kv_cache.dtype).removeprefix("torch.")
    shape = tuple(kv_cache.shape[1:])
    return BlockLayout(dtype=dtype, shape=shape, num_bytes=kv_cache[0].nbytes, windows=windows)


def bytes_of(cache: Tensor) -> BlockBytes:
    """[NB, bytes of a block], the same memory. REQUIRES: it is not on a device"""
    content: BlockBytes = cache.view(torch.uint8).flatten(1).numpy()
    return content
