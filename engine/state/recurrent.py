"""What recurrent layers keep of a sequence: states of fixed size, in slots of the device. Event-loop thread.

A running sequence goes on from one state and leaves another, so that a step that was launched past its end takes
nothing away:

    tokens      [ ................................... )
    state                                    ^ previous ^ current          a step reads current, and writes a third

Where tokens were drafted, the step leaves a state behind each of them. It goes on from the last one that was right.

A model without recurrent layers has none of this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bequest.engine._C import TokenList


@dataclass(slots=True, eq=False)
class State:
    """Of the first `position` of some tokens. Nobody writes to its slot while it is there."""

    slot: int
    position: int
    tokens: TokenList  # may be shorter for a moment: the last one is still on the device
    salt: bytes  # divides those who may go on from it
    lasting: bool = False  # stays findable when nobody holds it
    holders: int = 1
    parked: int = 0  # of the holders, those that only keep it: leases, and sequences that are going to have one

    def hold(self) -> State:
        self.holders += 1
        return self


@dataclass(slots=True, eq=False)
class SequenceStates:
    """Those that a running sequence holds."""

    current: State | None = None  # of its computed tokens; None: it has none
    previous: State | None = None
    drafted: list[State] = field(default_factory=list)  # of its last step: behind drafts; once known, those it passed
    marks: list[State] = field(default_factory=list)  # that its lease is going to keep
    wanted: int = 0  # a position whose state it keeps as it passes; 0: none
    kept: State | None = None
    lends: bool = False  # somebody has forked what it keeps: a token of its own is left at most
    walk: State | None = None  # where it has come to while it passes tokens again
    beams: list[State] = field(default_factory=list)  # of a search, from its first result on: one for each beam
    left: list[State] = field(default_factory=list)  # by beams, with a step whose result has not come
    ended: dict[int, State] = field(default_factory=dict)  # by the place of a beam that has ended

    def all(self) -> list[State]:
        alone = (self.previous, self.current, self.kept, self.walk)
        several = (*self.drafted, *self.marks, *self.beams, *self.left, *self.ended.values())
        return [state for state in (*alone, *several) if state is not None]
