"""Wakes the engine when the next thing is due. Event-loop thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    def __init__(self, clock: Callable[[], float], due: Callable[[], float | None], ring: Callable[[], None]) -> None:
        """`due`: when, on the clock; None: nothing is. `ring` is called then; it looks at the clock itself."""
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._due = due
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self._stopped = False

    def arm(self) -> None:
        """Something else may be due next."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        due = self._due()
        if due is not None and not self._stopped:
            self._handle = self._loop.call_later(max(0.0, due - self._clock()), self._expire)

    def stop(self) -> None:
        self._stopped = True
        self.arm()

    def _expire(self) -> None:
        self._handle = None
        self._ring()
        self.arm()
