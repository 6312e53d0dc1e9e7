"""States of recurrent layers: where a sequence can start from, what is kept on the way, and which slots a step uses.

A state stands for all tokens before it, so a sequence can start only where one was kept: at the last whole block of a
prompt, at each multiple of the interval, and at the end. Those that nobody holds any more stay findable, by their
tokens, which are compared; the least recently used one makes room. Leases hold theirs.

Steps run in order, so a slot may be read by one step and written by the next. Within a step no slot is both: what a
sequence reads it holds, and what it writes was free.

Owned by the event-loop thread.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bequest.engine._C import TokenList
from bequest.engine.state import sequence as running
from bequest.engine.state.draft import Chunk
from bequest.engine.state.recurrent import SequenceStates, State
from bequest.engine.types import NO_STATE, IntArray
from bequest.engine.types.recurrent import StateLoad, StateSizes

_PER_BEAM = 3  # states: what it goes on from, what it writes, and one of a beam that has ended


@dataclass(frozen=True, slots=True)
class StatePlan:
    """What a step reads and writes."""

    starts: IntArray  # [S]
    slots: IntArray  # [T]


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

    @property
    def most_beams(self) -> int:
        """That a search may have when it is alone."""

    def begin_beams(self, leader: running.Sequence) -> None:
        """The leader stands for one beam from now on."""

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
        """One that comes from elsewhere, held for the caller, who has its bytes written to its slot."""

    def forget(self, states: Iterable[State]) -> None:
        """Nobody finds them any more. Whoever holds them still does."""

    def forget_warm(self) -> None:
        """Nobody finds those that nobody holds."""

    def plan(self, chunks: Sequence[Chunk]) -> StatePlan | None:
        """The slots of a step; its sequences move on."""

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

    most_beams = 1 << 30

    def begin_beams(self, leader: running.Sequence) -> None:
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

    def bring(self, salt: bytes, tokens: TokenList, position: int) -> State:
        raise AssertionError("a model without recurrent layers has no states")

    def forget(self, states: Iterable[State]) -> None:
        return

    def forget_warm(self) -> None:
        return

    def plan(self, chunks: Sequence[Chunk]) -> StatePlan | None:
        return None

    def load(self) -> StateLoad | None:
        return None

    def check_only(self, num_held: int) -> None:
        return


class RecurrentStates:
    """States of a model with recurrent layers."""

    passes_in_order = True

    def __init__(self, sizes: StateSizes, block_size: int) -> None:
        self._sizes = sizes
        self._block_size = block_size
        self._free = list(range(sizes.num_slots))
        self._idle: OrderedDict[State, None] = OrderedDict()  # findable and held by nobody, least recently used first
        self._findable: dict[bytes, dict[State, None]] = {}  # by salt
        self._of: defaultdict[running.Sequence, SequenceStates] = defaultdict(SequenceStates)  # that run
        self._spent: list[State] = []  # by the step that is planned

    # --- where a sequence starts ---------------------------------------------------------------------------------

    def nearest(self, sequence: running.Sequence, most: int) -> int:
        found = self._nearest(sequence.group.salt, sequence.tokens, self._most(sequence, most))
        return 0 if found is None else found.position

    def has_room(self, sequence: running.Sequence) -> bool:
        return self._fits(_most_held(sequence, SequenceStates()))

    def _fits(self, num_more: int) -> bool:
        """Whether so many more states can be held beside those of running sequences."""
        used = sum(_most_held(sequence, held) for sequence, held in self._of.items())
        return used + num_more <= self._sizes.num_slots - self._sizes.num_lease_slots

    def take(self, sequence: running.Sequence, position: int) -> None:
        self.let_go(sequence)
        held = self._of[sequence]
        if position == 0:
            return
        found = self._nearest(sequence.group.salt, sequence.tokens, position)
        assert found is not None and found.position == position, "a state was counted on that is gone"
        held.current = self._held(found)

    def find(self, salt: bytes, tokens: TokenList, position: int) -> State | None:
        found = self._nearest(salt, tokens, position)
        return self._held(found) if found is not None and found.position == position else None

    def _most(self, sequence: running.Sequence, most: int) -> int:
        """Tokens whose hidden states are owed have to be passed again."""
        capture = sequence.capture
        most = min(most, sequence.work.most_passed(sequence))
        return most if capture is None else min(most, capture.first_owed)

    def _nearest(self, salt: bytes, tokens: TokenList, most: int) -> State | None:
        candidates = (state for state in self._findable.get(salt, ()) if 0 < state.position <= most)
        for state in sorted(candidates, key=lambda state: state.position, reverse=True):
            if state.tokens.common_prefix(tokens) >= state.position:
                return state
        return None

    # --- who holds what ------------------------------------------------------------------------------------------

    def fork(self, leader: running.Sequence, child: running.Sequence) -> None:
        held = self._of[leader]
        if child.num_computed == 0:
            self._of[child] = SequenceStates()
            return
        state = held.current if child.num_computed == leader.num_computed else held.kept
        assert state is not None and state.position == child.num_computed, "forked where there is no state"
        self._of[child].current = state.hold()

    def can_fork(self, leader: running.Sequence, position: int) -> bool:
        kept = self._of[leader].kept
        return self._fits(2) and (position == 0 or (kept is not None and kept.position == position))

    def want(self, sequence: running.Sequence, position: int) -> None:
        held = self._of[sequence]
        held.wanted = position
        if held.kept is None and held.current is not None and held.current.position == position:
            held.kept = held.current.hold()

    def walk(self, sequence: running.Sequence, position: int) -> int:
        held = self._of[sequence]
        found = self._nearest(sequence.group.salt, sequence.tokens, position)
        begin = 0 if found is None else found.position
        if held.walk is not None and begin <= held.walk.position <= position:
            return held.walk.position
        if held.walk is not None:
            self.drop([held.walk])
        held.walk = None if found is None else self._held(found)
        return begin

    def let_go(self, sequence: running.Sequence) -> None:
        held = self._of.pop(sequence, None)
        if held is None:
            return
        if held.current is not None:
            held.current.lasting = True
        self.drop(held.all())

    def distrust(self, sequence: running.Sequence) -> None:
        """Whatever is findable by its tokens came from it, or from somebody who met the same."""
        for state in list(self._findable.get(sequence.group.salt, ())):
            if state.tokens.common_prefix(sequence.tokens) >= min(state.position, len(sequence.tokens)):
                self._hide(state)

    def end(self, sequence: running.Sequence, computed: int) -> list[State]:
        held = self._of.pop(sequence, SequenceStates())
        last = next((s for s in (held.current, held.previous) if s is not None and s.position == computed), None)
        kept = [state.hold() for state in held.marks if state.position < computed]
        if last is not None:
            last.lasting = True
            kept.append(last.hold())
        if held.current is not None and held.current.position > computed:
            held.current.lasting = False  # of a step past the end
        self.drop(held.all())
        return kept

    def drop(self, states: Iterable[State]) -> None:
        for state in states:
            state.holders -= 1
            if state.holders:
                continue
            if state.lasting and state in self._findable.get(state.salt, ()):
                self._idle[state] = None
                self._idle.move_to_end(state)
            else:
                self._hide(state)
                self._free.append(state.slot)

    def load(self) -> StateLoad:
        total, warm = self._sizes.num_slots, len(self._idle)
        return StateLoad(total, held=total - len(self._free) - warm, warm=warm)

    def check_only(self, num_held: int) -> None:
        held = self.load().held
        assert held == num_held, f"slots of states lost: {held} are held, {num_held} by leases"
        assert not self._of, "a sequence that is gone has states"

    def _held(self, state: State) -> State:
        self._idle.pop(state, None)
        return state.hold()

    def _hide(self, state: State) -> None:
        """Nobody finds it any more."""
        alike = self._findable.get(state.salt, {})
        alike.pop(state, None)
        if not alike:
            self._findable.pop(state.salt, None)
        state.lasting = False
        if state in self._idle:
            del self._idle[state]
            self._free.append(state.slot)

    # --- steps ---------------------------------------------------------------------------------------------------

    def plan(self, chunks: Sequence[Chunk]) -> StatePlan:
        starts: list[int] = []
        slots = np.full(sum(chunk.num_tokens for chunk in chunks), NO_STATE, np.int32)
        begin = 0
        for chunk in chunks:
            assert not chunk.drafts, "recurrent layers cannot take a token back"
            read, written = self._move_on(chunk)
            starts += [NO_STATE if state is None else state.slot for state in read]
            slots[begin + chunk.count - 1 : begin + chunk.num_tokens] = [state.slot for state in written]
            begin += chunk.num_tokens
        begin = 0
        for chunk in chunks:
            for state in () if chunk.read_only or self._of[chunk.sequence].beams else self._marks(chunk):
                slots[begin + state.position - chunk.begin - 1] = state.slot
                self._spent.append(state)
            begin += chunk.num_tokens
        # Not before: what this step reads or writes makes no room for what it writes.
        self.drop(self._spent)
        self._spent.clear()
        return StatePlan(np.asarray(starts, np.int32), slots)

    def _move_on(self, chunk: Chunk) -> tuple[list[State | None], list[State]]:
        """What each row of a chunk reads and writes."""
        sequence, end = chunk.sequence, chunk.begin + chunk.count
        held = self._of[sequence]
        if held.beams:
            read: list[State | None] = [*held.beams]
            self._spent += held.beams
            held.beams = [self._new(sequence, end, listed=False) for _ in held.beams]
            return read, held.beams
        start = held.walk if chunk.read_only else held.current
        assert (0 if start is None else start.position) == chunk.begin, "a state of other tokens"
        return [start], [self._walk_on(sequence, end) if chunk.read_only else self._advance(sequence, end)]

    def _walk_on(self, sequence: running.Sequence, end: int) -> State:
        held = self._of[sequence]
        if held.walk is not None:
            self._spent.append(held.walk)
        held.walk = self._new(sequence, end)
        return held.walk

    def _advance(self, sequence: running.Sequence, end: int) -> State:
        held = self._of[sequence]
        if held.previous is not None:
            self.drop([held.previous])
        held.previous, held.current = held.current, self._new(sequence, end)
        held.current.lasting = end % self._sizes.interval == 0 or end == self._last_block(sequence)
        if end == held.wanted:
            held.kept = held.current.hold()
        if held.current.lasting and _leased(sequence):
            held.marks.append(held.current.hold())
        return held.current

    def _marks(self, chunk: Chunk) -> Iterator[State]:
        """States behind tokens inside a chunk that are kept, as far as there are slots; the caller drops them."""
        sequence, begin, end = chunk.sequence, chunk.begin, chunk.begin + chunk.count
        held, interval = self._of[sequence], self._sizes.interval
        positions = {*range((begin // interval + 1) * interval, end, interval), self._last_block(sequence), held.wanted}
        for position in sorted((p for p in positions if begin < p < end), key=lambda p: (p != held.wanted, p)):
            if not self._free and not self._idle:
                return
            state = self._new(sequence, position)
            state.lasting = True
            if position == held.wanted:
                held.kept = state.hold()
            if _leased(sequence):
                held.marks.append(state.hold())
            yield state

    def _last_block(self, sequence: running.Sequence) -> int:
        """The last whole block of its prompt, but for the last token, which whoever samples has to compute. A prompt
        that differs in its last tokens alone, as the next turn of a chat does, still finds it."""
        return (sequence.num_prompt - 1) // self._block_size * self._block_size

    def _new(self, sequence: running.Sequence, position: int, *, listed: bool = True) -> State:
        """`listed`: it can be found by the sequence's tokens."""
        state = State(self._slot(), position, sequence.tokens, sequence.group.salt)
        if listed:
            self._findable.setdefault(state.salt, {})[state] = None
        return state

    def _slot(self) -> int:
        if not self._free:
            assert self._idle, "slots of states were counted"
            self._hide(next(iter(self._idle)))
        return self._free.pop()

    def before(self, salt: bytes, tokens: TokenList, position: int) -> list[State]:
        found = [
            state
            for state in self._findable.get(salt, ())
            if 0 < state.position < position and state.tokens.common_prefix(tokens) >= state.position
        ]
        return [self._held(state) for state in found]

    def forget(self, states: Iterable[State]) -> None:
        for state in states:
            self._hide(state)

    def forget_warm(self) -> None:
        self.forget(list(self._idle))

    def bring(self, salt: bytes, tokens: TokenList, position: int) -> State:
        state = State(self._slot(), position, tokens, salt, lasting=True)
        self._findable.setdefault(salt, {})[state] = None
        return state

    # --- beams ---------------------------------------------------------------------------------------------------

    @property
    def most_beams(self) -> int:
        return (self._sizes.num_slots - self._sizes.num_lease_slots) // _PER_BEAM

    def begin_beams(self, leader: running.Sequence) -> None:
        held = self._of[leader]
        assert held.current is not None, "a search begins behind its prompt"
        held.beams = [held.current.hold()]

    def reorder_beams(self, leader: running.Sequence, parents: IntArray) -> None:
        held = self._of[leader]
        before, held.beams = held.beams, [held.beams[parent].hold() for parent in parents.tolist()]
        self.drop(before)

    def end_beams(self, leader: running.Sequence, rows: IntArray, first_place: int) -> None:
        held = self._of[leader]
        for place, row in enumerate(rows.tolist(), first_place):
            held.ended[place] = held.beams[row].hold()

    def take_ended(self, leader: running.Sequence, place: int, choice: running.Sequence | None) -> None:
        state = self._of[leader].ended.pop(place)
        if choice is None:
            self.drop([state])
            return
        assert state.position == choice.num_computed, "a beam ends before its last token is computed"
        if state not in self._findable.get(state.salt, {}):
            state.tokens = choice.tokens  # alike up to its position, for all who share it
            self._findable.setdefault(state.salt, {})[state] = None
        self._of[choice].current = state


def _most_held(sequence: running.Sequence, held: SequenceStates) -> int:
    """States that a sequence may come to hold, for those of its group that will begin, too."""
    extra = int(held.wanted > 0) + 2 * int(sequence.capture is not None)
    each = _PER_BEAM if sequence.group.kind.takes_beams else 2
    return each * max(1, sequence.work.slots(sequence)) + extra


def _leased(sequence: running.Sequence) -> bool:
    record = sequence.group.ties.record
    return record is not None and record.lease.ttl is not None
