"""Large bodies written to a connection's socket by worker threads, past the event loop.

To hand a megabyte to a socket is to copy it: tenths of a millisecond, for which an event loop would keep everybody else
waiting. A thread writes as long as the socket takes anything. When that is full the event loop waits for the client, so
that slow clients hold no thread.
"""

from __future__ import annotations

import asyncio
import os
import select
from concurrent.futures import Executor, Future

from aiohttp.http_writer import StreamWriter

_LARGEST_WRITE = 1 << 20  # bytes, of one call
_SOON = 2  # milliseconds that a thread waits for a client that reads: to come back later takes longer


class DirectLine:
    """The socket of an answer whose first bytes are on their way. Used from the event loop, closed at the end."""

    def __init__(self, writer: StreamWriter, pool: Executor) -> None:
        transport = writer.transport
        assert transport is not None
        self._writer, self._transport, self._pool = writer, transport, pool
        self._fd = os.dup(transport.get_extra_info("socket").fileno())  # the transport's may be closed meanwhile
        self._writing: Future[int] | None = None

    @staticmethod
    def can_open(writer: StreamWriter) -> bool:
        """Whether bytes go to the socket as they are."""
        transport = writer.transport
        if transport is None or writer.chunked or writer.length is None:
            return False
        plain = transport.get_extra_info("sslcontext") is None
        return plain and transport.get_extra_info("socket") is not None

    async def write(self, data: memoryview, patience: float) -> None:
        """All of it. Raises ConnectionResetError; TimeoutError if the client takes nothing for `patience` seconds."""
        sent = 0
        while sent < len(data):
            if self._transport.is_closing():
                raise ConnectionResetError("the connection is closed")
            self._writing = self._pool.submit(_write, self._fd, data[sent:])
            try:
                sent += await asyncio.wrap_future(self._writing)
            except BrokenPipeError as error:
                raise ConnectionResetError(str(error)) from None
            if sent < len(data):
                await self._wait_for_room(patience)
        self._writer.output_size += len(data)
        if self._writer.length is not None:
            self._writer.length -= len(data)

    async def _wait_for_room(self, patience: float) -> None:
        loop = asyncio.get_running_loop()
        room = loop.create_future()
        loop.add_writer(self._fd, lambda: None if room.done() else room.set_result(None))
        try:
            async with asyncio.timeout(patience):
                await room
        finally:
            loop.remove_writer(self._fd)

    def close(self) -> None:
        """A thread that still writes, to a client that nobody waits for any more, ends with what the socket takes."""
        fd = self._fd
        if self._writing is None:
            os.close(fd)
        else:
            self._writing.add_done_callback(lambda _: os.close(fd))  # at once, if it is done


def _write(fd: int, data: memoryview) -> int:
    """How many bytes the socket took."""
    sent = 0
    room = select.poll()
    room.register(fd, select.POLLOUT)
    while sent < len(data):
        try:
            sent += os.write(fd, data[sent : sent + _LARGEST_WRITE])
        except BlockingIOError:
            if not room.poll(_SOON):
                break
    return sent
