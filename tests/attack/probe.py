"""How long one request keeps an event loop from everybody else.

A tick runs on the watched loop each millisecond. Between two ticks the loop could serve nobody, so what happened there
is what an attack costs the others. Wall time alone would measure the machine, which may be busy with something else;
so a gap counts only as far as this process computed in it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

_NAP = 0.001  # seconds between ticks of an idle loop


@dataclass(frozen=True, slots=True)
class _Reading:
    """Clocks at one tick, in seconds."""

    wall: float
    loop: float  # CPU time of the loop's thread
    server: float  # CPU time of the process, without that of the attacker's thread

    @classmethod
    def now(cls, attacker_clock: int) -> _Reading:
        server = time.process_time() - time.clock_gettime(attacker_clock)
        return cls(time.perf_counter(), time.thread_time(), server)


class LoopProbe:
    """Watches a loop of another thread while its `async with` block runs.

    `longest_stall_s`: the most CPU time that the loop's own thread spent between two ticks.
    `longest_hold_s`: the most time in which the loop did not come around while the process computed. It is at least
    about the stall, and more when a worker thread keeps the interpreter lock.
    `loop_cpu_s`, `server_cpu_s`: what the loop's thread and the whole server spent meanwhile.

    The thread that enters is the attacker: its own CPU time is not the server's. What it prepares (bodies of megabytes)
    it should prepare before, because that holds the interpreter lock too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._attacker_clock = 0
        self._first: _Reading | None = None
        self._last: _Reading | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.longest_stall_s = 0.0
        self.longest_hold_s = 0.0

    async def __aenter__(self) -> Self:
        self._attacker_clock = time.pthread_getcpuclockid(threading.get_ident())
        await self._on_loop(self._begin)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._on_loop(self._end)

    @property
    def loop_cpu_s(self) -> float:
        assert self._first is not None and self._last is not None, "the probe has not run"
        return self._last.loop - self._first.loop

    @property
    def server_cpu_s(self) -> float:
        assert self._first is not None and self._last is not None, "the probe has not run"
        return self._last.server - self._first.server

    def __repr__(self) -> str:
        stall, hold = 1e3 * self.longest_stall_s, 1e3 * self.longest_hold_s
        spent = "" if self._first is None else f", {1e3 * self.loop_cpu_s:.1f} ms of CPU on the loop"
        return f"<LoopProbe: {stall:.1f} ms longest stall, {hold:.1f} ms longest hold{spent}>"

    async def _on_loop(self, step: Callable[[], None]) -> None:
        async def stepping() -> None:
            step()

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(stepping(), self._loop))

    def _begin(self) -> None:
        self._first = self._last = _Reading.now(self._attacker_clock)
        self._timer = self._loop.call_later(_NAP, self._tick)

    def _end(self) -> None:
        self._tick()
        assert self._timer is not None
        self._timer.cancel()

    def _tick(self) -> None:
        now, before = _Reading.now(self._attacker_clock), self._last
        assert before is not None
        late = now.wall - before.wall - _NAP
        self.longest_stall_s = max(self.longest_stall_s, now.loop - before.loop)
        self.longest_hold_s = max(self.longest_hold_s, min(late, now.server - before.server))
        self._last = now
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_NAP, self._tick)
