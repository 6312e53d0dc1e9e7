"""An engine that gives its memory back while nobody needs it: falls asleep, stays so, and wakes. Event-loop thread.

    awake ──► falling ──► asleep ──► waking ──► awake

What leases hold is kept: in files, or in the host's memory. What nobody holds is forgotten, and so are the weights,
which come back with the engine. Requests that come meanwhile wait in the queue and wake it, or are refused, as whoever
sent it to sleep has said. By itself it falls asleep when nothing was asked of it for a while, and is then always woken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import numpy as np

from bequest.engine.device import DeviceThread
from bequest.engine.errors import EngineAsleep, EngineBusy, EngineError, InvalidRequest
from bequest.engine.inheritance.retention import Retention
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.types import IntArray, Runner, StepMoves
from bequest.engine.types.blocks import KeptMemory
from bequest.engine.types.device import SleepyRunner

log = logging.getLogger("bequest.engine")

T = TypeVar("T")


class Sleep:
    def __init__(
        self,
        scheduler: Scheduler,
        device: DeviceThread,
        *,
        after: float,
        is_idle: Callable[[], bool],
        settled: Callable[[], Awaitable[None]],
        on_awake: Callable[[], None],
        on_stuck: Callable[[EngineError], None],
    ) -> None:
        """`after`: seconds without a request, 0: never. `is_idle`: no request is open. `settled`: returns when nothing
        is at the device.
        `on_stuck`: ends those who wait for an engine that cannot be woken."""
        self._scheduler = scheduler
        self._device = device
        self._after = after
        self._none_open = is_idle
        self._num_holding = 0  # who need its memory beside requests
        self.released = asyncio.Event()  # nobody does
        self.released.set()
        self._settled = settled
        self._on_awake = on_awake
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self.mode: Literal["awake", "falling", "asleep", "waking"] = "awake"
        self._wakes_itself = True
        self._change = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.idle()

    @property
    def awake(self) -> bool:
        return self.mode == "awake"

    # --- what the engine tells it --------------------------------------------------------------------------------

    def idle(self) -> None:
        """Nothing is open."""
        self.busy()
        if self._after > 0 and self.awake and self._device.can_sleep:
            self._timer = self._loop.call_later(self._after, self._doze)

    def busy(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def disturb(self) -> None:
        """Somebody wants something. Raises EngineAsleep if that does not wake it."""
        if self.awake:
            return
        if not self._wakes_itself:
            raise EngineAsleep("The engine sleeps until it is woken.", reason="asleep")
        self._soon(self._wake_quietly)

    @asynccontextmanager
    async def kept_awake(self) -> AsyncIterator[None]:
        """For who needs its memory without a request, or between two: it wakes, and does not fall asleep meanwhile."""
        self._num_holding += 1  # before it wakes: somebody may wait to send it to sleep
        self.released.clear()
        self.busy()
        try:
            self.disturb()
            if not self.awake:
                await self.wake()
            yield
        finally:
            self._num_holding -= 1
            if not self._num_holding:
                self.released.set()
            if self._is_idle():
                self.idle()

    def stop(self) -> None:
        """What is under way ends with the device."""
        self._after = 0.0
        self.busy()

    # --- falling asleep, waking ----------------------------------------------------------------------------------

    async def fall(self, *, wakes_itself: bool) -> int:
        """Bytes of memory that are given back. Raises EngineBusy if a request is open, or if the host has no room for
        what leases hold: it then stays awake."""
        return await self._whole(self._fall(wakes_itself))

    async def wake(self) -> None:
        """Raises EngineAsleep if the memory is not there any more: it then sleeps on."""
        await self._whole(self._wake())

    async def _whole(self, change: Coroutine[None, None, T]) -> T:
        """Whoever asked for it may leave meanwhile, and the device would not hear of that."""
        task = asyncio.ensure_future(change)
        self._tasks.add(task)
        task.add_done_callback(self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # where nobody waits for it any more, nobody need hear of it

    async def _fall(self, wakes_itself: bool) -> int:
        async with self._change:
            if self.mode == "asleep":
                self._wakes_itself = wakes_itself
                return 0
            if not self._device.can_sleep:
                raise InvalidRequest(
                    "This engine cannot sleep: its model sees images or has several ranks, or it records.",
                    reason="cannot_sleep",
                )
            self._check_idle()
            self.mode, self._wakes_itself = "falling", True
            try:
                await self._settled()
                self._check_idle()  # somebody may have come meanwhile
                began, kept = time.perf_counter(), self._keep()
                given_back = await self._device.errand(lambda runner: _sleepy(runner).sleep(kept))
            except BaseException as error:
                self.mode = "awake"
                self._on_awake()
                if isinstance(error, MemoryError):
                    log.error("the engine cannot sleep: %s", error)
                    message = f"The host has no room for what leases hold: {error}."
                    raise EngineBusy(message, reason="no_room_to_sleep") from None
                raise
            self._scheduler.rows.forget_closed()  # with its runner; one that stays has yet to hear of them
            self.mode, self._wakes_itself = "asleep", wakes_itself
            self.busy()
            log.info("asleep: %.2f GB given back in %.2f s", given_back / 1e9, time.perf_counter() - began)
        if not self._is_idle():
            self._soon(self._wake_quietly)
        return given_back

    async def _wake(self) -> None:
        async with self._change:
            if self.awake:
                return
            self.mode, began = "waking", time.perf_counter()
            try:
                await self._device.errand(_wake)
            except MemoryError as error:
                self.mode = "asleep"
                log.error("the engine cannot wake: %s", error)
                raise EngineAsleep(f"The engine cannot wake: {error}.", reason="cannot_wake") from None
            self.mode = "awake"
            log.info("awake in %.2f s", time.perf_counter() - began)
        self._on_awake()
        if self._is_idle():
            self.idle()

    def _is_idle(self) -> bool:
        return self._none_open() and not self._num_holding

    def _check_idle(self) -> None:
        if not self._is_idle():
            raise EngineBusy("Requests are open: the engine cannot sleep.", reason="requests_open")

    def _keep(self) -> KeptMemory:
        """Forgets what nobody holds, and tells what stays."""
        cache, retention = self._scheduler.cache, self._scheduler.retention
        while retention.leases.let_stored_go():
            pass
        cache.forget_warm()
        out, into = cache.take_swaps()
        pairs = [np.asarray(moves, np.int32).reshape(-1, 2) for moves in (out, into, [])]
        return KeptMemory(
            moves=StepMoves(swaps_out=pairs[0], swaps_in=pairs[1], copies=pairs[2], states=cache.states.take_moves()),
            blocks=_ints(b for b in range(1, cache.pool.num_blocks) if cache.pool.ref_count(b)),
            host=_ints(b for b in range(1, cache.host.num_blocks) if cache.host.ref_count(b)),
            slots=_slots(retention),
        )

    def _doze(self) -> None:
        self._timer = None
        if self.awake and self._is_idle():
            self._soon(self._fall_quietly)

    async def _fall_quietly(self) -> None:
        try:
            await self.fall(wakes_itself=True)
        except EngineError:  # whoever came is served; or there was no room for leases, or the engine ended
            if self._is_idle():
                self.idle()

    async def _wake_quietly(self) -> None:
        try:
            await self.wake()
        except EngineError as error:
            self._on_stuck(error)

    def _soon(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = asyncio.ensure_future(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _wake(runner: Runner) -> int:
    _sleepy(runner).wake()
    return 0


def _sleepy(runner: Runner) -> SleepyRunner:
    assert isinstance(runner, SleepyRunner), "a runner that cannot sleep was not asked to"
    return runner


def _ints(numbers: Iterable[int]) -> IntArray:
    return np.fromiter(numbers, np.int32)


def _slots(retention: Retention) -> IntArray:
    """Of states that leases hold."""
    return _ints(sorted({state.slot for record in retention.leases.holders() for state in record.states}))
