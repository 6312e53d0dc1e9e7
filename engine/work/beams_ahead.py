"""The step of a search that is launched before the result of the one before: the device chooses its beams.

The plan names the candidates of the step before instead of tokens and scores, and has the tables of all beams that may
go on. They differ in one block, which is copied anyway, and the device chooses the sources. When the result is here it
is applied as always, and the tables take the place of those before. Where beams differ in more than one block, or too
few blocks are free, the group waits for the result.
"""

from __future__ import annotations

import msgspec

from bequest.engine._C import BeamTables
from bequest.engine.beams.search import BeamSearch
from bequest.engine.state.sequence import Room, Sequence
from bequest.engine.types import IntArray
from bequest.engine.types.plan import MOST_ENDS_FOLLOWED, Following
from bequest.engine.work.desk import Desk


class AheadStep(msgspec.Struct, frozen=True):
    tables: BeamTables  # of as many beams as the group may have
    copies: IntArray  # [C, 2] before the step
    following: Following


class BeamsAhead:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._launched: int | None = None  # the group's number in the last step, until its result is here
        self.step: AheadStep | None = None  # that is launched behind one whose result is not here

    def note_launched(self, number: int) -> None:
        """A step ranks the group's beams, as its group of this number."""
        self._launched = number

    def note_result(self) -> None:
        """Of the step before `step`, or of the last one."""
        if self.step is None:
            self._launched = None

    def can_follow(self, search: BeamSearch | None, leader: Sequence) -> bool:
        """Whether the beams may go on before the result of the launched step is here: it is not the last one, and they
        differ in no other block than the one that the prompt ended in."""
        if self._launched is None or self.step is not None or search is None or not self._desk.follows_beams:
            return False
        size = self._desk.pool.block_size
        return (
            search.length + 1 < search.params.max_tokens
            and len(search.stop_token_ids) <= MOST_ENDS_FOLLOWED
            and leader.num_computed // size == leader.num_prompt // size
        )

    def try_follow(self, search: BeamSearch, beams: BeamTables | None, leader: Sequence, room: Room) -> bool:
        """Takes blocks for the next step of the beams. False: there are too few, and nobody gives way for that.

        REQUIRES: can_follow
        """
        assert self._launched is not None
        found = (beams or BeamTables(leader.table.fork())).try_ahead(search.width, leader.num_computed)
        if found is None:
            return False
        tables, copies = found
        following = Following(
            group=self._launched,
            ends=tuple(sorted(search.stop_token_ids)),
            first_copy=room.num_copies_of_beams,
            num_copies=len(copies),
        )
        self.step = AheadStep(tables, copies, following)
        leader.note_sampling()
        return True

    def take(self) -> AheadStep | None:
        """The result of the step before is here. None: nothing is launched behind it."""
        step, self.step = self.step, None
        return step

    def drop(self) -> None:
        """Whatever is launched concerns the group no more."""
        self._launched = None
        if (step := self.take()) is not None:
            step.tables.free()
