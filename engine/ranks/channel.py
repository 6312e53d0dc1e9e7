"""Messages from one process to others of the same machine, through memory that they share.

The writer puts the bytes of a message once, whatever the number of readers, into a ring:

        taken by the slowest reader          written
    ────────────┬───────────────────────────────┬──────────────   positions only grow; a byte lies at position % size
                └── not to be written over ─────┘

and sends each reader a few bytes over a socket, which wake it: the lengths of pieces. A message that is longer than the
ring passes in pieces. Readers note in the ring how much they have taken. A socket that ends says that its other side is
gone, however it went.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

_RING_BYTES = 16 << 20
_MOST_AT_ONCE = _RING_BYTES // 4  # a piece: readers take one while the next is written
_HEADER = struct.Struct("<QQ")  # bytes of a piece, and of its message that are still to come
_COUNT = struct.Struct("<Q")
_COUNT_STRIDE = 64  # a cache line for each reader
_LOOK = 0.0001  # seconds between looks whether slow readers have taken something


class ReaderGone(Exception):
    """A reader's side of the channel has ended."""


class _Ring:
    """Memory: what each reader has taken so far, then the bytes. It has no name, and ends with its last process."""

    def __init__(self, descriptor: int, num_readers: int) -> None:
        self._num_readers = num_readers
        self._begin = num_readers * _COUNT_STRIDE
        self._buffer = mmap.mmap(descriptor, self._begin + _RING_BYTES)

    @staticmethod
    def make(num_readers: int) -> int:
        """A descriptor of such memory."""
        descriptor = os.memfd_create("bequest-plans")
        os.ftruncate(descriptor, num_readers * _COUNT_STRIDE + _RING_BYTES)
        return descriptor

    def put(self, position: int, data: memoryview) -> None:
        at = position % _RING_BYTES
        first = min(len(data), _RING_BYTES - at)
        self._buffer[self._begin + at : self._begin + at + first] = data[:first]
        self._buffer[self._begin : self._begin + len(data) - first] = data[first:]

    def get(self, position: int, count: int) -> bytes:
        at = position % _RING_BYTES
        first = min(count, _RING_BYTES - at)
        end = bytes(self._buffer[self._begin : self._begin + count - first])
        return bytes(self._buffer[self._begin + at : self._begin + at + first]) + end

    def taken(self) -> int:
        """By the slowest reader."""
        return min(int(_COUNT.unpack_from(self._buffer, n * _COUNT_STRIDE)[0]) for n in range(self._num_readers))

    def take(self, reader: int, position: int) -> None:
        _COUNT.pack_into(self._buffer, reader * _COUNT_STRIDE, position)


class Writer:
    """The one side. Any thread may write; messages stay whole."""

    def __init__(self, readers: Sequence[socket.socket]) -> None:
        self._readers = readers
        self.descriptor = _Ring.make(len(readers))  # of the memory, for readers
        self._ring = _Ring(self.descriptor, len(readers))
        self._position = 0
        self._lock = threading.Lock()

    def write(self, message: bytes) -> None:
        """Raises ReaderGone."""
        with self._lock:
            rest = memoryview(message)
            while True:
                piece, rest = rest[:_MOST_AT_ONCE], rest[_MOST_AT_ONCE:]
                self._wait_for_room(len(piece))
                self._ring.put(self._position, piece)
                self._position += len(piece)
                self._wake(_HEADER.pack(len(piece), len(rest)))
                if not rest:
                    return

    def close(self) -> None:
        """Readers that wait see the end."""
        for reader in self._readers:
            reader.close()
        os.close(self.descriptor)

    def _wait_for_room(self, count: int) -> None:
        while self._position + count - self._ring.taken() > _RING_BYTES:
            time.sleep(_LOOK)
            for reader in self._readers:
                _check_there(reader)

    def _wake(self, header: bytes) -> None:
        try:
            for reader in self._readers:
                reader.sendall(header)
        except OSError as error:
            raise ReaderGone(f"a rank is gone: {error.strerror}") from None


class Reader:
    """One of the others. One thread reads."""

    def __init__(self, descriptor: int, number: int, num_readers: int, writer: socket.socket) -> None:
        self._ring = _Ring(descriptor, num_readers)
        self._number = number
        self._writer = writer
        self._position = 0

    def read(self) -> bytes | None:
        """The next message; None: there will be none."""
        message = bytearray()
        while True:
            header = _received(self._writer, _HEADER.size)
            if header is None:
                return None
            count, rest = _HEADER.unpack(header)
            message += self._ring.get(self._position, count)
            self._position += count
            self._ring.take(self._number, self._position)
            if not rest:
                return bytes(message)


def _check_there(reader: socket.socket) -> None:
    """Readers send nothing: what can be read of one is its end."""
    try:
        ended = reader.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return
    except OSError:
        ended = True
    if ended:
        raise ReaderGone("a rank is gone")


def _received(source: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        try:
            piece = source.recv(count - len(data))
        except OSError:
            return None
        if not piece:
            return None
        data += piece
    return data
