"""Where a waiting sequence would start from. Event-loop thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from bequest.engine._C import BlockTable
from bequest.engine.cache.cross import CrossPlace
from bequest.engine.cache.tiers.ticket import Ticket, done
from bequest.engine.state.sequence import Sequence
from bequest.engine.types import Source
from bequest.engine.types.estate import ChoiceBytes


@dataclass(slots=True)
class Placement:
    """Where a waiting sequence would start from. Nothing has moved yet."""

    table: BlockTable  # may be in part on the host
    computed: int  # tokens whose KV it holds
    missing: int  # device blocks that it lacks for all tokens of the sequence
    source: Source
    cross: CrossPlace
    lender: BlockTable | None = None  # shares the blocks of a warm record, so that the child copies the last one
    lease: BlockTable | None = None  # of the parent: comes to the device together with its child, if there is room
    content: ChoiceBytes | None = None  # of its parent, out of files: the table is empty until it is settled
    ticket: Ticket = field(default_factory=done)  # for its bytes; pending: whoever waits for them waits in the queue

    @property
    def needed(self) -> int:
        """Device blocks that are missing."""
        return self.missing + self.cross.needed

    @property
    def runs_encoder(self) -> bool:
        return self.cross.runs_encoder

    def lost_cross(self, sequence: Sequence) -> bool:
        return self.cross.is_lost(sequence.group.cross)

    def drop(self) -> None:
        """Gives the blocks back."""
        self.table.free()
        self.release_lender()
        self.cross.drop()

    def release_lender(self) -> None:
        if self.lender is not None:
            self.lender.free()
