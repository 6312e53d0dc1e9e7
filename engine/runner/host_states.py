"""States of recurrent layers on a GPU and in the host's memory, as slots of one row of numbers. Device thread.

The slots of the host lie behind those of the device. Their memory is pinned, a slab at a time, when it is first needed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bequest.engine.runner.block_bytes import bytes_of
from bequest.engine.types import IntArray
from bequest.engine.types.blocks import BlockBytes

_SLAB_BYTES = 256 << 20


class TieredStates:
    def __init__(self, states: Tensor) -> None:
        """[NS, LR, E] on the device"""
        self._states = states
        self._per_slab = max(1, _SLAB_BYTES // states[0].nbytes)
        self._slabs: dict[int, Tensor] = {}

    def move(self, pairs: IntArray) -> None:
        """(slot, slot), one after the other, on the current stream."""
        for source, destination in pairs.tolist():
            self._at(destination).copy_(self._at(source), non_blocking=True)

    def read(self, slots: IntArray) -> Tensor:
        """[N, LR, E] in pinned memory, once the current stream is there."""
        pinned = self._pinned(len(slots))
        self._wait_for_host(slots)
        for place, slot in enumerate(slots.tolist()):
            pinned[place].copy_(self._at(slot), non_blocking=True)
        return pinned

    def write(self, slots: IntArray, content: BlockBytes) -> Tensor:
        """Memory that has to stay until the current stream is there."""
        pinned = self._pinned(len(slots))
        bytes_of(pinned)[:] = content
        self._wait_for_host(slots)
        for place, slot in enumerate(slots.tolist()):
            self._at(slot).copy_(pinned[place], non_blocking=True)
        return pinned

    def _wait_for_host(self, slots: IntArray) -> None:
        """Copies between two places of the host are made at once, and not by the stream."""
        if np.any(slots >= len(self._states)):
            torch.cuda.current_stream(self._states.device).synchronize()

    def _at(self, slot: int) -> Tensor:
        """[LR, E]"""
        if slot < len(self._states):
            return self._states[slot]
        number, inside = divmod(slot - len(self._states), self._per_slab)
        if number not in self._slabs:
            self._slabs[number] = self._pinned(self._per_slab)
        return self._slabs[number][inside]

    def _pinned(self, count: int) -> Tensor:
        return torch.empty((count, *self._states.shape[1:]), dtype=self._states.dtype, pin_memory=True)
