"""The texts of a tenant's records, as far as somebody learns from them (engine/drafting)."""

from __future__ import annotations

from typing import Protocol

from bequest.engine.state.record import Record


class Corpus(Protocol):
    """Each record is learnt at most once, when it has ended, and forgotten when it is gone."""

    def learn(self, record: Record, begin: int) -> None:
        """`begin`: tokens of its prompt that were found computed, which another record has told."""

    def forget(self, record: Record) -> None:
        """Nobody finds the record any more. One that was never learnt is fine."""
