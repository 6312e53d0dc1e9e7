"""Where leases that outlive the process are kept, as the vault sees it: files of a directory, or a store for many.

Every call waits for a disk or a network: never on the event loop, never on the device thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bequest.engine.types.blocks import BlockBytes
from bequest.engine.types.estate import Manifest, StoredBlock


@dataclass(frozen=True, slots=True)
class Unwanted:
    """A lease that cannot be continued here."""

    why: str
    yet: bool = False  # it may be later


Keep = Callable[[Manifest], Unwanted | None]  # None: it is wanted


class BrokenBlocks(Exception):
    """Bytes of a lease are gone, or not those that were written."""


@dataclass(frozen=True, slots=True)
class Found:
    """A lease of another process, an earlier one or one beside this."""

    manifest: Manifest
    lost: bool  # its manifest is whole, but blocks are missing


@dataclass(frozen=True, slots=True)
class Scanned:
    found: list[Found]
    waiting: list[Manifest]  # of those that may be wanted later
    torn: frozenset[str]  # marks of leases whose manifests are broken: they were promised, and are lost


class Shelving(Protocol):
    @property
    def name(self) -> str:
        """In sentences: "the disk"."""

    @property
    def is_shared(self) -> bool:
        """Whether other servers use it at the same time."""

    def put(self, segment: str, pieces: Iterable[BlockBytes]) -> list[int]:
        """Writes blocks; their checksums. All or nothing. Raises OSError."""

    def share(self, segments: Sequence[str], parent: Manifest, child: str) -> bool:
        """Keeps segments of a parent for a child, by its mark; False: the parent is not there any more. Raises
        OSError."""

    def publish(self, manifest: Manifest) -> None:
        """The lease is there from now on, or it is as it was before. Raises OSError. REQUIRES: its blocks were put"""

    def withdraw(self, manifest: Manifest, segments: Sequence[str]) -> None:
        """The lease is over, and nobody else here has blocks of these segments. Nobody hears of failures: what is left
        is removed at a later start."""

    def remove(self, segments: Iterable[str]) -> None:
        """Nobody here has blocks of them. Failures: as above."""

    def read(self, blocks: Sequence[StoredBlock], into: BlockBytes) -> None:
        """`into`: a row for each. Several threads may read. Raises OSError or BrokenBlocks."""

    def scan(self, keep: Keep) -> Scanned:
        """The leases that are there. What has expired goes, and bytes that no lease has."""

    def find(self, tenant: str, reference: str, keep: Keep) -> Found | None:
        """A lease by its id or its name. Raises OSError."""

    def close(self) -> None: ...
