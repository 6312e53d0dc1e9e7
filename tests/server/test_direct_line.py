"""Large bodies that worker threads write to the socket: all bytes, in order, whatever the client does."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from bequest.server.transport import direct
from bequest.server.transport.direct import DirectLine

DATA = memoryview(os.urandom(1 << 23))


class Line:
    """A line over one end of a pair of sockets; the other is the client's."""

    def __init__(self) -> None:
        mine, self.client = socket.socketpair()
        mine.setblocking(False)
        self.mine, self.closing = mine, False
        transport = SimpleNamespace(
            get_extra_info=lambda name: mine if name == "socket" else None, is_closing=lambda: self.closing
        )
        self.writer: Any = SimpleNamespace(transport=transport, output_size=0, length=len(DATA), chunked=False)
        self.pool = ThreadPoolExecutor(1)
        assert DirectLine.can_open(self.writer)
        self.line = DirectLine(self.writer, self.pool)

    def close(self) -> None:
        self.line.close()
        self.mine.close()
        self.client.close()
        self.pool.shutdown()


def read_all(client: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        received += client.recv(1 << 16)
    return bytes(received)


async def test_all_bytes_come_in_order() -> None:
    line = Line()
    reading = asyncio.get_running_loop().run_in_executor(None, read_all, line.client, len(DATA))
    await line.line.write(DATA[:100], 5)
    await line.line.write(DATA[100:], 5)
    assert await reading == DATA
    assert line.writer.output_size == len(DATA) and line.writer.length == 0
    line.close()


async def test_a_client_that_reads_nothing_holds_no_thread() -> None:
    line = Line()
    writing = asyncio.ensure_future(line.line.write(DATA, 5))
    await asyncio.sleep(0.05)
    assert not writing.done()
    assert await asyncio.get_running_loop().run_in_executor(line.pool, lambda: 7) == 7
    reading = asyncio.get_running_loop().run_in_executor(None, read_all, line.client, len(DATA))
    await writing
    assert await reading == DATA
    line.close()


async def test_patience_ends() -> None:
    line = Line()
    with pytest.raises(TimeoutError):
        await line.line.write(DATA, 0.05)
    line.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_client_that_leaves(when: str) -> None:
    line = Line()
    if when == "before":
        line.client.close()
    writing = asyncio.ensure_future(line.line.write(DATA, 5))
    await asyncio.sleep(0.02)
    line.client.close()
    with pytest.raises(ConnectionResetError):
        await writing
    line.close()


async def test_a_connection_that_the_server_closes() -> None:
    line = Line()
    line.closing = True
    with pytest.raises(ConnectionResetError):
        await line.line.write(DATA, 5)
    line.close()


async def test_a_number_is_not_given_back_while_a_thread_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's file would get it."""
    line, began, go_on = Line(), threading.Event(), threading.Event()
    seen: list[int] = []

    def write(fd: int, data: memoryview) -> int:
        began.set()
        go_on.wait(10)
        seen.append(os.fstat(fd).st_ino)
        return len(data)

    monkeypatch.setattr(direct, "_write", write)
    fd = line.line._fd
    writing = asyncio.ensure_future(line.line.write(DATA, 5))
    await asyncio.get_running_loop().run_in_executor(None, began.wait, 10)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    line.line.close()
    inode = os.fstat(fd).st_ino
    go_on.set()
    line.pool.shutdown()
    assert seen == [inode]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    line.mine.close()
    line.client.close()
