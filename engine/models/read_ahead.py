"""Brings the files of a checkpoint into the page cache before their tensors are asked for.

Tensors are views of mapped files. Who touches one waits for its pages, a few at a time, and a disk is far from busy.
Threads that read large pieces one after another keep it busy. No torch here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PIECE = 8 << 20  # bytes of one read
_THREADS = 6
_MOST_SHARE = 0.7  # of the memory that is free: what is read must not push out what is still to be used


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """Reads the files from the first to the last, in threads that end with the context."""
    if sum(path.stat().st_size for path in files) > _MOST_SHARE * _free_bytes():
        yield
        return
    pieces, ended = _Pieces(files), threading.Event()
    count = min(_THREADS, len(pieces))
    threads = [threading.Thread(target=_read, args=(pieces, ended), name="read-ahead") for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


class _Pieces:
    """Hands out (file, offset) in order, to several threads."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._pieces = [(path, offset) for path in files for offset in range(0, path.stat().st_size, _PIECE)]
        self._left = iter(self._pieces)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Those that were taken as well."""
        return len(self._pieces)

    def take(self) -> tuple[Path, int] | None:
        with self._lock:
            return next(self._left, None)


def _read(pieces: _Pieces, ended: threading.Event) -> None:
    """What cannot be read here fails where its tensors are loaded, with an error that names them."""
    buffer: bytearray | None = None  # most files are here already, and to fill it with zeros takes milliseconds
    file, opened = -1, None
    try:
        while not ended.is_set() and (piece := pieces.take()) is not None:
            path, offset = piece
            if path != opened:
                file, opened = _reopened(file, path), path
            if not _is_cached(file, offset):
                buffer = buffer or bytearray(_PIECE)
                os.preadv(file, [buffer], offset)
    except OSError:
        return
    finally:
        if file >= 0:
            os.close(file)


def _is_cached(file: int, offset: int) -> bool:
    """Whether a few bytes of the piece come without waiting: then nothing is gained by copying all of it."""
    try:
        end = min(offset + _PIECE, os.fstat(file).st_size)  # behind it there is nothing to read, cached or not
        probes = range(offset, end, max(_PIECE // 4, 1))
        return all(os.preadv(file, [bytearray(1)], probe, os.RWF_NOWAIT) for probe in probes)
    except OSError:  # they would have to wait, or the file system cannot say
        return False


def _reopened(file: int, path: Path) -> int:
    """The same descriptor for another file."""
    other = os.open(path, os.O_RDONLY)
    if file < 0:
        return other
    os.dup2(other, file)
    os.close(other)
    return file


def _free_bytes() -> int:
    """That can be used without pushing anything out but older files."""
    try:
        with open("/proc/meminfo") as lines:
            kilobytes = next(line for line in lines if line.startswith("MemAvailable:")).split()[1]
        return int(kilobytes) * 1024
    except (OSError, StopIteration, ValueError):
        return 0
