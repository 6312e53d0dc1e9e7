"""Notices a device step that does not come back. Lives on the event-loop thread, and costs a step two assignments.

It counts looks, which the loop takes at intervals, and not the time between them. A loop that stood still for a minute
has looked once, and the results of that minute are queued behind this look: they are heard before the next one. So a
loop that stands still, for whatever reason, is never taken for a device that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LOOKS = 8  # in the time that a step has


class StepWatchdog:
    """Calls `on_hang` once, when the oldest launched step has been at the device for `timeout` seconds; 0: never."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout: float, on_hang: Callable[[BaseException], None]
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._on_hang = on_hang
        self._at_device = False  # some step is
        self._num_looks = 0  # at the oldest step, since it became the oldest
        self._timer: asyncio.TimerHandle | None = None
        self._look_later()

    def launched(self) -> None:
        self._at_device = True

    def returned(self, num_left: int) -> None:
        """A step came back; so many others are still out."""
        self._at_device = num_left > 0
        self._num_looks = 0

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timeout = 0.0

    def _look_later(self) -> None:
        if self._timeout > 0:
            self._timer = self._loop.call_later(self._timeout / _LOOKS, self._look)

    def _look(self) -> None:
        # The first look comes at any moment of the step, so the time is up at the one behind these.
        if self._at_device and self._num_looks >= _LOOKS:
            self._on_hang(TimeoutError(f"a step did not come back from the device within {self._timeout:g} s"))
            return
        self._num_looks += self._at_device
        self._look_later()
