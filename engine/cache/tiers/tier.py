"""The seam between the cache and wherever else blocks lie.

A block table names blocks of the device pool and of one tier's pool (engine/cache/entries.py). Bytes move between the
two with the plans: whatever is noted here is carried out by the next step, before it computes anything, those that go
out first. How long a tier takes to have bytes at hand is its own matter, and its tickets say it. Whoever needs bytes
that are pending waits in the queue: it holds no slot and no block of the device meanwhile.

Owned by the event-loop thread; a ticket is settled there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bequest.engine._C import BlockPool
from bequest.engine.cache.tiers.ticket import Ticket

BlockPairs = list[tuple[int, int]]


class Moves(NamedTuple):
    """What a step has to carry out."""

    out: BlockPairs  # (device block, block of the tier)
    into: BlockPairs  # (block of the tier, device block)


class Tier(Protocol):
    @property
    def pool(self) -> BlockPool:
        """Numbers its blocks."""

    def read(self, blocks: Sequence[int]) -> Ticket:
        """Has the bytes of blocks brought to where a step can take them from. Done: `bring` them. Failed: they are
        lost. May be asked again at any time. Blocks may be given back or written anew meanwhile: what was written
        last counts."""

    def bring(self, pairs: BlockPairs) -> None:
        """(block of the tier, device block): the next step brings them. REQUIRES: `read` was done for them"""

    def write(self, pairs: BlockPairs) -> Ticket:
        """(device block, block of the tier): the next step takes the bytes, and the device's blocks are free for it.
        Done: they are where the tier keeps them."""

    def take_moves(self) -> Moves:
        """What was noted since, for the step that is sealed now."""
