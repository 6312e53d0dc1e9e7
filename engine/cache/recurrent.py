"""States of recurrent layers: where a sequence can start from, what is kept on the way, and which slots a step uses.

A state stands for all tokens before it, so a sequence can start only where one was kept: at the last whole block of a
prompt, at each multiple of the interval, and at the end. Those that nobody holds any more stay findable, by their
tokens, which are compared; the least recently used one makes room. Leases hold theirs, and what they have beyond their
share of the slots moves to the host, the least recently used first, until somebody goes on from it.

Steps run in order, so a slot may be read by one step and written by the next. Within a step no slot is both: what a
sequence reads it holds, and what it writes was free.

Owned by the event-loop thread.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from bequest.engine._C import TokenList
from bequest.engine.cache.state_counts import most_held, num_each
from bequest.engine.cache.states import StatePlan
from bequest.engine.state import sequence as running
from bequest.engine.state.draft import Chunk, Draft
from bequest.engine.state.leased import is_leased
from bequest.engine.state.recurrent import SequenceStates, State
from bequest.engine.types import NO_STATE, IntArray, Request
from bequest.engine.types.recurrent import StateLoad, StateSizes


class RecurrentStates:
    """States of a model with recurrent layers."""

    passes_in_order = True

    def __init__(self, sizes: StateSizes, block_size: int) -> None:
        self._sizes = sizes
        self._block_size = block_size
        self._free = list(range(sizes.num_slots))
        self._host_free = list(range(sizes.num_slots, sizes.num_slots + sizes.num_host_slots))
        self._parked: OrderedDict[State, None] = OrderedDict()  # least recently used first
        self._moves: list[tuple[int, int]] = []  # (slot, slot), which the next step carries out in order
        self._idle: OrderedDict[State, None] = OrderedDict()  # findable and held by nobody, least recently used first
        self._findable: dict[bytes, dict[State, None]] = {}  # by salt
        self._of: defaultdict[running.Sequence, SequenceStates] = defaultdict(SequenceStates)  # that run
        self._spent: list[State] = []  # by the step that is planned
        self._promised: dict[running.Sequence, int] = {}  # states of drafts of the step that is planned
        self._kept_out = False  # since the last step: somebody had no room beside drafts
        self._makes_room = False  # the step that is planned drafts nothing, for those

    # --- where a sequence starts ---------------------------------------------------------------------------------

    def nearest(self, sequence: running.Sequence, most: int) -> int:
        found = self._nearest(sequence.group.salt, sequence.tokens, self._most(sequence, most))
        return 0 if found is None else found.position

    def has_room(self, sequence: running.Sequence) -> bool:
        num_more = most_held(sequence, SequenceStates())
        fits = self._fits(num_more)
        self._kept_out |= not fits and self._fits(num_more - self._num_drafted)
        return fits

    def _fits(self, num_more: int) -> bool:
        """Whether so many more states can be held beside those of running sequences and of their drafts."""
        return num_more <= self._num_spare

    @property
    def _num_spare(self) -> int:
        """Slots that neither leases nor running sequences count on, and that no draft has."""
        used = sum(most_held(sequence, held) for sequence, held in self._of.items()) + self._num_drafted
        return self._num_beside_leases - used

    @property
    def _num_beside_leases(self) -> int:
        return self._sizes.num_slots - self._sizes.num_lease_slots

    @property
    def _num_drafted(self) -> int:
        return sum(len(held.drafted) for held in self._of.values()) + sum(self._promised.values())

    def take(self, sequence: running.Sequence, position: int) -> None:
        self.let_go(sequence)
        held = self._of[sequence]
        if position == 0:
            return
        found = self._nearest(sequence.group.salt, sequence.tokens, position)
        assert found is not None and found.position == position, "a state was counted on that is gone"
        held.current = self._at_hand(found)

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
        if held.wanted:
            self.drop(filter(None, [held.previous]))  # no step is launched past its end
            held.lends, held.previous = True, None

    def can_fork(self, leader: running.Sequence, position: int) -> bool:
        kept = self._of[leader].kept
        num_more = 2 - 2 * leader.work.num_to_begin(leader)  # the leader was let in with room for those
        return self._fits(num_more) and (position == 0 or (kept is not None and kept.position == position))

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
        held.walk = None if found is None else self._at_hand(found)
        return begin

    def let_go(self, sequence: running.Sequence) -> None:
        held = self._of.pop(sequence, None)
        if held is None:
            return
        if held.current is not None:
            held.current.lasting = True
        self._drop_all(held)

    def _drop_all(self, held: SequenceStates) -> None:
        for state in held.marks:
            self.unpark(state)
        self.drop(held.all())
        self._move_out()

    def distrust(self, sequence: running.Sequence) -> None:
        """Whatever is findable by its tokens came from it, or from somebody who met the same."""
        for state in list(self._findable.get(sequence.group.salt, ())):
            if state.tokens.common_prefix(sequence.tokens) >= min(state.position, len(sequence.tokens)):
                self._hide(state)

    def end(self, sequence: running.Sequence, computed: int) -> list[State]:
        held = self._of.pop(sequence, SequenceStates())
        ways = (held.current, held.previous, *held.drafted)
        last = next((state for state in ways if state is not None and state.position == computed), None)
        kept = [state.hold() for state in held.marks if state.position < computed]
        if last is not None:
            last.lasting = True
            kept.append(last.hold())
        for state in ways:
            if state is not None and state.position > computed:
                state.lasting = False  # of a step past the end, or of drafts behind it
        self._drop_all(held)
        return kept

    # --- who only keeps it ---------------------------------------------------------------------------------------

    def park(self, state: State) -> None:
        state.parked += 1
        self._parked[state] = None

    def unpark(self, state: State) -> None:
        state.parked -= 1
        if not state.parked:
            del self._parked[state]

    def _move_out(self) -> None:
        """What leases have on the device beyond their share goes to the host: running sequences count on the rest."""
        if not self._host_free:
            return
        over = sum(self._is_here(state) for state in self._parked) - self._sizes.num_lease_slots
        alone = [state for state in self._parked if self._is_here(state) and state.holders == state.parked]
        for state in alone[: max(0, min(over, len(self._host_free)))]:
            self._move(state, self._host_free.pop())

    def _at_hand(self, state: State) -> State:
        """Held for the caller, on the device."""
        self._held(state)
        if state in self._parked:
            self._parked.move_to_end(state)
        if not self._is_here(state):
            self._move(state, self._slot())
        return state

    def _move(self, state: State, slot: int) -> None:
        self._moves.append((state.slot, slot))
        self._give_back(state)
        state.slot = slot

    def _give_back(self, state: State) -> None:
        (self._free if self._is_here(state) else self._host_free).append(state.slot)

    def _is_here(self, state: State) -> bool:
        return state.slot < self._sizes.num_slots

    def take_moves(self) -> IntArray:
        moves, self._moves = self._moves, []
        return np.asarray(moves, np.int32).reshape(-1, 2)

    def drop(self, states: Iterable[State]) -> None:
        for state in states:
            state.holders -= 1
            if state.holders:
                continue
            if state.lasting and self._is_here(state) and state in self._findable.get(state.salt, ()):
                self._idle[state] = None
                self._idle.move_to_end(state)
            else:
                self._hide(state)
                self._give_back(state)

    def load(self) -> StateLoad:
        total, warm = self._sizes.num_slots, len(self._idle)
        on_host = self._sizes.num_host_slots - len(self._host_free)
        return StateLoad(total, held=total - len(self._free) - warm + on_host, warm=warm, on_host=on_host)

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

    def plan(self, draft: Draft) -> StatePlan:
        chunks = draft.all_chunks()
        starts: list[int] = []
        slots = np.full(sum(chunk.num_tokens for chunk in chunks), NO_STATE, np.int32)
        begin = 0
        self._promised.clear()
        self._makes_room, self._kept_out = self._kept_out, False
        for chunk in chunks:
            read, written = self._move_on(chunk)
            starts += [NO_STATE if state is None else state.slot for state in read]
            first = begin + _num_known(chunk) - 1
            slots[first : begin + chunk.num_tokens] = [state.slot for state in written]
            begin += chunk.num_tokens
        # What others are going to fork was counted. Marks may take what is left.
        for positions in (self._wanted, self._marked):
            begin = 0
            for chunk in chunks:
                for state in self._left(chunk, positions(chunk)):
                    slots[begin + state.position - chunk.begin - 1] = state.slot
                    self._spent.append(state)
                begin += chunk.num_tokens
        moves = self.take_moves()  # those of what this step writes come with the next one
        # Not before: what this step reads or writes makes no room for what it writes.
        self.drop(self._spent)
        self._spent.clear()
        self._move_out()
        return StatePlan(np.asarray(starts, np.int32), slots, moves)

    def _move_on(self, chunk: Chunk) -> tuple[list[State | None], list[State]]:
        """What each row of a chunk reads and writes."""
        sequence, end = chunk.sequence, chunk.begin + _num_known(chunk)
        held = self._of[sequence]
        if held.beams:
            read: list[State | None] = [*held.beams]
            self.settle_beams(sequence)
            held.left = held.beams
            held.beams = [self._new(sequence, end, listed=False) for _ in held.beams]
            return read, held.beams
        start = held.walk if chunk.read_only else held.current
        assert (0 if start is None else start.position) == chunk.begin, "a state of other tokens"
        if chunk.read_only:
            return [start], [self._walk_on(sequence, end)]
        known = self._advance(sequence, end)
        # Whether a draft is right is known when the step has its result: nobody finds the state behind it before.
        held.drafted = [self._new(sequence, end + i, listed=False) for i in range(1, len(chunk.drafts) + 1)]
        return [start], [known, *held.drafted]

    def _walk_on(self, sequence: running.Sequence, end: int) -> State:
        held = self._of[sequence]
        if held.walk is not None:
            self._spent.append(held.walk)
        held.walk = self._new(sequence, end)
        return held.walk

    def _advance(self, sequence: running.Sequence, end: int) -> State:
        held = self._of[sequence]
        self.drop(held.drafted if held.previous is None else [held.previous, *held.drafted])
        held.drafted, held.previous, held.current = [], held.current, self._new(sequence, end)
        if end == held.wanted:
            held.kept = held.current.hold()
        self._mark(sequence, held.current)
        return held.current

    def _mark(self, sequence: running.Sequence, state: State) -> None:
        """One that the sequence has come to stays findable at some positions, and a lease holds it there."""
        state.lasting = self._stays(sequence, state.position)
        if state.lasting and is_leased(sequence):
            self._promise(sequence, self._parked_at(sequence, state.position) or state)

    def _stays(self, sequence: running.Sequence, position: int) -> bool:
        """Whether others are going to find the state there, and a lease is charged for it."""
        return position % self._sizes.interval == 0 or position == self._last_block(sequence)

    def _promise(self, sequence: running.Sequence, state: State) -> None:
        """The sequence's lease is going to hold it."""
        self._of[sequence].marks.append(self._held(state))
        self.park(state)

    def _parked_at(self, sequence: running.Sequence, position: int) -> State | None:
        """One of the same tokens that a lease holds, or is going to. Choices pass their prompt each where its hidden
        states are wanted, and are charged for its states once."""
        alike = (s for s in self._findable.get(sequence.group.salt, ()) if s.parked and s.position == position)
        return next((state for state in alike if state.tokens.common_prefix(sequence.tokens) >= position), None)

    def _wanted(self, chunk: Chunk) -> Iterable[int]:
        """Where others are going to fork it."""
        return (self._of[chunk.sequence].wanted,)

    def _marked(self, chunk: Chunk) -> Iterable[int]:
        """Positions whose states are kept, as far as there are slots."""
        if chunk.count == 1:
            return ()  # most chunks: nothing is inside
        held, begin, interval = self._of[chunk.sequence], chunk.begin, self._sizes.interval
        positions = {*range((begin // interval + 1) * interval, chunk.begin + _num_known(chunk), interval)}
        return sorted((positions | {self._last_block(chunk.sequence)}) - {held.wanted})

    def _left(self, chunk: Chunk, positions: Iterable[int]) -> Iterator[State]:
        """States behind tokens inside a chunk; the caller drops them."""
        sequence, end = chunk.sequence, chunk.begin + _num_known(chunk)
        held = self._of[sequence]
        if chunk.read_only or held.beams:
            return
        for position in positions:
            if not chunk.begin < position < end:
                continue
            leased = is_leased(sequence) and self._stays(sequence, position)
            there = self._parked_at(sequence, position) if leased else None
            if there is not None and position != held.wanted:
                self._promise(sequence, there)
                continue
            if position != held.wanted and not self._free and not self._idle:
                return
            state = self._new(sequence, position)
            state.lasting = True
            if position == held.wanted:
                held.kept = state.hold()
            if leased:
                self._promise(sequence, there or state)
            yield state

    def _last_block(self, sequence: running.Sequence) -> int:
        """The last whole block of its prompt, but for the last token, which whoever samples has to compute. A prompt
        that differs in its last tokens alone, as the next turn of a chat does, still finds it."""
        return (sequence.num_prompt - 1) // self._block_size * self._block_size

    def _new(self, sequence: running.Sequence, position: int, *, listed: bool = True) -> State:
        """`listed`: it can be found by the sequence's tokens."""
        state = State(self._slot(), position, sequence.tokens, sequence.group.salt)
        if listed:
            self._list(state)
        return state

    def _list(self, state: State) -> None:
        self._findable.setdefault(state.salt, {})[state] = None

    def _slot(self) -> int:
        if not self._free and not self._idle:
            self._move_out()
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

    def forget_warm(self) -> None:
        for state in list(self._idle):
            self._hide(state)

    def bring(self, salt: bytes, tokens: TokenList, position: int) -> State:
        state = State(self._slot(), position, tokens, salt, lasting=True)
        self._list(state)
        return state

    def expect(self, salt: bytes, tokens: TokenList, position: int) -> State:
        slot = self._host_free.pop() if self._host_free else self._slot()
        state = State(slot, position, tokens, salt, lasting=True)
        self.park(state)
        return state

    def show(self, states: Iterable[State]) -> None:
        for state in states:
            self._list(state)

    # --- drafts --------------------------------------------------------------------------------------------------

    def room_for_drafts(self, sequence: running.Sequence) -> int:
        """Each draft has a state of its own, in a slot that is spare. Whoever waits for slots comes first."""
        mine = self._of.get(sequence)
        if mine is None or self._kept_out or self._makes_room:
            return 0
        # Its last drafts make room for the next ones.
        return max(0, self._num_spare + len(mine.drafted) + self._promised.get(sequence, 0))

    def promise_drafts(self, sequence: running.Sequence, count: int) -> None:
        self._promised[sequence] = count

    def settle_drafts(self, sequence: running.Sequence, num_right: int) -> None:
        """The states before the last one stay for a moment: the sequence may have ended on the way."""
        held = self._of.get(sequence)
        if held is None or held.current is None or not held.drafted:
            return  # it has left since
        right, wrong = held.drafted[:num_right], held.drafted[num_right:]
        self.drop(wrong)
        for state in right:
            self._list(state)
            self._mark(sequence, state)
        way = [held.current, *right]
        held.current, held.drafted = way[-1], way[:-1]

    # --- several of a request ------------------------------------------------------------------------------------

    def most_choices(self, request: Request) -> int:
        each, beside = num_each(request)
        return (self._num_beside_leases - beside) // each

    def begin_beams(self, leader: running.Sequence) -> None:
        held = self._of[leader]
        assert held.current is not None, "a search begins behind its prompt"
        self.drop(filter(None, [held.previous]))
        held.beams, held.previous = [held.current.hold()], None

    def settle_beams(self, leader: running.Sequence) -> None:
        held = self._of[leader]
        self.drop(held.left)
        held.left = []

    def reorder_beams(self, leader: running.Sequence, parents: IntArray) -> None:
        held = self._of[leader]
        before, held.beams = held.beams, [held.beams[parent].hold() for parent in parents.tolist()]
        self.drop(before)

    def end_beams(self, leader: running.Sequence, rows: IntArray, first_place: int) -> None:
        held = self._of[leader]
        standing = [*held.left, *held.beams]  # of a search that is cut, where it stood before the step under way
        for place, row in enumerate(rows.tolist(), first_place):
            held.ended[place] = standing[row].hold()

    def take_ended(self, leader: running.Sequence, place: int, choice: running.Sequence | None) -> None:
        state = self._of[leader].ended.pop(place)
        if choice is None:
            self.drop([state])
            return
        assert state.position == choice.num_computed, "a beam ends before its last token is computed"
        if state not in self._findable.get(state.salt, {}):
            state.tokens = choice.tokens  # alike up to its position, for all who share it
            self._list(state)
        self._of[choice].current = state


def _num_known(chunk: Chunk) -> int:
    """Its positions before those of drafts."""
    return chunk.count - len(chunk.drafts)
