"""What the engine asks of the states of recurrent layers, and the answers of a model that has none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from bequest.engine._C import TokenList
from bequest.engine.state import sequence as running
from bequest.engine.state.draft import Draft
from bequest.engine.state.recurrent import State
from bequest.engine.types import IntArray, Request
from bequest.engine.types.plan import no_pairs
from bequest.engine.types.recurrent import StateLoad


@dataclass(frozen=True, slots=True)
class StatePlan:
    """What a step reads and writes."""

    starts: IntArray  # [S]
    slots: IntArray  # [T]
    moves: IntArray  # [C, 2] (slot, slot), before it reads and writes any


class States(Protocol):
    """What the engine asks of them, whether the model has any or not."""

    @property
    def passes_in_order(self) -> bool:
        """Whether a sequence passes tokens again one stretch after another, each in a step of its own."""

    def nearest(self, sequence: running.Sequence, most: int) -> int:
        """Of its first `most` tokens, how many it can start behind."""

    def has_room(self, sequence: running.Sequence) -> bool:
        """Whether another sequence can run."""

    def take(self, sequence: running.Sequence, position: int) -> None:
        """It starts behind so many tokens. REQUIRES: `nearest` said so, and nothing was planned since"""

    def fork(self, leader: running.Sequence, child: running.Sequence) -> None:
        """The child goes on from where the leader stands, or from the state that the leader wanted."""

    def can_fork(self, leader: running.Sequence, position: int) -> bool:
        """Whether there is what a child would go on from at `position`."""

    def want(self, sequence: running.Sequence, position: int) -> None:
        """It keeps the state behind so many tokens, for those who fork it."""

    def walk(self, sequence: running.Sequence, position: int) -> int:
        """Where a sequence begins that wants to pass the token at `position` again, without writing keys and values."""

    def let_go(self, sequence: running.Sequence) -> None:
        """It gives way, or is over: what it has stays findable."""

    def distrust(self, sequence: running.Sequence) -> None:
        """Nobody goes on from what it has: there may be NaN in it."""

    def end(self, sequence: running.Sequence, computed: int) -> list[State]:
        """It is over, and so many of its tokens count. What a lease holds of it; whoever takes these drops them."""

    def drop(self, states: Iterable[State]) -> None: ...

    def most_choices(self, request: Request) -> int:
        """Of its choices or beams, how many can run at once when it is alone."""

    def begin_beams(self, leader: running.Sequence) -> None:
        """The leader stands for one beam from now on."""

    def settle_beams(self, leader: running.Sequence) -> None:
        """The last step of its beams has its result."""

    def reorder_beams(self, leader: running.Sequence, parents: IntArray) -> None:
        """Beam i goes on from where beam parents[i] stands."""

    def end_beams(self, leader: running.Sequence, rows: IntArray, first_place: int) -> None:
        """Beams that end keep the states of the running ones rows[i], at places from `first_place` on."""

    def take_ended(self, leader: running.Sequence, place: int, choice: running.Sequence | None) -> None:
        """A choice goes on from where an ended beam stands; None: nobody does."""

    def find(self, salt: bytes, tokens: TokenList, position: int) -> State | None:
        """One exactly there, held for the caller."""

    def before(self, salt: bytes, tokens: TokenList, position: int) -> list[State]:
        """Those of fewer tokens, held for the caller."""

    def bring(self, salt: bytes, tokens: TokenList, position: int) -> State:
        """One that comes from elsewhere, held for the caller, who has its bytes written to its slot before any step."""

    def expect(self, salt: bytes, tokens: TokenList, position: int) -> State:
        """One whose bytes come later, held and parked for the caller, who has them written to the slot that it has by
        then. Nobody finds it before `show`."""

    def show(self, states: Iterable[State]) -> None:
        """Whose bytes are there: who has their tokens finds them."""

    def park(self, state: State) -> None:
        """One of its holders is a lease, or will be: it only keeps it."""

    def unpark(self, state: State) -> None:
        """The same is no more. The caller drops it next."""

    def take_moves(self) -> IntArray:
        """[C, 2] moves between slots that whoever reaches for states next carries out first."""

    def forget_warm(self) -> None:
        """Nobody finds those that nobody holds."""

    def plan(self, draft: Draft) -> StatePlan | None:
        """The slots of a step; its sequences move on."""

    def room_for_drafts(self, sequence: running.Sequence) -> int:
        """Tokens of it whose states have room in the next step."""

    def promise_drafts(self, sequence: running.Sequence, count: int) -> None:
        """The step that is planned checks so many of it. REQUIRES: there is room"""

    def settle_drafts(self, sequence: running.Sequence, num_right: int) -> None:
        """Of the tokens that a step has checked, so many were right: it goes on behind the last of these."""

    def load(self) -> StateLoad | None:
        """How the slots are used; None: there are none."""

    def check_only(self, num_held: int) -> None:
        """Nothing runs or waits: leases hold so many, and nobody else any."""


class Stateless:
    """States of a model that has none: it can start wherever its keys and values are."""

    passes_in_order = False

    def nearest(self, sequence: running.Sequence, most: int) -> int:
        return most

    def has_room(self, sequence: running.Sequence) -> bool:
        return True

    def take(self, sequence: running.Sequence, position: int) -> None:
        return

    def fork(self, leader: running.Sequence, child: running.Sequence) -> None:
        return

    def can_fork(self, leader: running.Sequence, position: int) -> bool:
        return leader.num_computed >= position

    def want(self, sequence: running.Sequence, position: int) -> None:
        return

    def walk(self, sequence: running.Sequence, position: int) -> int:
        return position

    def let_go(self, sequence: running.Sequence) -> None:
        return

    def distrust(self, sequence: running.Sequence) -> None:
        return

    def end(self, sequence: running.Sequence, computed: int) -> list[State]:
        return []

    def drop(self, states: Iterable[State]) -> None:
        return

    def most_choices(self, request: Request) -> int:
        return 1 << 30

    def begin_beams(self, leader: running.Sequence) -> None:
        return

    def settle_beams(self, leader: running.Sequence) -> None:
        return

    def reorder_beams(self, leader: running.Sequence, parents: IntArray) -> None:
        return

    def end_beams(self, leader: running.Sequence, rows: IntArray, first_place: int) -> None:
        return

    def take_ended(self, leader: running.Sequence, place: int, choice: running.Sequence | None) -> None:
        return

    def find(self, salt: bytes, tokens: TokenList, position: int) -> State | None:
        return None

    def before(self, salt: bytes, tokens: TokenList, position: int) -> list[State]:
        return []

    def park(self, state: State) -> None:
        return

    def unpark(self, state: State) -> None:
        return

    def take_moves(self) -> IntArray:
        return no_pairs()

    def bring(self, salt: bytes, tokens: TokenList, position: int) -> State:
        raise AssertionError("a model without recurrent layers has no states")

    def expect(self, salt: bytes, tokens: TokenList, position: int) -> State:
        raise AssertionError("a model without recurrent layers has no states")

    def show(self, states: Iterable[State]) -> None:
        return

    def forget_warm(self) -> None:
        return

    def plan(self, draft: Draft) -> StatePlan | None:
        return None

    def room_for_drafts(self, sequence: running.Sequence) -> int:
        return 1 << 30

    def promise_drafts(self, sequence: running.Sequence, count: int) -> None:
        return

    def settle_drafts(self, sequence: running.Sequence, num_right: int) -> None:
        return

    def load(self) -> StateLoad | None:
        return None

    def check_only(self, num_held: int) -> None:
        return
