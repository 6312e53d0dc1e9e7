"""The host pool of the CUDA backend: blocks in pinned memory, a slab at a time. Device thread only.

Pinning a gigabyte takes a good part of a second, and most servers never swap: a slab is pinned when its first block is
needed. The block pool hands out low numbers first, so that slabs come one after the other.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels import cuda as kernels
from bequest.engine.runner.block_bytes import bytes_of
from bequest.engine.types import IntArray
from bequest.engine.types.blocks import BlockBytes

_SLAB_BYTES = 256 << 20


class PinnedHostCache:
    """As many blocks as the host pool has, of the shape of the device cache's."""

    def __init__(self, num_blocks: int, kv_cache: Tensor) -> None:
        self._kv_cache = kv_cache  # [NB, L, 2, NKV, BS, D]
        self._per_slab = max(1, _SLAB_BYTES // kv_cache[0].nbytes)
        self._slabs: list[Tensor | None] = [None] * -(-num_blocks // self._per_slab)

    def swap_out(self, pairs: IntArray) -> None:
        """(device block, host block) pairs, on the current stream."""
        for slab, chosen in self._by_slab(pairs, column=1):
            kernels.swap_blocks(self._kv_cache, slab, chosen)

    def swap_in(self, pairs: IntArray) -> None:
        """(host block, device block) pairs, on the current stream."""
        for slab, chosen in self._by_slab(pairs, column=0):
            kernels.swap_blocks(slab, self._kv_cache, chosen)

    def read(self, blocks: IntArray) -> BlockBytes:
        """The bytes of host blocks, in order. REQUIRES: the device is done with what was swapped out to them"""
        content = np.empty((len(blocks), self._kv_cache[0].nbytes), np.uint8)
        for i, block in enumerate(blocks.tolist()):
            number, inside = divmod(block, self._per_slab)
            content[i] = bytes_of(self._slab(number))[inside]
        return content

    def _by_slab(self, pairs: IntArray, column: int) -> list[tuple[Tensor, IntArray]]:
        """The slabs that the host blocks in `column` lie in, and the pairs of each, with numbers inside the slab."""
        parts = []
        numbers = pairs[:, column] // self._per_slab
        for number in np.unique(numbers).tolist():
            chosen = pairs[numbers == number].copy()
            chosen[:, column] -= number * self._per_slab
            parts.append((self._slab(number), chosen))
        return parts

    def _slab(self, number: int) -> Tensor:
        slab = self._slabs[number]
        if slab is None:
            shape = (self._per_slab, *self._kv_cache.shape[1:])
            slab = self._slabs[number] = torch.empty(shape, dtype=self._kv_cache.dtype, pin_memory=True)
        return slab
