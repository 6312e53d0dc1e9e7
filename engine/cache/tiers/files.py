"""What the cache asks of leases in files: their bytes, which somebody else reads. Owned by the event-loop thread."""

from __future__ import annotations

from typing import Protocol

from bequest.engine.cache.tiers.ticket import Ticket
from bequest.engine.state.record import Record
from bequest.engine.types.estate import ChoiceBytes


class Files(Protocol):
    def content(self, record: Record, choice: int) -> ChoiceBytes | Ticket:
        """All bytes of a choice; or a ticket, until they are at hand. A child of one whose bytes are lost
        is ended by whoever finds that out. REQUIRES: record.stored"""


class NoFiles:
    def content(self, record: Record, choice: int) -> ChoiceBytes | Ticket:
        raise AssertionError("no record is stored")
