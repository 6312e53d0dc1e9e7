"""Turns between tenants where requests meet before the engine knows them: on the event loop, and in worker threads.

First come, first served would let one that sends a thousand requests at once hold up everybody: the next request of
another tenant, which waits behind all of them, and every stream, whose tokens wait until the loop is through with them.

Owned by the event-loop thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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

    def call_next(self) -> bool:
        """False: nobody waits. Those who left meanwhile are passed over."""
        while self._waiting:
            tenant, waiting = self._waiting.popitem(last=False)
            turn = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting  # behind the others
            if not turn.done():
                turn.set_result(None)
                return True
        return False


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
        while self._left > 0 and self._turns.call_next():
            self._left -= 1
        if self._left < _AT_ONCE:
            self._go_around()


class FairPool:
    """Worker threads that tenants take turns at."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._turns = _Turns()
        self._idle = num_threads

    async def run(self, tenant: str, work: Callable[[], _Result]) -> _Result:
        if self._idle > 0:
            self._idle -= 1
        else:
            await self._turn(tenant)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _: self._leave())
        return await asyncio.shield(running)  # the thread works on if the caller leaves: its place is not free before

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str) -> None:
        turn = self._turns.wait(tenant)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # it was called, and left in the same moment
            raise

    def _leave(self) -> None:
        if not self._turns.call_next():
            self._idle += 1
