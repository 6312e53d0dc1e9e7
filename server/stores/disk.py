"""What must be on a disk when somebody is told so. Blocking: for worker threads.

A file that is written at once appears whole or not at all, under its name, after a crash too. A log grows line by line.
After a crash its last line may be torn, and is cut off when the log is opened again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_PRIVATE = 0o600  # what clients send and get is nobody else's
_PIECE = 1 << 20


class DiskError(OSError):
    """The disk did not do what it was asked: it is full, read-only, broken or gone."""


def write_durably(path: Path, data: bytes) -> None:
    """Replaces the file; it is on the disk when this returns. A disk that is full keeps nothing of it."""
    beside = path.with_name(path.name + ".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    move_durably(beside, path)


def move_durably(source: Path, target: Path) -> None:
    """REQUIRES: the content is on the disk; both lie on the same one."""
    os.replace(source, target)
    sync_directory(target.parent)


def sync_directory(path: Path) -> None:
    """The names in it are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


class LineLog:
    """A file that grows by whole lines. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = path.stat().st_size if path.exists() else 0

    def count(self) -> int:
        """Whole lines."""
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(_PIECE), b""))

    def recover(self) -> Iterator[bytes]:
        """The lines that are there, without their ends; cuts off what is behind the last whole one."""
        if not self.path.exists():
            return
        whole = 0
        with self.path.open("rb", buffering=_PIECE) as file:
            for line in file:
                if line.endswith(b"\n"):
                    whole += len(line)
                    yield line[:-1]
        if whole < self.num_bytes:
            os.truncate(self.path, whole)
            self.num_bytes = whole

    def append(self, lines: Sequence[bytes]) -> None:
        """They are on the disk when this returns, or none of them is there. Raises OSError."""
        is_new = not self.path.exists()
        data = b"".join(line + b"\n" for line in lines)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _PRIVATE)
        try:
            write_all(descriptor, data)
            os.fdatasync(descriptor)
        except OSError:
            os.ftruncate(descriptor, self.num_bytes)
            raise
        finally:
            os.close(descriptor)
        if is_new:
            sync_directory(self.path.parent)
        self.num_bytes += len(data)
