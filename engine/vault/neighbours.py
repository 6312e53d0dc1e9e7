"""Leases in directories beside each other, one of each server, on a file system that all of them see.

    FOLDER/<server>/lock, blocks/, leases/      as in shelf.py

A server writes to its own directory alone, and locks it as long as it runs. Who is asked for a lease that it does not
have looks into the others. If the lock of that directory is held, its server runs, and is the one to ask. If it is
free, the server has ended: the lease moves here. Its bytes get a second name here, its manifest is written here, and
then the old one goes. A process that ends in between leaves the lease whole in one directory, or in both.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bequest.engine.errors import InvalidEstate, ParentElsewhere, ParentLost
from bequest.engine.inheritance.books import segments_of
from bequest.engine.types.estate import Manifest
from bequest.engine.vault import manifest as manifests
from bequest.engine.vault.manifest import mark_of
from bequest.engine.vault.shelf import Shelf, flush_folder, try_lock
from bequest.engine.vault.shelving import Found, Keep

log = logging.getLogger("bequest.estates")

_TRIES = 3
_PATIENCE = 10.0  # seconds for a neighbour to take a lease out of this directory, while its server was away


class _Moved(Exception):
    """Another neighbour was quicker."""


class NeighbourShelf(Shelf):
    """A Shelving whose directory stands beside those of other servers."""

    is_shared = True

    def __init__(self, path: Path) -> None:
        """Raises OSError if the directory cannot be used, or another server uses it."""
        super().__init__(path, _PATIENCE)
        self._path_of_own = path

    def find(self, tenant: str, reference: str, keep: Keep) -> Found | None:
        """Raises OSError, ParentLost, or ParentElsewhere where the server that has it runs."""
        mark = mark_of(tenant, reference)
        for _ in range(_TRIES):
            with suppress(_Moved):
                for place in self._neighbours():
                    with _reachable(place):
                        for name in _names_in(place / "leases"):
                            if mark in manifests.marks_in(name):
                                return self._take(place, name, reference, keep)
                return None
        return None

    def withdraw(self, manifest: Manifest, segments: Sequence[str]) -> None:
        """Also under a name that a lease had where it came from, and that somebody else has here."""
        mark = mark_of(manifest.deed.identity.tenant, manifest.deed.id)
        with suppress(OSError):
            for path in self._leases.glob(f"{mark}-*"):
                path.unlink(missing_ok=True)
        super().withdraw(manifest, segments)

    def _neighbours(self) -> list[Path]:
        beside = self._path_of_own.parent.iterdir()
        return sorted(path for path in beside if path.name != self._path_of_own.name)

    def _take(self, place: Path, name: str, reference: str, keep: Keep) -> Found | None:
        with locked(place) as is_free:
            if not is_free:
                raise ParentElsewhere(
                    f"The server '{place.name}' has '{reference}', and runs.",
                    reason="parent_elsewhere",
                    details={"replica": place.name},
                    reference=reference,
                )
            path = place / "leases" / name
            try:
                manifest = manifests.from_bytes(path.read_bytes())
            except FileNotFoundError:
                raise _Moved from None
            except InvalidEstate as error:
                log.error("the lease in %s is lost: %s", path, error)
                raise ParentLost(f"The lease '{reference}' is lost.", reason="parent_lost", id=reference) from None
            if (unwanted := keep(manifest)) is not None:
                log.info("a lease in %s is left there: %s", path, unwanted.why)
                return None
            return self._move(place, path, manifest)

    def _move(self, place: Path, path: Path, manifest: Manifest) -> Found:
        for segment in segments_of(manifest):
            with suppress(FileExistsError, FileNotFoundError):  # another lease brought it; it is lost, and is found so
                os.link(place / "blocks" / segment, self._blocks / segment)
        flush_folder(self._blocks)
        self.publish(manifest)
        path.unlink()
        flush_folder(path.parent)
        log.info("the lease %s is taken over from %s", manifest.deed.id, place.name)
        return Found(manifest, self._lacks(manifest))


@contextmanager
def locked(place: Path) -> Iterator[bool]:
    """Whether no server uses the directory; then none can begin to, until the block ends. Neighbours who come at the
    same time wait for each other, lest they take each other for that server."""
    with _opened(place / "taking") as taking, _opened(place / "lock") as lock:
        fcntl.flock(taking, fcntl.LOCK_EX)
        yield try_lock(lock)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _names_in(folder: Path) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


@contextmanager
def _reachable(place: Path) -> Iterator[None]:
    """What cannot be read keeps nobody from what others left: a file system has folders of its own at its top."""
    try:
        yield
    except OSError as error:
        log.warning("the leases in %s were not looked at: %s", place, error.strerror)
