"""Notices a device step that does not come back. Lives on the event-loop thread, and costs a step two assignments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LOOKS = 4  # in the time that a step has


class StepWatchdog:
    """Calls `on_hang` once, when the oldest launched step has been at the device for `timeout` seconds; 0: never."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout: float,
        on_hang: Callable[[BaseException], None],
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._on_hang = on_hang
        self._clock = clock
        self._since: float | None = None  # when the oldest step became the oldest; None: the device has none
        self._timer: asyncio.TimerHandle | None = None
        self._look_later()

    def launched(self) -> None:
        if self._since is None:
            self._since = self._clock()

    def returned(self, num_left: int) -> None:
        """A step came back; so many others are still out."""
        self._since = self._clock() if num_left else None

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timeout = 0.0

    def _look_later(self) -> None:
        if self._timeout > 0:
            self._timer = self._loop.call_later(self._timeout / _LOOKS, self._look)

    def _look(self) -> None:
        if self._since is not None and self._clock() - self._since >= self._timeout:
            self._on_hang(TimeoutError(f"a step did not come back from the device within {self._timeout:g} s"))
        else:
            self._look_later()
