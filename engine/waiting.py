"""A queue of waiting sequences, the most urgent first. Owned by the event-loop thread."""

from __future__ import annotations

import heapq

from engine.sequence import Sequence, Status


class WaitingQueue:
    """A heap; what has ended meanwhile is skipped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int, int], Sequence]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.urgency, sequence))
        self._count += 1

    def head(self) -> Sequence | None:
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Takes the head out. REQUIRES: `head` has just named it."""
        heapq.heappop(self._heap)
        self._count -= 1

    def note_ended(self) -> None:
        """One of them has ended while it waited."""
        self._count -= 1
