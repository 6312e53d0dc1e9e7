"""What the scheduler does for kinds of work."""

from __future__ import annotations

from typing import Protocol

from bequest.engine._C import BlockPool
from bequest.engine.cache.states import States
from bequest.engine.state.guesses import Guesses
from bequest.engine.state.record import KeptBeams
from bequest.engine.state.sequence import Group, Sequence
from bequest.engine.types.catalogue import Catalogue


class Drafter(Protocol):
    """Guesses how sequences go on. A guess that is wrong costs time, and changes nothing."""

    def guesses_of(self, sequence: Sequence) -> Guesses | None:
        """None: nothing is drafted for it."""


class Desk(Protocol):
    @property
    def pool(self) -> BlockPool: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def blocks_beside_leases(self) -> int:
        """Device blocks that a request can count on when it is alone."""

    @property
    def drafter(self) -> Drafter | None: ...

    @property
    def states(self) -> States:
        """Of recurrent layers."""

    @property
    def follows_beams(self) -> bool:
        """Whether the device chooses the beams of a step that is launched before the result of the one before."""

    @property
    def most_drafted(self) -> int:
        """Tokens that are worth drafting for a sequence, by how many run."""

    def handle_of(self, catalogue: Catalogue) -> int:
        """By which the device knows it."""

    def run(self, sequence: Sequence) -> None:
        """A new sequence of a running group runs too."""

    def queue(self, sequence: Sequence) -> None:
        """A new sequence waits for its turn, without blocks."""

    def leave(self, sequence: Sequence) -> None:
        """A running sequence is over; its table is freed, and nothing of it is kept."""

    def is_alone(self, sequence: Sequence) -> bool:
        """Whether no other sequence runs."""

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence goes back to the queue, if it may."""

    def release_row(self, sequence: Sequence) -> None: ...

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence; what it holds goes to its record, or back. Idempotent."""

    def distrust(self, sequence: Sequence) -> None:
        """Its cache may hold NaNs: nobody continues from it."""

    def accept(self, sequence: Sequence, token_id: int) -> None:
        """A sampled token is known: it joins the sequence, and full blocks become findable."""

    def keep_beams(self, group: Group, beams: KeptBeams) -> None: ...

    def release_cross(self, group: Group) -> None: ...
