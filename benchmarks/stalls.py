"""When the machine itself stood still: a virtual one is not always given its cores, for a tenth of a second at times.

A process on each core sleeps for a millisecond at a time, above everything else in priority. When it wakes up late, no
program could have run there; what is measured then says nothing about a server. Where that priority is not allowed,
nothing is watched.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from bisect import bisect_right
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from operator import itemgetter
from types import TracebackType
from typing import Self

_NAP, _LATE = 0.001, 0.004  # seconds
_PRIORITY = 90

Stall = tuple[float, float]  # from, to, on time.monotonic


def _watch(core: int, stop: Event, seen: Queue[list[Stall]]) -> None:
    stalls = []
    try:
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        while not stop.is_set():
            began = time.monotonic()
            time.sleep(_NAP)
            if (woke := time.monotonic()) > began + _NAP + _LATE:
                stalls.append((began, woke))
    except PermissionError:
        pass
    seen.put(stalls)


class Stalls:
    """Watches while its `with` block runs; `seen` has the stalls afterwards."""

    def __init__(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._stop = spawning.Event()
        self._queue: Queue[list[Stall]] = spawning.Queue()
        cores = sorted(os.sched_getaffinity(0))
        self._watchers = [spawning.Process(target=_watch, args=(core, self._stop, self._queue)) for core in cores]
        self.seen: list[Stall] = []

    def __enter__(self) -> Self:
        for watcher in self._watchers:
            watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self.seen = _merged(sorted(stall for _ in self._watchers for stall in self._queue.get()))
        for watcher in self._watchers:
            watcher.join()

    def hit(self, begin: float, end: float) -> bool:
        index = bisect_right(self.seen, begin, key=itemgetter(1))  # the first that ends later
        return index < len(self.seen) and self.seen[index][0] < end


def _merged(stalls: list[Stall]) -> list[Stall]:
    """Cores stand still together, or not: as intervals that do not overlap."""
    merged: list[Stall] = []
    for begin, end in stalls:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
