"""Leases in a store of objects that many servers share. Every call waits for the network.

    NAME/leases/<mark>.a, .b        the manifest of a lease, by the mark of its id, behind the time of its writing
    NAME/names/<mark>               the mark of the id that a client's name stands for
    NAME/blocks/<segment>/<number>  bytes of blocks, some in one object
    NAME/refs/<segment>/<mark>      a lease that has blocks of another lease's segment
    NAME/shared/<segment>           there was such a lease

An object is written once, and is there as a whole or not at all. So a manifest that changes is written to the other one
of its two places before the old one goes: a process that ends in between leaves one of them, or both.

Servers do not know of each other. A segment is its owner's, whose mark is a part of its name. Before a child borrows a
segment it says so, and then looks whether its parent is still there. Whoever ends a lease removes the manifest first,
and then looks who has said so. One of the two sees the other.
"""

from __future__ import annotations

import logging
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bequest.engine.errors import InvalidEstate
from bequest.engine.inheritance.books import segments_of
from bequest.engine.types.blocks import BlockBytes
from bequest.engine.types.estate import Manifest, StoredBlock
from bequest.engine.vault import manifest as manifests
from bequest.engine.vault.manifest import mark_of
from bequest.engine.vault.shelving import BrokenBlocks, Found, Keep, Scanned

log = logging.getLogger("bequest.estates")

_OBJECT_BYTES = 4 << 20  # of blocks in one object, at most; a block that is larger has one of its own
_COMING_SECONDS = 3600.0  # that something may be on its way before its manifest is there
_STAMP = struct.Struct(">d")
_PLACES = ("a", "b")


class ObjectStore(Protocol):
    """Objects under keys. Every call may raise OSError."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """All or nothing, in two copies that are not pushed out. One that is there stays as it is."""

    def get(self, key: str) -> bytes | None: ...

    def exists(self, key: str) -> bool: ...

    def keys(self, prefix: str) -> list[str]: ...

    def remove(self, key: str) -> None:
        """Idempotent."""

    def remove_under(self, prefix: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Version:
    key: str
    written: float
    manifest: Manifest | None  # None: it is broken


class ObjectShelf:
    """A Shelving."""

    name = "the store"
    is_shared = True

    def __init__(self, store: ObjectStore, name: str, clock: Callable[[], float] = time.time) -> None:
        """`name`: what all keys begin with. `clock`: seconds since 1970."""
        self._store = store
        self._name = name
        self._clock = clock

    def close(self) -> None:
        self._store.close()

    # --- writing -------------------------------------------------------------------------------------------------

    def put(self, segment: str, pieces: Iterable[BlockBytes]) -> list[int]:
        blocks = [block for piece in pieces for block in piece]
        size = _per_object(blocks[0].nbytes)
        try:
            for number, begin in enumerate(range(0, len(blocks), size)):
                content = np.concatenate(blocks[begin : begin + size])
                self._store.put(self._key("blocks", segment, str(number)), content.data)
        except BaseException:
            self._drop(segment)
            raise
        return [zlib.crc32(block.data) for block in blocks]

    def share(self, segments: Sequence[str], parent: Manifest, child: str) -> bool:
        now = _STAMP.pack(self._clock())
        for segment in segments:
            self._store.put(self._key("refs", segment, child), now)
            self._store.put(self._key("shared", segment), now)
        if any(self._store.exists(key) for key in self._places(_mark(parent))):
            return True
        for segment in segments:
            self._store.remove(self._key("refs", segment, child))
        return False

    def publish(self, manifest: Manifest) -> None:
        mark, deed = _mark(manifest), manifest.deed
        if deed.name is not None:
            key = self._key("names", mark_of(deed.identity.tenant, deed.name))
            if self._store.get(key) != mark.encode():
                self._store.remove(key)
                self._store.put(key, mark.encode())
        before = self._versions(mark)
        places = [key for key in self._places(mark) if not before or key != before[-1].key]
        for old in before[:-1]:
            self._store.remove(old.key)
        self._store.put(places[0], _STAMP.pack(self._clock()) + manifests.to_bytes(manifest))
        for old in before[-1:]:
            self._store.remove(old.key)

    def withdraw(self, manifest: Manifest, segments: Sequence[str]) -> None:
        mark, deed = _mark(manifest), manifest.deed
        with suppress(OSError):
            if manifest.expires_at <= self._clock() and self._lasts_longer(manifest):
                return  # by another server's word
            for key in self._places(mark):
                self._store.remove(key)
            if deed.name is not None:
                key = self._key("names", mark_of(deed.identity.tenant, deed.name))
                if self._store.get(key) == mark.encode():
                    self._store.remove(key)
            for segment in segments_of(manifest):
                if manifests.owner_of(segment) != mark:
                    self._store.remove(self._key("refs", segment, mark))
        self.remove(segments)

    def remove(self, segments: Iterable[str]) -> None:
        with suppress(OSError):
            for segment in segments:
                if not self._is_needed(segment):
                    self._drop(segment)

    def _lasts_longer(self, manifest: Manifest) -> bool:
        newest = self._newest(_mark(manifest))
        return newest is not None and newest.expires_at > manifest.expires_at

    def _is_needed(self, segment: str) -> bool:
        """By a lease that only others may know."""
        newest = self._newest(manifests.owner_of(segment))
        if newest is not None and segment in segments_of(newest):
            return True
        return self._store.exists(self._key("shared", segment)) and bool(
            self._store.keys(self._key("refs", segment, ""))
        )

    def _drop(self, segment: str) -> None:
        with suppress(OSError):
            self._store.remove_under(self._key("blocks", segment, ""))
            self._store.remove_under(self._key("refs", segment, ""))
            self._store.remove(self._key("shared", segment))

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, blocks: Sequence[StoredBlock], into: BlockBytes) -> None:
        block_bytes = into.shape[1]
        size, held = _per_object(block_bytes), ("", b"")
        for block, row in zip(blocks, into, strict=True):
            key = self._key("blocks", block.segment, str(block.index // size))
            if held[0] != key:
                held = key, self._object(key)
            begin = block.index % size * block_bytes
            found = np.frombuffer(held[1], np.uint8)[begin : begin + block_bytes]
            if len(found) < block_bytes or zlib.crc32(found.data) != block.checksum:
                raise BrokenBlocks("the bytes of a block are not those that were written")
            row[:] = found

    def scan(self, keep: Keep) -> Scanned:
        """What is another model's stays: its servers may share the store. `find` sees what may be wanted later."""
        found: list[Found] = []
        torn, wanted = set[str](), set[str]()
        keys = self._store.keys(self._key(""))
        there = set(keys)
        for mark in sorted({key.rpartition("/")[2].partition(".")[0] for key in self._under(keys, "leases")}):
            newest = self._newest(mark)
            if newest is None:
                torn.add(mark)
                continue
            if newest.expires_at <= self._clock():
                self.withdraw(newest, segments_of(newest))
                continue
            wanted.update(segments_of(newest))
            if (unwanted := keep(newest)) is None:
                found.append(Found(newest, self._lacks(newest, there)))
            else:
                log.info("a lease of the store is not listed: %s", unwanted.why)
        self._sweep(keys, wanted)
        return Scanned(found, [], frozenset(torn))

    def find(self, tenant: str, reference: str, keep: Keep) -> Found | None:
        mark = mark_of(tenant, reference)
        newest = self._newest(mark)
        if newest is None and (meant := self._store.get(self._key("names", mark))) is not None:
            newest = self._newest(meant.decode())
        if newest is None or newest.warm or newest.expires_at <= self._clock() or keep(newest) is not None:
            return None
        return Found(newest, lost=False)

    def _sweep(self, keys: list[str], wanted: set[str]) -> None:
        """Removes bytes of leases that are over, or were never there. Younger ones may be on their way."""
        segments = {key.split("/")[-2] for key in (*self._under(keys, "blocks"), *self._under(keys, "refs"))}
        for segment in segments - wanted:
            refs = [self._store.get(key) for key in self._under(keys, f"refs/{segment}")]
            times = [manifests.made_at(segment), *(_STAMP.unpack(ref)[0] for ref in refs if ref is not None)]
            if self._clock() - max(times) > _COMING_SECONDS:
                self._drop(segment)

    def _lacks(self, manifest: Manifest, there: set[str]) -> bool:
        size = _per_object(manifest.deed.identity.cache.num_bytes)
        return any(
            self._key("blocks", block.segment, str(block.index // size)) not in there for block in manifest.blocks
        )

    # --- manifests -----------------------------------------------------------------------------------------------

    def _newest(self, mark: str) -> Manifest | None:
        versions = self._versions(mark)
        return versions[-1].manifest if versions else None

    def _versions(self, mark: str) -> list[_Version]:
        """Oldest first; broken ones before all."""
        found = []
        for key in self._places(mark):
            if (data := self._store.get(key)) is not None:
                try:
                    found.append(_Version(key, _STAMP.unpack_from(data)[0], manifests.from_bytes(data[_STAMP.size :])))
                except (InvalidEstate, struct.error) as error:
                    log.error("the lease in %s is lost: %s", key, error)
                    found.append(_Version(key, 0.0, None))
        return sorted(found, key=lambda version: version.written)

    def _object(self, key: str) -> bytes:
        if (data := self._store.get(key)) is None:
            raise BrokenBlocks("blocks are not in the store any more")
        return data

    def _places(self, mark: str) -> list[str]:
        return [self._key("leases", f"{mark}.{place}") for place in _PLACES]

    def _key(self, *parts: str) -> str:
        return "/".join((self._name, *parts))

    def _under(self, keys: Iterable[str], folder: str) -> list[str]:
        return [key for key in keys if key.startswith(self._key(folder, ""))]


def _mark(manifest: Manifest) -> str:
    return mark_of(manifest.deed.identity.tenant, manifest.deed.id)


def _per_object(block_bytes: int) -> int:
    return max(1, _OBJECT_BYTES // block_bytes)
