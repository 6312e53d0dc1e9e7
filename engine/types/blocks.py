"""The bytes of blocks on their way from and to the device: event-loop thread ↔ device thread, in order with the plans.

Data (engine/types/data.py). Dims: N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from bequest.engine.types.arrays import IntArray
from bequest.engine.types.data import Data
from bequest.engine.types.plan import StepMoves, no_pairs

BlockBytes = npt.NDArray[np.uint8]  # [N, bytes of a block]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """What the bytes of a block mean."""

    dtype: str
    shape: tuple[int, ...]  # [L, 2, NKV, BS, D]
    num_bytes: int
    windows: tuple[int, ...] = (0,)  # of the strips: each has a block for the same tokens (engine/models/strips.py)
    state_bytes: int = 0  # of a state of all recurrent layers; 0: the model has none

    @property
    def rows_of_state(self) -> int:
        """Rows of the size of a block that a state takes in files, the last one filled up with zeros."""
        return -(-self.state_bytes // self.num_bytes)


class BlockRead(Data, frozen=True, kw_only=True, eq=False):
    """Asks for the bytes of blocks: those of the device, then those of the host."""

    moves: StepMoves  # swaps that were planned before it
    device: IntArray
    host: IntArray
    of_drafts: bool = False  # of who drafts beside the model, in blocks of the same numbers, and not the model's


class BlockWrite(Data, frozen=True, kw_only=True, eq=False):
    """Replaces the bytes of blocks of the device."""

    moves: StepMoves  # swaps that were planned before it
    blocks: IntArray  # [N]
    content: BlockBytes  # [N, bytes of a block]
    of_drafts: bool = False  # as of BlockRead


class StateRead(Data, frozen=True, kw_only=True, eq=False):
    """Asks for the bytes of states of recurrent layers."""

    slots: IntArray
    moves: IntArray = msgspec.field(default_factory=no_pairs)  # [C, 2] of states, which come first


class StateWrite(Data, frozen=True, kw_only=True, eq=False):
    """Replaces the bytes of states."""

    slots: IntArray  # [N]
    content: BlockBytes  # [N, bytes of a state]
    moves: IntArray = msgspec.field(default_factory=no_pairs)  # [C, 2] of states, which come first


BytesWrite = BlockWrite | StateWrite
BytesMove = BlockRead | StateRead | BytesWrite


class KeptMemory(Data, frozen=True, kw_only=True, eq=False):
    """What a runner that falls asleep keeps of its memory; all else is given back."""

    moves: StepMoves  # swaps that were planned before
    blocks: IntArray  # of the device
    host: IntArray  # blocks of the host
    slots: IntArray  # of states


class PendingBlocks(Protocol):
    """A read or a write that is queued on a device. Called from another thread than the one that queued it."""

    def wait(self) -> BlockBytes:
        """Blocks until it is done; of a write nothing, [0, bytes of one]. Called once."""
        ...
