"""The directory of leases. Every call waits for the disk: never on the event loop, never on the device thread.

    DIR/lock                locked by the server that uses the directory
    DIR/blocks/<segment>    bytes of blocks, one behind the other; written once
    DIR/leases/<name>       the manifest of a lease: which blocks of which segments it has, and their checksums

A lease is there when its manifest is. Its segment is written and flushed first, then the directory of segments, then
the manifest under another name, which is flushed and renamed, then the directory of manifests. So a process or a
machine that stops at any point leaves a whole lease, or bytes that no manifest names: these are removed at the next
start.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from bequest.engine.errors import InvalidEstate
from bequest.engine.types.blocks import BlockBytes
from bequest.engine.types.estate import Manifest, StoredBlock
from bequest.engine.vault import manifest as manifests
from bequest.engine.vault.shelving import BrokenBlocks, Found, Keep, Scanned, Unwanted

log = logging.getLogger("bequest.estates")

_COMING = ".new"  # ends the names of manifests that are not there yet
_LOOK = 0.05  # seconds between two tries for the lock
_TORN_SECONDS = 30 * 86400.0  # that a broken manifest is kept: nobody knows any more when its lease was to end


class Shelf:
    """A Shelving."""

    name = "the disk"
    is_shared = False

    def __init__(self, path: Path, patience: float = 0.0) -> None:
        """Raises OSError if the directory cannot be used, or another server uses it for longer than `patience`
        seconds."""
        self._blocks, self._leases = path / "blocks", path / "leases"
        for folder in (self._blocks, self._leases):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + patience
        while not try_lock(self._lock):
            if time.monotonic() >= end:
                os.close(self._lock)
                raise OSError(errno.EBUSY, "another server uses this directory", str(path))
            time.sleep(_LOOK)

    def close(self) -> None:
        """Another server may use the directory."""
        os.close(self._lock)

    # --- writing -------------------------------------------------------------------------------------------------

    def put(self, segment: str, pieces: Iterable[BlockBytes]) -> list[int]:
        """Writes blocks; their checksums. All or nothing. Raises OSError."""
        path, sums = self._blocks / segment, list[int]()
        try:
            with open(path, "xb", buffering=0, opener=_private) as file:
                for piece in pieces:
                    sums += [zlib.crc32(block.data) for block in piece]
                    _write(file.fileno(), np.ascontiguousarray(piece).reshape(-1).data)
                os.fsync(file.fileno())
            flush_folder(self._blocks)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        return sums

    def share(self, segments: Sequence[str], parent: Manifest, child: str) -> bool:
        """Who uses the directory alone need not say so: its books hold them."""
        return True

    def publish(self, manifest: Manifest) -> None:
        """The lease is there from now on, or it is as it was before. Raises OSError. REQUIRES: its blocks were put"""
        path = self._path(manifest)
        coming = path.with_suffix(_COMING)
        try:
            with open(coming, "wb", buffering=0, opener=_private) as file:
                _write(file.fileno(), memoryview(manifests.to_bytes(manifest)))
                os.fsync(file.fileno())
            coming.rename(path)
            flush_folder(self._leases)
        except BaseException:
            with suppress(OSError):
                coming.unlink()
            raise

    def withdraw(self, manifest: Manifest, segments: Sequence[str]) -> None:
        """The lease is over, and nobody else has blocks of these segments. A disk that fails is none of anybody's
        business here: what is left is removed at the next start."""
        with suppress(OSError):
            self._path(manifest).unlink(missing_ok=True)
            flush_folder(self._leases)
        self.remove(segments)

    def remove(self, segments: Iterable[str]) -> None:
        for segment in segments:
            with suppress(OSError):
                (self._blocks / segment).unlink(missing_ok=True)

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, blocks: Sequence[StoredBlock], into: BlockBytes) -> None:
        """Raises OSError or BrokenBlocks."""
        for begin, end in _runs(blocks):
            first = blocks[begin]
            descriptor = os.open(self._blocks / first.segment, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _read(descriptor, into[begin:end].reshape(-1).data, first.index * into.shape[1])
            finally:
                os.close(descriptor)
        for block, row in zip(blocks, into, strict=True):
            if zlib.crc32(row.data) != block.checksum:
                raise BrokenBlocks("the bytes of a block have changed since they were written")

    def scan(self, keep: Keep) -> Scanned:
        """The leases that are there; `keep` says why one is not wanted. Others, and bytes that no lease has, go. A
        manifest that is broken stays for a while: whoever was promised its lease hears that it is lost."""
        found: list[Found] = []
        waiting: list[Manifest] = []
        torn: set[str] = set()
        for path in sorted(self._leases.iterdir()):
            try:
                manifest = manifests.from_bytes(path.read_bytes())
            except (OSError, InvalidEstate) as error:
                if (marks := manifests.marks_in(path.name)) and _age(path) < _TORN_SECONDS:
                    log.error("the lease in %s is lost: %s", path.name, error)
                    torn.update(marks)
                else:
                    _clear(path, str(error))
                continue
            unwanted = keep(manifest)
            if path.name != manifests.file_name(manifest):
                unwanted = Unwanted("it was never finished" if path.suffix == _COMING else "its name is another's")
            if unwanted is None:
                found.append(Found(manifest, self._lacks(manifest)))
            elif unwanted.yet:
                waiting.append(manifest)
            else:
                _clear(path, unwanted.why)
        wanted = {block.segment for one in (*(one.manifest for one in found), *waiting) for block in one.blocks}
        self.remove(path.name for path in self._blocks.iterdir() if path.name not in wanted)
        return Scanned(found, waiting, frozenset(torn))

    def find(self, tenant: str, reference: str, keep: Keep) -> Found | None:
        """Nobody else writes here: what there is was found at the start."""
        return None

    def _lacks(self, manifest: Manifest) -> bool:
        """Whether blocks of it are missing, as far as the sizes of files tell."""
        needed: dict[str, int] = {}
        for block in manifest.blocks:
            needed[block.segment] = max(needed.get(block.segment, 0), block.index + 1)
        try:
            sizes = {segment: (self._blocks / segment).stat().st_size for segment in needed}
        except OSError:
            return True
        return any(sizes[name] < count * manifest.deed.identity.cache.num_bytes for name, count in needed.items())

    def _path(self, manifest: Manifest) -> Path:
        return self._leases / manifests.file_name(manifest)


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _clear(path: Path, why: str) -> None:
    log.info("a lease in %s is cleared: %s", path.name, why)
    with suppress(OSError):
        path.unlink()


def _age(path: Path) -> float:
    """Seconds since it was written."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _runs(blocks: Sequence[StoredBlock]) -> list[tuple[int, int]]:
    """Stretches of blocks that lie one behind the other in one segment."""
    runs: list[tuple[int, int]] = []
    for i, block in enumerate(blocks):
        last = blocks[i - 1] if i else None
        if last is not None and (last.segment, last.index + 1) == (block.segment, block.index):
            runs[-1] = runs[-1][0], i + 1
        else:
            runs.append((i, i + 1))
    return runs


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read(descriptor: int, into: memoryview, offset: int) -> None:
    while into:
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            raise BrokenBlocks("a file of blocks is cut short")
        into, offset = into[count:], offset + count


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def flush_folder(path: Path) -> None:
    """A name is as lasting as its folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
