"""Bytes of blocks and states from and to a GPU, on its stream, by pinned memory. Device thread; waits elsewhere."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from bequest.engine.kernels import cuda as kernels
from bequest.engine.kernels.streams import record
from bequest.engine.runner.block_bytes import bytes_of, layout_of
from bequest.engine.runner.host_cache import PinnedHostCache
from bequest.engine.runner.host_states import TieredStates
from bequest.engine.types import IntArray, StepMoves
from bequest.engine.types.blocks import BlockBytes, BlockRead, BlockWrite, StateRead, StateWrite

_BUFFER_BYTES = 32 << 20
_NUM_BUFFERS = 4


class PendingRead:
    """Blocks or states on their way to the host. `wait` may be called from another thread, once."""

    __slots__ = ("_copied", "_host_blocks", "_host_cache", "_pinned")

    def __init__(
        self, pinned: Tensor, copied: torch.cuda.Event, host_cache: PinnedHostCache | None, host_blocks: IntArray
    ) -> None:
        self._pinned = pinned
        self._copied = copied
        self._host_cache = host_cache
        self._host_blocks = host_blocks

    def wait(self) -> BlockBytes:
        """Whoever asked holds the host blocks, so that nothing else is written to them meanwhile."""
        self._copied.synchronize()
        if self._host_cache is None:
            return bytes_of(self._pinned).copy()  # pinned memory is dear
        return np.concatenate([bytes_of(self._pinned), self._host_cache.read(self._host_blocks)])


class PendingWrite:
    """Blocks or states on their way to the device."""

    __slots__ = ("_copied", "_pinned")

    def __init__(self, copied: torch.cuda.Event, pinned: Tensor | None = None) -> None:
        """`pinned`: memory that has to stay until they are there."""
        self._pinned = pinned
        self._copied = copied

    def wait(self) -> BlockBytes:
        self._copied.synchronize()
        return np.empty((0, 0), np.uint8)


class _Ring:
    """A few pinned buffers that blocks pass through, one after the other: to pin memory takes longer than to copy it,
    and an estate has gigabytes. Made when it is first needed."""

    def __init__(self, kv_cache: Tensor) -> None:
        block_bytes = kv_cache[0].nbytes
        self.num_blocks = max(1, _BUFFER_BYTES // block_bytes)  # of a buffer
        self._shape = (self.num_blocks, *kv_cache.shape[1:])
        self._dtype = kv_cache.dtype
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []
        self._next = 0

    def fill(self, content: BlockBytes) -> Tensor:
        """A buffer with these blocks, once its last ones are on the device."""
        if len(self._buffers) <= self._next:
            self._buffers.append((torch.empty(self._shape, dtype=self._dtype, pin_memory=True), torch.cuda.Event()))
        buffer, copied = self._buffers[self._next]
        copied.synchronize()
        filled = buffer[: len(content)]
        # torch copies with all its threads.
        torch.from_numpy(bytes_of(filled)).copy_(torch.from_numpy(np.require(content, requirements=["C", "W"])))
        return filled

    def used(self) -> None:
        """The buffer is read by what was queued."""
        record(self._buffers[self._next][1])
        self._next = (self._next + 1) % _NUM_BUFFERS


class BlockTransfers:
    def __init__(
        self,
        kv_cache: Tensor,
        host_cache: PinnedHostCache,
        windows: tuple[int, ...] = (0,),
        states: Tensor | None = None,
        drafts: BlockTransfers | None = None,
    ) -> None:
        """`drafts`: of who drafts beside the model, whose blocks move as these do."""
        self._kv_cache = kv_cache  # [NB, L, 2, NKV, BS, D]
        self._host_cache = host_cache
        self._drafts = drafts
        self._tiered = None if states is None else TieredStates(states)
        self._ring = _Ring(kv_cache)
        self.layout = layout_of(kv_cache, windows, states)

    def read(self, read: BlockRead) -> PendingRead:
        """On the current stream."""
        self._swap(read.moves)
        return (self._of_drafts if read.of_drafts else self)._read(read)

    def write(self, write: BlockWrite) -> PendingWrite:
        """On the current stream."""
        self._swap(write.moves)
        return (self._of_drafts if write.of_drafts else self)._write(write)

    def _read(self, read: BlockRead) -> PendingRead:
        pinned = self._pin(len(read.device))
        if len(read.device):
            kernels.swap_blocks(self._kv_cache, pinned, _pairs(read.device, np.arange(len(read.device))))
        return PendingRead(pinned, _recorded(), self._host_cache, read.host)

    def _write(self, write: BlockWrite) -> PendingWrite:
        for begin in range(0, len(write.blocks), self._ring.num_blocks):
            blocks = write.blocks[begin : begin + self._ring.num_blocks]
            filled = self._ring.fill(write.content[begin : begin + len(blocks)])
            kernels.swap_blocks(filled, self._kv_cache, _pairs(np.arange(len(blocks)), blocks))
            self._ring.used()
        return PendingWrite(_recorded())

    def read_states(self, read: StateRead) -> PendingRead:
        """On the current stream. They are few, and each is one copy."""
        self.move_states(read.moves)
        return PendingRead(self._states.read(read.slots), _recorded(), None, read.slots[:0])

    def write_states(self, write: StateWrite) -> PendingWrite:
        """On the current stream."""
        self.move_states(write.moves)
        pinned = self._states.write(write.slots, write.content)
        return PendingWrite(_recorded(), pinned)

    def move_states(self, moves: IntArray) -> None:
        """On the current stream."""
        if len(moves):
            self._states.move(moves)

    @property
    def _states(self) -> TieredStates:
        assert self._tiered is not None, "the model has no recurrent layers"
        return self._tiered

    @property
    def _of_drafts(self) -> BlockTransfers:
        assert self._drafts is not None, "nothing drafts on this device"
        return self._drafts

    def _swap(self, moves: StepMoves) -> None:
        assert not len(moves.copies), "only a step copies"
        if self._drafts is not None:
            self._drafts._swap(replace(moves, states=moves.states[:0]))
        if len(moves.swaps_out):
            self._host_cache.swap_out(moves.swaps_out)
        if len(moves.swaps_in):
            self._host_cache.swap_in(moves.swaps_in)
        self.move_states(moves.states)

    def _pin(self, num_blocks: int) -> Tensor:
        shape = (num_blocks, *self._kv_cache.shape[1:])
        return torch.empty(shape, dtype=self._kv_cache.dtype, pin_memory=num_blocks > 0)


def _pairs(sources: np.ndarray, destinations: np.ndarray) -> IntArray:
    return np.ascontiguousarray(np.stack([sources, destinations], axis=1).astype(np.int32))


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    record(event)
    return event
