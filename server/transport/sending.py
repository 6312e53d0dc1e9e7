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

from bequest.server.transport.direct import DirectLine
from bequest.server.transport.pieces import Body, Piece, gathered

_log = logging.getLogger("bequest.server")

READER_PATIENCE = 30.0
_LEAST_PIECE = 1 << 18
_LARGEST_WRITE = 1 << 19  # what the socket does not take at once is copied
_FIRST_WRITE = 1 << 12


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
    pieces = made_off_loop(body.pieces(), pool)
    if DirectLine.can_open(writer):
        await _send_directly(writer, pieces, pool)
        return response
    async for piece in pieces:
        for start in range(0, len(piece), _LARGEST_WRITE):
            await writer.write(memoryview(piece)[start : start + _LARGEST_WRITE], drain=False)
            await drained(writer)
    return response


async def _send_directly(writer: StreamWriter, pieces: AsyncIterator[Piece], pool: Executor) -> None:
    """The first bytes go the ordinary way, behind the headers; when they have left, the socket is the threads'."""
    first = memoryview(await anext(pieces))
    transport = writer.transport
    assert transport is not None
    transport.set_write_buffer_limits(high=0)
    try:
        await writer.write(first[:_FIRST_WRITE], drain=False)
        while transport.get_write_buffer_size() and not transport.is_closing():
            await drained(writer)
    finally:
        transport.set_write_buffer_limits()
    line = DirectLine(writer, pool)
    try:
        await line.write(first[_FIRST_WRITE:], READER_PATIENCE)
        async for piece in pieces:
            await line.write(memoryview(piece), READER_PATIENCE)
    except TimeoutError:
        raise _dropped(transport) from None
    finally:
        line.close()


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
                raise _dropped(transport) from None


def _dropped(transport: asyncio.WriteTransport) -> ReaderStopped:
    _log.info("a client has not read its answer for %g s and is dropped", READER_PATIENCE)
    transport.abort()
    return ReaderStopped("the client stopped reading")
