"""The blocks of a cache, and states, in the host's memory as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.types import StepMoves
from bequest.engine.types.blocks import BlockBytes, BlockLayout


def layout_of(kv_cache: Tensor, windows: tuple[int, ...], states: Tensor | None) -> BlockLayout:
    """`kv_cache`: [NB, L, 2, NKV, BS, D]; windows: of its strips; `states`: [NS, LR, E]"""
    dtype = "fp8_e4m3" if kv_cache.dtype is FP8 else str(kv_cache.dtype).removeprefix("torch.")
    shape = tuple(kv_cache.shape[1:])
    state_bytes = 0 if states is None else states[0].nbytes
    return BlockLayout(dtype=dtype, shape=shape, num_bytes=kv_cache[0].nbytes, windows=windows, state_bytes=state_bytes)


def bytes_of(cache: Tensor) -> BlockBytes:
    """[N, bytes of a block or a state], the same memory. REQUIRES: it is not on a device"""
    content: BlockBytes = cache.view(torch.uint8).flatten(1).numpy()
    return content


def move_blocks(kv_cache: Tensor, host_cache: Tensor, moves: StepMoves) -> None:
    """Between two caches of blocks in the host's memory, and within the first."""
    if len(moves.swaps_out):
        kernels.swap_blocks(kv_cache, host_cache, moves.swaps_out)
    if len(moves.swaps_in):
        kernels.swap_blocks(host_cache, kv_cache, moves.swaps_in)
    if len(moves.copies):
        kernels.copy_blocks(kv_cache, torch.from_numpy(moves.copies))
