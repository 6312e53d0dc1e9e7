"""How a streamed answer begins: with its first event, or with comments, where that takes long.

Most of them wait for the engine, and server/transport/sse.py waits with them. What continues a parent that still runs
waits before there is anything to give to the engine: meanwhile `in_time` keeps the connection from looking dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from bequest.server.transport.noting import note_error
from bequest.server.wire.errors import ApiError

_log = logging.getLogger("bequest.server")

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer of which comments alone were sent, and the events to end it with should something go wrong."""

    response: web.StreamResponse
    failed: Callable[[ApiError], bytes]

    async def fail(self, request: web.Request, error: ApiError) -> web.StreamResponse:
        note_error(request, error)
        log_failure(error)
        await self.response.write_eof(self.failed(error))
        return self.response


BEGUN: web.RequestKey[Begun] = web.RequestKey("begun", Begun)  # of a request, until its events take over


async def in_time(
    request: web.Request,
    interval: float,
    headers: dict[str, str],
    failed: Callable[[ApiError], bytes],
    work: Awaitable[_Result],
) -> _Result:
    """Awaits `work`, and sends a comment after each `interval` that it takes; 0: none."""
    if interval <= 0:
        return await work
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=interval))[0]:
            if BEGUN not in request:
                response = request[BEGUN] = Begun(_response(headers), failed)
                await response.response.prepare(request)
            await request[BEGUN].response.write(KEEP_ALIVE)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def begin(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    """The answer that events are written to."""
    begun = request.pop(BEGUN, None)
    return _response(headers) if begun is None else begun.response


def log_failure(error: ApiError) -> None:
    """The message of a fault of ours: others may quote what the client sent."""
    _log.warning("the stream ended with an error: %s%s", error.code, f": {error.message}" * (error.status >= 500))


def _response(headers: dict[str, str]) -> web.StreamResponse:
    return web.StreamResponse(headers={**HEADERS, **headers})
