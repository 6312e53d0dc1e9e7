"""Room for the hidden states of requests with several inputs.

Such a request holds the states of its first inputs while it waits for those of the last, and could so wait for another
one that does the same. So it takes room for all of them before it begins, and waits for that while it holds nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bequest.engine.errors import DeadlineExceeded, QueueFull


class Room:
    """First come, first served. Lives on the event-loop thread."""

    def __init__(self, capacity: int, most_waiting: int) -> None:
        """`capacity` in bytes."""
        self._capacity = capacity
        self._most_waiting = most_waiting
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, num_bytes: int, deadline: float | None) -> AsyncIterator[None]:
        """Waits for the room and keeps it. REQUIRES: num_bytes ≤ capacity. Raises QueueFull, DeadlineExceeded."""
        await self._take(num_bytes, deadline)
        try:
            yield
        finally:
            self._give_back(num_bytes)

    async def _take(self, num_bytes: int, deadline: float | None) -> None:
        if not num_bytes:
            return
        if not self._waiting and self._used + num_bytes <= self._capacity:
            self._used += num_bytes
            return
        if len(self._waiting) >= self._most_waiting:
            most = self._most_waiting
            raise QueueFull(f"The server's queue is full ({most} waiting extractions); try again later.")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._give_back(num_bytes)
            else:
                self._waiting.remove((num_bytes, turn))
                self._let_in()
            if isinstance(error, TimeoutError):
                message = "The extraction still waited for memory at the timeout."
                raise DeadlineExceeded(message, field="deadline") from None
            raise

    def _give_back(self, num_bytes: int) -> None:
        self._used -= num_bytes
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._used + self._waiting[0][0] <= self._capacity:
            num_bytes, turn = self._waiting.popleft()
            self._used += num_bytes
            turn.set_result(None)
