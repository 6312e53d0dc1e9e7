"""Large answers: bodies that are made and sent piece by piece, as fast as the client reads and no faster.

Pieces are made in worker threads. A client that takes nothing for READER_PATIENCE seconds is dropped: what its answer
is made of holds memory that others wait for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor

from aiohttp import web
from aiohttp.http_writer import StreamWriter

from bequest.server.transport.pieces import Body, Piece, gathered

_log = logging.getLogger("bequest.server")

READER_PATIENCE = 30.0
_LEAST_PIECE = 1 << 18
_LARGEST_WRITE = 1 << 19  # what the socket does not take at once is copied


class ReaderStopped(ConnectionResetError):
    """The client took nothing for too long."""


async def made_off_loop(pieces: Iterator[Piece], pool: Executor) -> AsyncIterator[Piece]:
    """The pieces, each made in the pool."""
    loop = asyncio.get_running_loop()
    large = gathered(pieces, _LEAST_PIECE)
    while (piece := await loop.run_in_executor(pool, next, large, None)) is not None:
        yield piece


async def joined(body: Body, small: bool, pool: Executor) -> bytes:
    """A body as one piece, made in the pool unless it is `small`."""
    if small:
        return b"".join(body.pieces())
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: b"".join(body.pieces()))


async def send_body(
    http: web.Request, body: Body, small: bool, content_type: str, headers: dict[str, str], pool: Executor
) -> web.StreamResponse:
    """Sends a body; what it is made of may be let go when this returns. A `small` one goes out at once."""
    if small:
        return web.Response(body=b"".join(body.pieces()), content_type=content_type, headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_type = content_type
    response.content_length = body.size
    writer = await response.prepare(http)
    assert isinstance(writer, StreamWriter)
    async for piece in made_off_loop(body.pieces(), pool):
        for start in range(0, len(piece), _LARGEST_WRITE):
            await writer.write(memoryview(piece)[start : start + _LARGEST_WRITE], drain=False)
            await drained(writer)
    return response


async def drained(writer: StreamWriter, matters: Callable[[], bool] = lambda: True) -> None:
    """Waits until the client has taken what was written, or nearly. Raises ReaderStopped if it takes nothing for
    READER_PATIENCE seconds while that `matters`."""
    transport = writer.transport
    while transport is not None:
        left, mattered = transport.get_write_buffer_size(), matters()
        try:
            async with asyncio.timeout(READER_PATIENCE):
                await writer.drain()
            return
        except TimeoutError:
            if mattered and transport.get_write_buffer_size() >= left:
                _log.info("a client has not read its answer for %g s and is dropped", READER_PATIENCE)
                transport.abort()
                raise ReaderStopped("the client stopped reading") from None
