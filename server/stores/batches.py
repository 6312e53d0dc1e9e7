"""Batches, as they stand on the disk: one small file each, written anew whenever the status changes.

The answers of a batch that runs are in two logs beside it. How many there are is not written down: after a restart the
logs themselves tell. The books are kept by the event-loop thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from bequest.server.stores.disk import LineLog, sync_directory, write_durably
from bequest.server.stores.files import Budget, FileStore
from bequest.server.wire.errors import ApiError
from bequest.server.wire.reading import shorten

_log = logging.getLogger("bequest.server")
_KEPT_SECONDS = 30 * 86400  # after its end, that a batch can be asked about
MOST_OPEN = 100  # batches of a tenant that have not ended

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
ENDED: tuple[Status, ...] = ("completed", "failed", "expired", "cancelled")


class Tokens(msgspec.Struct, kw_only=True):
    """Of all answers."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0


class Batch(msgspec.Struct, kw_only=True):
    id: str
    tenant: str
    key: str  # the name of the key that made it
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_expires_after: int | None = None  # seconds
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[str, int] = {}  # `in_progress_at` and the like
    errors: list[dict[str, Any]] = []  # why it failed
    # What the logs become when it ends; named at its beginning, so that an end that is cut off can be repeated.
    output_id: str
    error_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    tokens: Tokens = msgspec.field(default_factory=Tokens)
    model: str | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def enter(self, status: Status, now: float) -> None:
        self.status = status
        self.times = {**self.times, f"{status}_at": int(now)}


class BatchStore:
    def __init__(self, directory: Path, files: FileStore) -> None:
        """Reads what is there. Raises OSError."""
        self._folder = directory / "batches"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._files = files
        self._batches: dict[str, Batch] = {}  # oldest first
        self._saving = asyncio.Lock()  # two that save the same batch write to the same file
        self._read()

    def of(self, tenant: str) -> list[Batch]:
        """Oldest first."""
        return [batch for batch in self._batches.values() if batch.tenant == tenant]

    def find(self, tenant: str, batch_id: str) -> Batch:
        found = self._batches.get(batch_id)
        if found is None or found.tenant != tenant:
            message = f"There is no batch '{shorten(batch_id, 100)}' here."
            raise ApiError(404, "batch_not_found", message, absent=batch_id)
        return found

    def unfinished(self) -> list[Batch]:
        return [batch for batch in self._batches.values() if not batch.ended]

    def reader_of(self, file_id: str) -> Batch | None:
        """The batch that still reads the file."""
        return next((batch for batch in self.unfinished() if batch.input_file_id == file_id), None)

    def check_open(self, tenant: str) -> None:
        if sum(batch.tenant == tenant for batch in self.unfinished()) >= MOST_OPEN:
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"There are {MOST_OPEN} batches already that have not ended, the most that one tenant may have; wait "
                "for one of them, or cancel it.",
                details={"limit": MOST_OPEN},
            )

    async def create(self, batch: Batch) -> None:
        """It is on the disk when this returns. It counts and reads its file at once, whoever else comes meanwhile."""
        self._batches[batch.id] = batch
        try:
            await self.save(batch)
        except OSError:
            del self._batches[batch.id]
            raise

    async def save(self, batch: Batch) -> None:
        """It is on the disk when this returns, and soon after if the caller leaves."""
        await asyncio.shield(asyncio.ensure_future(self._save(batch)))

    async def _save(self, batch: Batch) -> None:
        async with self._saving:
            data, path = msgspec.json.encode(batch), self._path(batch)
            await self._files.off_loop(lambda: write_durably(path, data))

    def answers(self, batch: Batch) -> LineLog:
        return LineLog(self._folder / f"{batch.id}.answers")

    def failures(self, batch: Batch) -> LineLog:
        return LineLog(self._folder / f"{batch.id}.errors")

    async def forget_old(self) -> None:
        """The files that they made stay."""
        before = self._files.clock() - _KEPT_SECONDS
        old = [b for b in self._batches.values() if b.ended and b.times.get(f"{b.status}_at", b.created_at) < before]
        for batch in old:
            del self._batches[batch.id]
            path = self._path(batch)
            await self._files.off_loop(lambda path=path: path.unlink(missing_ok=True))  # type: ignore[misc]
        if old:
            await self._files.off_loop(lambda: sync_directory(self._folder))

    def _path(self, batch: Batch) -> Path:
        return self._folder / f"{batch.id}.json"

    def _read(self) -> None:
        found = []
        for path in self._folder.glob("batch_*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Batch))
            except msgspec.DecodeError as error:
                _log.warning("%s is not about a batch and is left alone: %s", path, error)
        for batch in sorted(found, key=lambda batch: (batch.created_at, batch.id)):
            self._batches[batch.id] = batch
            if not batch.ended:  # it must not seem to have lost anything until its logs are read
                batch.completed, batch.failed = self.answers(batch).count(), self.failures(batch).count()


class Disk:
    """The directory of --files-dir. One server has it at a time."""

    def __init__(self, directory: str, most_bytes: int, num_tenants: Callable[[], int], tag: str | None = None) -> None:
        """Raises OSError, whose message names the flag."""
        self._lock = _locked(directory)
        path = Path(directory)
        try:
            self.files = FileStore(path, Budget(most_bytes, num_tenants), tag=tag)
            self.batches = BatchStore(path, self.files)
        except OSError as error:
            os.close(self._lock)
            raise OSError(f"--files-dir {directory}: {error}") from None

    def close(self) -> None:
        self.files.close()
        os.close(self._lock)


def check_directory(directory: str) -> None:
    """Raises OSError where `Disk` would: worth knowing before a model is loaded."""
    os.close(_locked(directory))


def _locked(directory: str) -> int:
    """The descriptor of the lock, which lasts as long as it is open."""
    path = Path(directory)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OSError(f"--files-dir {directory}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise OSError(f"--files-dir {directory}: another server uses it; give each its own") from None
    return lock
