"""Work that would hold the event loop up goes to worker threads, each tenant's in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bequest.server.access.marks import TENANT
from bequest.server.context import Context
from bequest.server.operation.logs import CURRENT

INLINE_CHARS = 2000  # a millisecond or so; the way to the pool and back costs a tenth of one
_Result = TypeVar("_Result")


async def off_loop(context: Context, chars: int, work: Callable[[], _Result]) -> _Result:
    """Runs `work` over a text of so many characters, in the pool if it is long."""
    if chars <= INLINE_CHARS:
        return work()
    request = CURRENT.get()
    return await context.pool.run("" if request is None else request[TENANT], work)
