"""What the cache asks of leases in files: their bytes, which somebody else reads. Owned by the event-loop thread."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from bequest.engine._C import TokenList
from bequest.engine.cache.tiers.ticket import Ticket
from bequest.engine.types.estate import ChoiceBytes, EstateChoice, Manifest


class Stored(Protocol):
    """Whose bytes are in files: a lease, or what a request without one left there."""

    @property
    def stored(self) -> Manifest | None: ...


class Warm(NamedTuple):
    """What somebody left in files whose tokens begin alike."""

    holder: Stored
    choice: EstateChoice
    alike: int  # tokens


class Files(Protocol):
    def content(self, holder: Stored, choice: int) -> ChoiceBytes | Ticket:
        """All bytes of a choice; or a ticket, until they are at hand. A child of one whose bytes are lost is ended by
        whoever finds that out. REQUIRES: holder.stored"""

    def find(self, salt: bytes, tokens: TokenList) -> Warm | None:
        """What was left without a lease and has the most tokens in common with these."""


class NoFiles:
    def content(self, holder: Stored, choice: int) -> ChoiceBytes | Ticket:
        raise AssertionError("nothing is stored")

    def find(self, salt: bytes, tokens: TokenList) -> Warm | None:
        return None
