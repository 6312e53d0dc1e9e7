"""What leases take in files, in blocks: promised to requests that run, and on disk.

A lease that is to last is charged before its request runs, for the most it can become. On disk a segment counts as long
as one lease has a block of it. The pixels of images are in each manifest, and count as the blocks that they would fill.
Owned by the event-loop thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from bequest.engine.errors import InsufficientRetention, InvalidRequest, RetentionTooLarge
from bequest.engine.state.record import Record
from bequest.engine.types.estate import Manifest

_Key = tuple[str, str, bool]  # of a manifest


class FileBooks:
    def __init__(self, capacity: int, block_bytes: int = 0) -> None:
        """0: there are no files."""
        self.capacity = capacity
        self.block_bytes = block_bytes
        self.give_way: Callable[[], bool] = lambda: False  # something that is no lease goes
        self._promised: dict[Record, int] = {}
        self._coming: dict[Record, int] = {}  # blocks on their way that nobody was promised
        self._holders: Counter[str] = Counter()  # segment → leases that have blocks of it
        self._sizes: dict[str, int] = {}  # of segments that leases have
        self._entered: Counter[_Key] = Counter()  # manifests on disk, some of them twice for a moment
        self._pixels: dict[_Key, int] = {}  # what their images take

    @property
    def used(self) -> int:
        return sum(self._promised.values()) + sum(self._sizes.values()) + sum(self._pixels.values())

    def size_of_images(self, num_bytes: Iterable[int]) -> int:
        """Of images of so many bytes in one manifest."""
        return -(-sum(num_bytes) // self.block_bytes) if self.block_bytes else 0

    def promise(self, record: Record, num_blocks: int) -> None:
        """Raises InvalidRequest, RetentionTooLarge or InsufficientRetention, with nothing changed."""
        if self.capacity == 0:
            message = "This engine keeps no leases in files."
            raise InvalidRequest(message, reason="no_files", field="retain.durable")
        if num_blocks > self.capacity:
            raise RetentionTooLarge(
                f"A lease of up to {num_blocks} blocks is more than files may hold: {self.capacity}.",
                reason="lease_too_large_for_files",
                field="retain.durable",
                details={"budget": self.capacity, "needed": num_blocks},
            )
        if not self.fits(record, num_blocks):
            raise InsufficientRetention(
                f"A lease needs up to {num_blocks} blocks in files, but {self.used} of {self.capacity} are taken.",
                reason="files_full",
                field="retain.durable",
                details={"budget_blocks": self.capacity, "needed_blocks": num_blocks, "earliest_expiry": None},
            )
        self._promised[record] = num_blocks

    def fits(self, record: Record, num_blocks: int) -> bool:
        """Beside all others, with what was promised to it. What nobody was promised gives way."""
        while self.used - self._promised.get(record, 0) + num_blocks > self.capacity:
            if num_blocks > self.capacity or not self.give_way():
                return False
        return True

    def reserve(self, record: Record, num_blocks: int) -> bool:
        """For bytes on their way that nobody was promised; False: there is no room. Promises do not count them: who is
        promised something has the room, and `trim` sees to it."""
        if not self.fits(record, num_blocks + sum(self._coming.values())):
            return False
        self._coming[record] = num_blocks
        return True

    def trim(self) -> None:
        """What nobody was promised gives way until the rest fits."""
        while self.used > self.capacity and self.give_way():
            pass

    def settle(self, record: Record) -> None:
        """What it was promised is on disk, or is not needed. Idempotent."""
        self._promised.pop(record, None)
        self._coming.pop(record, None)

    def enter(self, manifest: Manifest, sizes: Mapping[str, int] | None = None) -> None:
        """It is on disk, or about to be, and needs its segments. `sizes`: of new ones; None: of all, as it knows."""
        self.hold(segments_of(manifest), sizes_of(manifest) if sizes is None else sizes)
        key = _key_of(manifest)
        self._entered[key] += 1
        if size := self.size_of_images(len(image.content) for image in manifest.deed.images):
            self._pixels[key] = size

    def strike(self, manifest: Manifest) -> list[str]:
        """Segments that nobody needs any more."""
        key = _key_of(manifest)
        self._entered[key] -= 1
        if self._entered[key] == 0:
            del self._entered[key]
            self._pixels.pop(key, None)
        return self.let_go(segments_of(manifest))

    def hold(self, segments: Iterable[str], sizes: Mapping[str, int] | None = None) -> None:
        """Somebody needs them. `sizes`: of new ones, in blocks, at least."""
        for segment, size in (sizes or {}).items():
            self._sizes[segment] = max(size, self._sizes.get(segment, 0))
        self._holders.update(segments)

    def let_go(self, segments: Iterable[str]) -> list[str]:
        """Those of them that nobody needs any more."""
        free = []
        for segment in segments:
            self._holders[segment] -= 1
            if self._holders[segment] == 0:
                del self._holders[segment]
                self._sizes.pop(segment, None)
                free.append(segment)
        return free


def _key_of(manifest: Manifest) -> _Key:
    return manifest.deed.identity.tenant, manifest.deed.id, manifest.warm


def segments_of(manifest: Manifest) -> list[str]:
    return list(dict.fromkeys(block.segment for block in manifest.blocks))


def sizes_of(manifest: Manifest) -> dict[str, int]:
    """Of its segments, in blocks, as far as the lease has them."""
    sizes: dict[str, int] = {}
    for block in manifest.blocks:
        sizes[block.segment] = max(sizes.get(block.segment, 0), block.index + 1)
    return sizes
