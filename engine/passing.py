"""Which steps may run before one that was planned ahead of them. Device thread.

A step of nothing but extractions is long, because few large products are faster than many small ones, and nobody waits
for it as for the next token of a stream. So it yields: between two of its layers others are launched, and pass it.

Plans are made for the order in which they are launched. One may pass another if that changes nothing: neither writes a
block that the other one reads or writes. Sometimes one does: a prompt finds the prefix that the extraction computes, or
gets blocks that a cancelled extraction gave back. Then it waits for its turn, and so does all that comes behind it.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from bequest.engine.types import NO_SLOT, StepPlan
from bequest.engine.types.arrays import IntArray

T = TypeVar("T")


class Footprint:
    """The blocks of a step that yields."""

    def __init__(self, plan: StepPlan, block_size: int) -> None:
        self._block_size = block_size
        written, touched = _written(plan, block_size), _touched(plan)
        size = 1 + max(int(written.max(initial=0)), int(touched.max(initial=0)))
        self._written, self._touched = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        self._written[written] = True
        self._touched[touched] = self._touched[written] = True
        self._written[0] = self._touched[0] = False  # the null block, which nobody writes and many read

    def meets(self, plan: StepPlan) -> bool:
        """Whether one of them writes a block that the other one reads or writes."""
        touched, written = _touched(plan), _written(plan, self._block_size)
        return _any(self._written, touched) or _any(self._touched, written)


def passes(plan: StepPlan) -> bool:
    """Whether a step has nothing but tokens in blocks. Hidden states, adapters and images have places of their own on
    the device, which the step ahead may hold."""
    others = plan.taps is not None or plan.images is not None or bool(plan.encoders) or bool(plan.prompt_logprobs)
    return not others and plan.batch.adapters is None and not _moves(plan) and plan.num_tokens > 0


def is_passable(plan: StepPlan) -> bool:
    """Whether a step that waits can wait longer: what it does before its tokens is not what others rely on."""
    return plan.yields and not _moves(plan) and not plan.rows.close and not plan.rows.open


class Queue(Generic[T]):
    """What the device thread is told, in order. `put` from any thread, the rest on that thread."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[T | StepPlan | None] = queue.SimpleQueue()
        self._seen: deque[T | StepPlan | None] = deque()  # but not begun

    def put(self, item: T | StepPlan | None) -> None:
        self._told.put(item)

    def get(self) -> T | StepPlan | None:
        return self._seen.popleft() if self._seen else self._told.get()

    def wait(self, seconds: float) -> bool:
        """Whether something comes within so long."""
        try:
            self._seen.append(self._told.get(timeout=seconds))
        except queue.Empty:
            return False
        return True

    def take_passing(self, ahead: Footprint, block_size: int) -> StepPlan | None:
        """The first step that does not yield, if it may pass the one `ahead` and all that wait before it."""
        while not self._told.empty():
            self._seen.append(self._told.get())
        footprints = [ahead]
        for number, item in enumerate(self._seen):
            if not isinstance(item, StepPlan):
                return None
            if is_passable(item):
                footprints.append(Footprint(item, block_size))
                continue
            if not passes(item) or any(footprint.meets(item) for footprint in footprints):
                return None
            del self._seen[number]
            return item
        return None


def _touched(plan: StepPlan) -> IntArray:
    """Blocks that it may read."""
    parts = [plan.batch.block_tables.ravel(), plan.moves.copies.ravel()]
    if plan.batch.cross_tables is not None:
        parts.append(plan.batch.cross_tables.ravel())
    return _joined(parts)


def _written(plan: StepPlan, block_size: int) -> IntArray:
    slots = plan.batch.slot_mapping
    return _joined([(slots[slots != NO_SLOT] // block_size).astype(np.int32), plan.moves.copies[:, 1]])


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _any(blocks: np.ndarray, numbers: IntArray) -> bool:
    return bool(blocks[numbers[numbers < len(blocks)]].any())


def _moves(plan: StepPlan) -> bool:
    moves = plan.moves
    return len(moves.swaps_out) + len(moves.swaps_in) + len(moves.states) > 0
