"""What the cache asks of leases in files: their bytes, which somebody else reads. Owned by the event-loop thread."""

from __future__ import annotations

from typing import Protocol

from bequest.engine.cache.tiers.ticket import Ticket
from bequest.engine.state.record import Record
from bequest.engine.types.blocks import BlockBytes


class Files(Protocol):
    def content(self, record: Record, choice: int) -> BlockBytes | Ticket:
        """The bytes of all blocks of a choice; or a ticket, until they are at hand. A child of one whose bytes are lost
        is ended by whoever finds that out. REQUIRES: record.stored"""


class NoFiles:
    def content(self, record: Record, choice: int) -> BlockBytes | Ticket:
        raise AssertionError("no record is stored")
