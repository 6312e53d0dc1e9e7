"""Files that clients uploaded and that batches made: in a directory, by tenant, within a budget of bytes.

A file is its content and a small one beside it that says what it is. The second is written last: without it the first
is not there. The books are kept by the event-loop thread, and worker threads touch the disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from bequest.server.access.threads import DaemonThreads
from bequest.server.stores.disk import DiskError, sync_directory, write_all, write_durably
from bequest.server.wire.errors import ApiError
from bequest.server.wire.names import new_id
from bequest.server.wire.reading import shorten

_log = logging.getLogger("bequest.server")
_ABOUT = ".json"  # behind a file's name: what it is
_Result = TypeVar("_Result")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    path: str  # of its content, below the directory
    expires_at: int | None = None


class Budget:
    """Bytes on the disk. Where keys name several tenants, each may have half."""

    def __init__(self, most_bytes: int, num_tenants: Callable[[], int]) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self._num_tenants = num_tenants
        self._of_tenant: dict[str, int] = {}

    def add(self, tenant: str, num_bytes: int) -> None:
        """What is there is counted, not refused; less than nothing gives back."""
        self.used_bytes += num_bytes
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + num_bytes

    def take(self, tenant: str, num_bytes: int) -> None:
        self.check(tenant, num_bytes)
        self.add(tenant, num_bytes)

    def check(self, tenant: str, needed: int) -> None:
        share = self.most_bytes // 2 if self._num_tenants() > 1 else self.most_bytes
        own = self._of_tenant.get(tenant, 0)
        if own + needed > share:
            raise _full("Your share of this server's files", share, own, needed)
        if self.used_bytes + needed > self.most_bytes:
            raise _full("This server's files", self.most_bytes, self.used_bytes, needed)


def _full(whose: str, most: int, used: int, needed: int) -> ApiError:
    return ApiError(
        429,
        "files_full",
        f"{whose} take {used} of {most} bytes (--files-mb), and {needed} more are needed. Delete a file first.",
        details={"limit": most, "used": used, "needed": needed},
    )


class FileStore:
    def __init__(
        self, directory: Path, budget: Budget, clock: Callable[[], float] = time.time, tag: str | None = None
    ) -> None:
        """Reads what is there. `tag`: of the server, in the ids of new files. Raises OSError."""
        self.tag = tag
        self.directory = directory
        self.budget = budget
        self.clock = clock
        self._folder = directory / "files"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._threads = DaemonThreads(2, "files")
        self._files: dict[str, StoredFile] = {}  # oldest first
        self._read()

    def close(self) -> None:
        self._threads.shutdown()

    async def off_loop(self, work: Callable[[], _Result]) -> _Result:
        """Work with the disk. It goes on if the caller leaves. Raises DiskError."""
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))
        except OSError as error:
            named = () if error.filename is None else (error.filename,)
            raise DiskError(*error.args, *named) from error

    def path_of(self, file: StoredFile) -> Path:
        return self.directory / file.path

    def of(self, tenant: str) -> list[StoredFile]:
        """Oldest first."""
        return [file for file in self._files.values() if file.tenant == tenant and not self._expired(file)]

    def find(self, tenant: str, file_id: str, param: str | None = None) -> StoredFile:
        found = self._files.get(file_id)
        if found is None or found.tenant != tenant or self._expired(found):
            message = f"There is no file '{shorten(file_id, 100)}' here: it was never uploaded, was deleted or expired."
            raise ApiError(404, "file_not_found", message, param=param, absent=file_id)
        return found

    def input_of(self, tenant: str, file_id: str) -> StoredFile:
        """What a batch reads. It may have expired since the batch was made, but stays until the batch has ended."""
        found = self._files.get(file_id)
        return self.find(tenant, file_id) if found is None or found.tenant != tenant else found

    def knows(self, file_id: str) -> bool:
        """Whoever's it is."""
        return file_id in self._files

    @asynccontextmanager
    async def receiving(self, tenant: str, announced: int | None) -> AsyncIterator[Incoming]:
        """Room for an upload. What is announced must be free, but only what has come is taken."""
        self.budget.check(tenant, announced or 0)
        file_id = new_id("file-", self.tag)
        path = self._folder / file_id
        incoming = Incoming(self, tenant, file_id, await self.off_loop(lambda: _created(path)))
        try:
            yield incoming
        finally:
            incoming.close()

    async def keep(self, file: StoredFile) -> None:
        """The file is there from now on, even if the caller leaves meanwhile.

        REQUIRES: its content is on the disk, and its bytes are taken.
        """
        await asyncio.shield(asyncio.ensure_future(self._keep(file)))

    async def _keep(self, file: StoredFile) -> None:
        about = self._folder / (file.id + _ABOUT)
        await self.off_loop(lambda: write_durably(about, msgspec.json.encode(file)))
        self._files[file.id] = file

    async def delete(self, file: StoredFile) -> None:
        """It is not there from now on, and its room is free when this returns, or soon after if the caller leaves."""
        if self._files.pop(file.id, None) is not None:
            await asyncio.shield(asyncio.ensure_future(self._delete(file)))

    async def _delete(self, file: StoredFile) -> None:
        try:
            await self.off_loop(lambda: self._remove(file))
        except OSError:  # it takes its room still, and can be deleted again
            self._files = dict(sorted([*self._files.items(), (file.id, file)], key=lambda item: _age(item[1])))
            raise
        self.budget.add(file.tenant, -file.num_bytes)

    def expired(self) -> list[StoredFile]:
        return [file for file in self._files.values() if self._expired(file)]

    def _expired(self, file: StoredFile) -> bool:
        return file.expires_at is not None and self.clock() >= file.expires_at

    def _remove(self, file: StoredFile) -> None:
        """What says that it is there goes first."""
        (self._folder / (file.id + _ABOUT)).unlink(missing_ok=True)
        sync_directory(self._folder)
        self.path_of(file).unlink(missing_ok=True)

    def _read(self) -> None:
        found = []
        for path in self._folder.glob("*" + _ABOUT):
            try:
                file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
            except msgspec.DecodeError as error:
                _log.warning("%s is not about a file and is left alone: %s", path, error)
                continue
            if self.path_of(file).exists():
                found.append(file)
            else:
                _log.warning("the content of %s is gone", path)
        for file in sorted(found, key=_age):
            self._files[file.id] = file
            self.budget.add(file.tenant, file.num_bytes)
        known = {self.path_of(file) for file in found}
        for path in self._folder.glob("file-*"):
            if path not in known and not path.name.endswith(_ABOUT):
                path.unlink()  # an upload that did not come to its end


def _age(file: StoredFile) -> tuple[int, str]:
    """Oldest first."""
    return file.created_at, file.id


class Incoming:
    """The content of a file on its way in."""

    def __init__(self, store: FileStore, tenant: str, file_id: str, descriptor: int) -> None:
        self._store = store
        self._tenant = tenant
        self._id = file_id
        self._descriptor = descriptor
        self._kept = False
        self._working: asyncio.Future[None] | None = None  # the last work of a thread with the descriptor
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        self._store.budget.take(self._tenant, len(data))
        self.num_bytes += len(data)
        await self._work(lambda: write_all(self._descriptor, data))

    async def keep(self, filename: str, purpose: str, seconds: int | None) -> StoredFile:
        """`seconds` until it expires; None: it does not."""
        store, now = self._store, int(self._store.clock())
        await self._work(lambda: os.fsync(self._descriptor))
        file = StoredFile(
            id=self._id,
            tenant=self._tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=self.num_bytes,
            created_at=now,
            path=f"files/{self._id}",
            expires_at=None if seconds is None else now + seconds,
        )
        self._kept = True
        try:
            await store.keep(file)
        except OSError:
            self._kept = False
            raise
        return file

    def close(self) -> None:
        """What was not kept goes, as soon as no thread works with it."""
        if self._working is None or self._working.done():
            self._end()
        else:
            self._working.add_done_callback(lambda done: self._end())

    async def _work(self, work: Callable[[], None]) -> None:
        self._working = asyncio.ensure_future(self._store.off_loop(work))
        await asyncio.shield(self._working)

    def _end(self) -> None:
        os.close(self._descriptor)
        if not self._kept:
            self._store.budget.add(self._tenant, -self.num_bytes)
            with suppress(OSError):
                (self._store.directory / "files" / self._id).unlink(missing_ok=True)


def _created(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
