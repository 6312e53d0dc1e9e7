"""Work that would hold the event loop up goes to worker threads, each tenant's in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from bequest.server.access.marks import HELD, LIGHT, TENANT
from bequest.server.context import Context
from bequest.server.operation.logs import CURRENT

INLINE_CHARS = 2000  # a millisecond or so; the way to the pool and back costs a tenth of one
INLINE_BYTES = 1 << 14  # of a body: as long, whatever it holds
_BYTES_PER_CHAR = 330  # that the tokenizer takes while it works, of Chinese; of English a third
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Background:
    """Work for a tenant whose connection is gone."""

    tenant: str
    large: bool  # what it reads


_NOBODY = _Background("", large=False)
_BACKGROUND: ContextVar[_Background] = ContextVar("background", default=_NOBODY)


@contextmanager
def worked_for(tenant: str, large: bool) -> Iterator[None]:
    """What the running task does without a connection is the tenant's. `large`: what it reads is not small."""
    token = _BACKGROUND.set(_Background(tenant, large))
    try:
        yield
    finally:
        _BACKGROUND.reset(token)


def has_large_body() -> bool:
    """Of the request that the running task works for: there is much to do, files that it holds left aside."""
    request = CURRENT.get()
    return HELD in request and LIGHT not in request if request is not None else _BACKGROUND.get().large


def current_tenant() -> str:
    """Whom the running task works for."""
    request = CURRENT.get()
    return _BACKGROUND.get().tenant if request is None else request[TENANT]


async def in_pool(context: Context, work: Callable[[], _Result]) -> _Result:
    """Runs `work` that takes long, however little text it is about."""
    return await context.pool.run(current_tenant(), work)


async def off_loop(context: Context, chars: int, work: Callable[[], _Result]) -> _Result:
    """Runs `work` over a text of so many characters, in the pool if it is long, or is part of a large body."""
    if chars <= INLINE_CHARS and not has_large_body():
        return work()
    return await in_pool(context, work)


async def tokenised(context: Context, chars: int, work: Callable[[], _Result]) -> _Result:
    """The same of work that tokenises so many characters. The memory that takes is accounted for meanwhile."""
    request = CURRENT.get()
    if request is None or HELD not in request:
        return await off_loop(context, chars, work)
    held, needed = request[HELD], _BYTES_PER_CHAR * chars
    held.grow(needed)
    try:
        return await off_loop(context, chars, work)
    finally:
        held.grow(-needed)


def hold_more(context: Context, num_bytes: int) -> None:
    """Accounts for memory that the running task's request has until it ends. Raises where there is no room."""
    request = CURRENT.get()
    if request is None:
        return
    if HELD not in request:
        request[HELD] = context.in_flight.held_by(request[TENANT])
    request[HELD].grow(num_bytes)


async def apart(context: Context, work: Callable[[], _Result]) -> _Result:
    """Runs `work` over what a body says, in the pool if the body is large."""
    return await off_loop(context, 0, work)
