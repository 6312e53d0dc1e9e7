"""A runner that can give its memory back: it is put away, and built again when it wakes. Device thread only.

What leases hold waits in the host's memory meanwhile, as bytes, and goes back to the same numbers, and so does what a
model that drafts beside it has of these blocks. Weights of a GPU wait there, too (kept_weights.py); a CPU reads its own
from the files again. Everything else that a runner has was told to it: catalogues and adapters, which are told again.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bequest.engine.runner.kept_weights import KeptWeights
from bequest.engine.types import IntArray, MaskSource, PendingStep, Runner, StepMoves, StepPlan, StepResult
from bequest.engine.types.adapter import AdapterWeights
from bequest.engine.types.blocks import (
    BlockBytes,
    BlockLayout,
    BlockRead,
    BlockWrite,
    KeptMemory,
    PendingBlocks,
    StateRead,
    StateWrite,
)
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.device import YieldingRunner
from bequest.engine.types.listening import CrossHeads, FloatRows, ListeningRunner

_PIECE_BYTES = 64 << 20  # at a time: on a GPU they pass through pinned memory
_MOST_THROUGH = 16  # blocks of the device, that those of the host pass through
_NONE = np.empty(0, np.int32)
_PAIRS = np.empty((0, 2), np.int32)
_STILL = StepMoves(swaps_out=_PAIRS, swaps_in=_PAIRS, copies=_PAIRS)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a runner that is away had, and gets back."""

    memory: KeptMemory
    blocks: list[_KeptBlocks]  # the model's, and those of who drafts beside it
    states: BlockBytes


@dataclass(frozen=True, slots=True)
class _KeptBlocks:
    of_drafts: bool
    device: list[BlockBytes]  # in pieces
    host: list[BlockBytes]


class SleepingRunner:
    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        build: Callable[[], Runner],
        weights: KeptWeights | None = None,
        *,
        drafts: bool = False,
    ) -> None:
        """`num_blocks`: of its cache. `build`: another one with as many blocks and states, of these weights where
        there are any; raises MemoryError. `drafts`: whether something drafts beside the model."""
        self._owners = (False, True) if drafts else (False,)  # of blocks: who drafts, or the model
        self._most_through = min(_MOST_THROUGH, num_blocks - 1)
        self._awake: Runner | None = runner
        self._build = build
        self._weights = weights
        self._masks: MaskSource | None = None
        self._catalogues: dict[int, Catalogue] = {}
        self._adapters: dict[int, AdapterWeights] = {}
        self._layout = runner.block_layout
        self._kept: _Kept | None = None

    @property
    def _runner(self) -> Runner:
        assert self._awake is not None, "it sleeps"
        return self._awake

    # --- sleep ---------------------------------------------------------------------------------------------------

    def sleep(self, kept: KeptMemory) -> int:
        used = _used_bytes()
        self._read(BlockRead(moves=kept.moves, device=_NONE, host=_NONE))
        blocks = [self._kept_blocks(kept, of_drafts=of_drafts) for of_drafts in self._owners]
        states = np.empty((0, self._layout.state_bytes), np.uint8)
        if len(kept.slots):
            states = _waited(self._runner.read_states(StateRead(slots=kept.slots)))
        self._kept = _Kept(kept, blocks, states)
        self._runner.close()
        self._awake = None
        self._collect()
        return max(0, used - _used_bytes())

    def _kept_blocks(self, kept: KeptMemory, *, of_drafts: bool) -> _KeptBlocks:
        read = partial(BlockRead, moves=_STILL, of_drafts=of_drafts)
        return _KeptBlocks(
            of_drafts,
            [self._read(read(device=piece, host=_NONE)) for piece in self._pieces(kept.blocks)],
            [self._read(read(device=_NONE, host=piece)) for piece in self._pieces(kept.host)],
        )

    def wake(self) -> None:
        kept = self._kept
        assert kept is not None and self._awake is None, "it is awake"
        runner = self._built()
        self._awake = runner
        if self._masks is not None:
            runner.connect(self._masks)
        for handle, catalogue in self._catalogues.items():
            runner.register(handle, catalogue)
        for handle, weights in self._adapters.items():
            runner.register_adapter(handle, weights)
        self._restore(runner, kept)
        self._kept = None

    def _built(self) -> Runner:
        """Raises MemoryError."""
        try:
            return self._build()
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            why = str(error)
        self._collect()  # behind the exception, whose frames refer to what is to be collected
        raise MemoryError(why)

    def _collect(self) -> None:
        if self._weights is not None:
            self._weights.put_away()
        _collect()

    def _restore(self, runner: Runner, kept: _Kept) -> None:
        """Blocks of the host first: they pass through blocks of the device, all of which are free."""
        for i, numbers in enumerate(self._pieces(kept.memory.host)):
            through = np.arange(1, len(numbers) + 1, dtype=np.int32)
            for owned in kept.blocks:
                self._write(runner, through, owned.host[i], of_drafts=owned.of_drafts)
            out = StepMoves(swaps_out=np.stack([through, numbers], axis=1), swaps_in=_PAIRS, copies=_PAIRS)
            self._read(BlockRead(moves=out, device=_NONE, host=_NONE))
        for i, numbers in enumerate(self._pieces(kept.memory.blocks)):
            for owned in kept.blocks:
                self._write(runner, numbers, owned.device[i], of_drafts=owned.of_drafts)
        if len(kept.memory.slots):
            pending = runner.write_states(StateWrite(slots=kept.memory.slots, content=kept.states))
            if pending is not None:
                pending.wait()

    def _write(self, runner: Runner, blocks: IntArray, content: BlockBytes, *, of_drafts: bool) -> None:
        write = BlockWrite(moves=_STILL, blocks=blocks, content=content, of_drafts=of_drafts)
        pending = runner.write_blocks(write)
        if pending is not None:
            pending.wait()

    def _read(self, read: BlockRead) -> BlockBytes:
        return _waited(self._runner.read_blocks(read))

    def _pieces(self, numbers: IntArray) -> list[IntArray]:
        size = max(1, min(_PIECE_BYTES // self._layout.num_bytes, self._most_through))
        return [numbers[i : i + size] for i in range(0, len(numbers), size)]

    # --- as the one that is awake --------------------------------------------------------------------------------

    def connect(self, masks: MaskSource) -> None:
        self._masks = masks
        self._runner.connect(masks)

    def register(self, handle: int, catalogue: Catalogue) -> None:
        self._catalogues[handle] = catalogue
        if self._awake is not None:
            self._awake.register(handle, catalogue)

    def release(self, handle: int) -> None:
        del self._catalogues[handle]
        if self._awake is not None:
            self._awake.release(handle)

    def register_adapter(self, handle: int, weights: AdapterWeights) -> None:
        self._adapters[handle] = weights
        if self._awake is not None:
            self._awake.register_adapter(handle, weights)

    def release_adapter(self, handle: int) -> None:
        del self._adapters[handle]
        if self._awake is not None:
            self._awake.release_adapter(handle)

    def launch(self, plan: StepPlan) -> StepResult | PendingStep:
        return self._runner.launch(plan)

    def launch_yielding(self, plan: StepPlan, between: Callable[[], None]) -> PendingStep:
        runner = self._runner
        assert isinstance(runner, YieldingRunner), "others are given no plans that yield"
        return runner.launch_yielding(plan, between)

    def is_quick(self, plan: StepPlan) -> bool:
        return self._runner.is_quick(plan)

    @property
    def block_layout(self) -> BlockLayout:
        return self._layout

    def read_blocks(self, read: BlockRead) -> BlockBytes | PendingBlocks:
        return self._runner.read_blocks(read)

    def write_blocks(self, write: BlockWrite) -> PendingBlocks | None:
        return self._runner.write_blocks(write)

    def read_states(self, read: StateRead) -> BlockBytes | PendingBlocks:
        return self._runner.read_states(read)

    def write_states(self, write: StateWrite) -> PendingBlocks | None:
        return self._runner.write_states(write)

    def cross_weights(self, asked: CrossHeads) -> FloatRows:
        runner = self._runner
        assert isinstance(runner, ListeningRunner)
        return runner.cross_weights(asked)

    def close(self) -> None:
        if self._awake is not None:
            self._awake.close()


def _waited(content: BlockBytes | PendingBlocks) -> BlockBytes:
    return content if isinstance(content, np.ndarray) else content.wait()


def _collect() -> None:
    """What nobody refers to any more goes back, to the device and to the system."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    if platform.machine() == "aarch64":
        _purge()


def _purge() -> None:
    """There torch has an allocator of its own (mimalloc). It looks through some of what a thread that has ended left
    behind whenever another one asks for memory, and gives pages back a tenth of a second after they were freed."""
    for _ in range(4):
        pieces = [torch.empty(size, dtype=torch.uint8) for size in [1 << 20] * 64 + [1 << 27]]
        del pieces
        time.sleep(0.11)


def _used_bytes() -> int:
    """Of this process, on the GPU if it has one, else here."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_reserved()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
