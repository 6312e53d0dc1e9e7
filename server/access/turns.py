"""Turns between tenants where requests meet before the engine knows them: on the event loop, and in worker threads.

First come, first served would let one that sends a thousand requests at once hold up everybody: the next request of
another tenant, which waits behind all of them, and every stream, whose tokens wait until the loop is through with them.

Owned by the event-loop thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bequest.server.access.threads import DaemonThreads

_Result = TypeVar("_Result")
_AT_ONCE = 8  # requests, of a quarter of a millisecond each or so, between two looks at what else there is to do


class _Turns:
    """Those who wait: each tenant in turn, and inside of one first come, first served."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # none is empty

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def wait(self, tenant: str) -> asyncio.Future[None]:
        """Done when the turn has come."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        return turn

    def call_next(self, may: Callable[[str], bool] = lambda tenant: True) -> str | None:
        """The tenant whose turn it is, of those that `may`; None: none waits. Those who left are passed over."""
        while True:
            tenant = next(filter(may, self._waiting), None)
            if tenant is None:
                return None
            waiting = self._waiting.pop(tenant)
            while waiting:
                turn = waiting.popleft()
                if turn.done():
                    continue
                if waiting:
                    self._waiting[tenant] = waiting  # behind the others
                turn.set_result(None)
                return tenant


class Entrance:
    """Lets some requests begin each time the event loop goes around; the others wait outside, unread."""

    def __init__(self) -> None:
        self._turns = _Turns()
        self._left = _AT_ONCE  # of this time
        self._again = False  # the next time is arranged for

    async def enter(self, tenant: str) -> None:
        if self._left > 0:
            self._left -= 1
            self._go_around()
        else:
            await self._turns.wait(tenant)

    def _go_around(self) -> None:
        if not self._again:
            self._again = True
            asyncio.get_running_loop().call_soon(self._open)

    def _open(self) -> None:
        self._again, self._left = False, _AT_ONCE
        while self._left > 0 and self._turns.call_next() is not None:
            self._left -= 1
        if self._left < _AT_ONCE:
            self._go_around()


@dataclass(slots=True, eq=False)
class _Task:
    tenant: str
    late: bool = False  # it gave its place to the others
    timer: asyncio.TimerHandle | None = None  # until it is late


class FairPool:
    """Worker threads that tenants take turns at.

    A thread cannot be stopped. A task that has run for `patience` seconds gives its place to the next tenant in turn
    and goes on beside it, and counts as its own tenant's as long as it runs: a tenant has as many tasks as there are
    places, late ones included. So another's wait is bounded by the patience and not by the longest task.
    """

    def __init__(self, num_places: int, name: str, patience: float = 1.0, most_late: int = 8) -> None:
        self._threads = DaemonThreads(num_places + most_late, name)
        self._turns = _Turns()
        self._num_places = num_places
        self._patience = patience
        self._most_late = most_late
        self._idle = num_places
        self._num_late = 0
        self._running: Counter[str] = Counter()  # tasks by tenant, late ones included; none is 0

    async def run(self, tenant: str, work: Callable[[], _Result]) -> _Result:
        if self._idle > 0 and self._may(tenant):
            self._begin(tenant)
        else:
            await self._turn(tenant)
        loop, task = asyncio.get_running_loop(), _Task(tenant)
        running = loop.run_in_executor(self._threads, work)
        task.timer = loop.call_later(self._patience, self._overrun, task)
        running.add_done_callback(lambda done: self._end(task, done))
        return await asyncio.shield(running)  # the thread works on if the caller leaves: its place is not free before

    def _end(self, task: _Task, done: asyncio.Future[_Result]) -> None:
        if not done.cancelled():
            done.exception()  # else one that nobody waits for any more is logged, with what a client wrote in it
        self._leave(task)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _may(self, tenant: str) -> bool:
        return self._running[tenant] < self._num_places

    def _begin(self, tenant: str) -> None:
        self._idle -= 1
        self._running[tenant] += 1

    async def _turn(self, tenant: str) -> None:
        turn = self._turns.wait(tenant)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(_Task(tenant))  # it was called, and left in the same moment
            raise

    def _overrun(self, task: _Task) -> None:
        if self._num_late == self._most_late:
            task.timer = asyncio.get_running_loop().call_later(self._patience, self._overrun, task)
            return
        task.late = True
        self._num_late += 1
        self._idle += 1
        self._call()

    def _leave(self, task: _Task) -> None:
        if task.timer is not None:
            task.timer.cancel()
        self._running[task.tenant] -= 1
        if not self._running[task.tenant]:
            del self._running[task.tenant]
        if task.late:
            self._num_late -= 1
        else:
            self._idle += 1
        self._call()

    def _call(self) -> None:
        """Lets those begin that there is a place for."""
        while self._idle > 0 and (tenant := self._turns.call_next(self._may)) is not None:
            self._begin(tenant)
