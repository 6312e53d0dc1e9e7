"""The blocks on the device and in the tier below: where a sequence's KV comes from, and who moves when room is needed.

Owned by the event-loop thread. The memory follows the plans: swaps and copies noted here are carried out by the next
step, swaps out first, so that what they free may be written by the same step. Bytes that the tier has not at hand make
a placement pending (engine/cache/tiers).

Room is made in this order: free blocks (among them those of warm records), leases that move to the host, and only then,
by the scheduler, running sequences, least urgent first, which move to the part of the host that no lease can need, or
are computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import Protocol, get_args

import numpy as np

from bequest.engine._C import BlockPool, BlockTable, swap_out_some, try_swap_in, try_swap_out
from bequest.engine.cache.cross import CrossPlace, CrossTables
from bequest.engine.cache.entries import host_block, is_on_host
from bequest.engine.cache.filed import Filed
from bequest.engine.cache.placement import Placement
from bequest.engine.cache.states import States
from bequest.engine.cache.tiers.ticket import Ticket
from bequest.engine.cache.tiers.tier import Moves, Tier
from bequest.engine.cache.windows import keep_windows, most_inherited
from bequest.engine.state.record import Record
from bequest.engine.state.sequence import Group, Sequence, Status
from bequest.engine.types import Inheritance, Source, StepMoves
from bequest.engine.types.blocks import BlockWrite, BytesWrite
from bequest.engine.types.encoder import Slots


class LeasedBlocks(Protocol):
    """The books of blocks that leases hold and are promised."""

    @property
    def used(self) -> int:
        """Held and promised."""

    @property
    def num_held(self) -> int: ...

    @property
    def num_promised(self) -> int: ...

    @property
    def held_on_host(self) -> int: ...


class Holders(Protocol):
    """Who holds blocks for others, and can move to the host with them (engine/inheritance/leases.py)."""

    @property
    def budget(self) -> LeasedBlocks: ...

    @property
    def num_states(self) -> int:
        """Of recurrent layers, that they hold."""

    def on_device(self) -> list[Record]:
        """Those that hold some on the device, least recently used first."""

    def let_stored_go(self) -> bool:
        """One that is in files too does without memory; False: there is none."""

    def note_move(self, records: Iterable[Record], pairs: Iterable[tuple[int, int]]) -> None:
        """Blocks of these records have new numbers: (old, new) as in BlockTable.blocks."""


class KvCache:
    def __init__(
        self,
        pool: BlockPool,
        tier: Tier,
        leases: Holders,
        cross: CrossTables,
        states: States,
        *,
        device_budget: int,
        prefix_caching: bool,
    ) -> None:
        """`device_budget`: blocks of the device pool that leases may hold when the tier has no room for them."""
        self.pool = pool
        self.tier = tier
        self.host = tier.pool
        self.cross = cross
        self.states = states
        self._leases = leases
        self.device_budget = device_budget
        self.prefix_caching = prefix_caching
        self.filed = Filed(pool, states, cross.nowhere, prefix_caching=prefix_caching)

    def begin_plan(self) -> None:
        # Copies run before the step, side by side: until the plan is made their sources are not handed out again.
        self.pool.begin_plan()
        self.host.begin_plan()

    def end_plan(self) -> None:
        self.pool.end_plan()
        self.host.end_plan()

    def take_swaps(self) -> Moves:
        """What the next step has to carry out."""
        return self.tier.take_moves()

    def take_writes(self) -> list[BytesWrite]:
        """Bytes out of files, which have to be on the device before the step. They take the swaps along, which empty
        the blocks that they are written to."""
        taken: list[BytesWrite] = [*self.filed.take_states()]
        for blocks, content in self.filed.take_blocks():
            moves = [np.asarray(pairs, np.int32).reshape(-1, 2) for pairs in (*self.take_swaps(), [])]
            step = StepMoves(swaps_out=moves[0], swaps_in=moves[1], copies=moves[2])
            taken.append(BlockWrite(moves=step, blocks=np.asarray(blocks, np.int32), content=content))
        return taken

    def check_only_leases(self) -> None:
        """Nothing runs or waits: every block that no lease holds must be free."""
        self.pool.check()
        self.host.check()
        budget = self._leases.budget
        on_host = budget.held_on_host
        assert self.pool.num_used == budget.num_held - on_host, "device blocks lost"
        assert self.host.num_used == on_host, "host blocks lost"
        assert budget.num_promised == 0, "promised blocks lost"
        self.states.check_only(self._leases.num_states)

    def forget_warm(self) -> None:
        """What nobody holds is not there any more. REQUIRES: nothing runs or waits"""
        strips, count = self.pool.num_strips, self.pool.num_free
        rows = -(-count // strips)
        table = BlockTable(self.pool)
        # A block that is handed out has new content from then on.
        assert table.try_append([i < count for i in range(rows * strips)], rows * self.pool.block_size)
        table.free()
        self.states.forget_warm()

    def index(self, record: Record) -> None:
        """Lets others find the full blocks of a record whose bytes came from elsewhere."""
        for kept in record.kept.values() if self.prefix_caching else ():
            if kept.table is not None and kept.table.resident:
                kept.table.commit(kept.tokens, kept.computed)

    # --- where a sequence starts ---------------------------------------------------------------------------------

    def place(self, sequence: Sequence) -> Placement:
        """The cheapest beginning that is there: its own blocks, its parent's, the prefix index's, none."""
        placement = self._place_self(sequence)
        if not placement.table.resident:
            placement = self._reach(placement, sequence)
        group = sequence.group
        cross = placement.cross = self.cross.place(group.salt, group.request.encoder, group.cross)
        if cross.runs_encoder:
            self.filed.place_cross(placement, sequence)
        return placement if cross.table.resident else self._reach_cross(placement, cross, sequence)

    def _reach(self, placement: Placement, sequence: Sequence) -> Placement:
        """The placement with a ticket for its bytes; without them, where they are lost."""
        placement.ticket = self._read(placement.table)
        if not placement.ticket.failed:
            return placement
        if placement.table is not sequence.table:
            placement.drop()
            return self._match(sequence)
        self._lose_blocks([sequence])
        placement = self._place_self(sequence)
        return placement if placement.table.resident else self._reach(placement, sequence)

    def _reach_cross(self, placement: Placement, cross: CrossPlace, sequence: Sequence) -> Placement:
        """The same of the encoder input: where its blocks are lost, the encoder runs again, and nobody of the group
        keeps what was computed with it."""
        ticket = self._read(cross.table)
        if ticket.pending:
            placement.ticket = ticket
        if not ticket.failed:
            return placement
        if cross.own is None:
            cross.drop()
        else:
            resumes = placement.table is sequence.table
            self._lose_blocks([s for s in sequence.group.sequences if s.status is Status.WAITING])
            if resumes:
                return self.place(sequence)
        placement.cross = self.cross.place_anew(cross.encoder)
        return placement

    def _lose_blocks(self, waiting: Several[Sequence]) -> None:
        """Of one group."""
        for sequence in waiting:
            sequence.table.free()
            self.states.let_go(sequence)
            sequence.num_computed = 0
        self.release_cross(waiting[0].group)

    def _read(self, table: BlockTable) -> Ticket:
        return self.tier.read([host_block(entry) for entry in filter(is_on_host, table.blocks)])

    def _place_self(self, sequence: Sequence) -> Placement:
        if len(sequence.table):
            self._step_back(sequence)
        if len(sequence.table):
            return self._resume(sequence)
        placement = self._inherit(sequence)
        if placement is not None and placement.computed >= self._expected(sequence):
            return placement
        if (stored := self.filed.place(sequence, 0 if placement is None else placement.computed)) is not None:
            if placement is not None:
                placement.drop()
            return stored
        found = self._match(sequence)
        if placement is None and (warm := self.filed.place_warm(sequence, found.computed)) is not None:
            found.drop()
            return warm
        if placement is not None and found.computed <= placement.computed:
            found.drop()
            placement.source = "recompute"
            return placement
        if placement is not None:
            placement.drop()
        return found

    def settle(self, placement: Placement, sequence: Sequence) -> Slots | None:
        """Gives the sequence its beginning; what is on the host moves. Returns the slots that its encoder has to fill.

        REQUIRES: `needed` blocks are free.
        """
        if placement.content is not None:
            self.filed.fill(placement, placement.content, sequence)
        sequence.table = placement.table
        sequence.num_computed = placement.computed
        self.states.take(sequence, placement.computed)
        moving = [] if placement.table.resident else [placement.table]
        cross, group = placement.cross, sequence.group
        group.cross = self.cross.settle(cross, group.salt, group)
        if not cross.table.resident:
            moving += [table for table in self.cross.idle(group.cross) if not table.resident]
        lease = placement.lease
        if not placement.table.resident and lease is not None and self._can_come_too(lease, placement):
            # Further children find it here. It then holds the last block too, which its child has to copy.
            before = lease.blocks
            self._swap_in([*moving, lease])
            moved = [(old, new) for old, new in zip(before, lease.blocks, strict=True) if old != new]
            assert group.ties.parent is not None
            self._leases.note_move([group.ties.parent], moved)
        elif moving:
            self._swap_in(moving)
        if cross.content is not None:
            self.filed.fill_cross(cross, cross.content)
        return cross.write(self.pool.block_size)

    def _can_come_too(self, lease: BlockTable, placement: Placement) -> bool:
        """Whether there is room for all of a lease, its bytes are at hand, and no other lease shares its host blocks:
        those would stay there, and what was paid once would be held twice."""
        if self.pool.num_free <= placement.needed + lease.num_on_host:
            return False
        childs = set(filter(is_on_host, placement.table.blocks))
        alone = all(
            self.host.ref_count(host_block(entry)) == 1 + (entry in childs)
            for entry in filter(is_on_host, lease.blocks)
        )
        return alone and self._read(lease).state == "done"

    def release_cross(self, group: Group) -> None:
        """The cross table goes with the last sequence that runs or keeps blocks for when it comes back."""
        if group.cross is None or group.runs:
            return
        if any(s.status is Status.WAITING and len(s.table) for s in group.sequences):
            return
        self.cross.let_go(group.cross)
        group.cross = None

    def _swap_in(self, tables: Several[BlockTable]) -> None:
        pairs = try_swap_in(tables, self.pool)
        assert pairs is not None, "the blocks were counted"
        self.tier.bring(pairs)

    def report(self, placement: Placement, sequence: Sequence) -> Inheritance | None:
        """What a continuation's client is told. Without a token of its parent it is a prompt like any other."""
        lineage = sequence.group.request.terms.lineage
        if lineage is None:
            return None
        return Inheritance(
            parent=lineage.parent,
            at=lineage.at,
            inherited_tokens=placement.computed,
            computed_tokens=sequence.work.num_to_compute(sequence, placement.computed),
            source=_costliest(placement) if lineage.at else "recompute",
        )

    def trim(self, placement: Placement, sequence: Sequence) -> bool:
        """Does without the partly filled last block, whose copy takes one more block. False if there is none."""
        whole = placement.computed // self.pool.block_size * self.pool.block_size
        if whole == placement.computed or placement.table is sequence.table or placement.content is not None:
            return False
        placement.computed = self._startable(sequence, placement.table, whole)
        placement.release_lender()
        placement.missing = self._missing_to(sequence, placement.table, placement.computed)
        if sequence.group.request.terms.lineage is not None:
            placement.source = "recompute"
        return True

    def _resume(self, sequence: Sequence) -> Placement:
        """It was swapped out: its blocks come back."""
        missing = self._missing_to(sequence, sequence.table, sequence.num_computed)
        return Placement(sequence.table, sequence.num_computed, missing, "host", self.cross.nowhere)

    def _inherit(self, sequence: Sequence) -> Placement | None:
        """What its parent still has."""
        parent, lineage = sequence.group.ties.parent, sequence.group.request.terms.lineage
        held = None if parent is None or lineage is None else parent.choice(lineage.choice)
        if lineage is None or held is None:
            return None
        if sequence.group.request.params.prompt_logprobs is not None:
            return None  # every position has to be computed
        if parent is not None and parent.encoder != sequence.group.request.encoder:
            return None  # the tokens are the same, but not what they attend to
        table = held.borrow(self.pool)
        # Tokens decide, as in the prefix index: beams may have changed places since the child was asked for.
        alike = held.tokens.common_prefix(sequence.tokens)
        goal = sequence.work.goal_len(sequence)
        computed = table.servable(min(lineage.at, held.computed, most_inherited(self.pool, sequence), alike))
        table.truncate(computed)
        if self.states.nearest(sequence, computed) < goal:
            computed = self._startable(sequence, table, computed)
        if computed == 0 and goal > 1:
            return None
        lender = None if held.holds_blocks else table.fork()
        keep_windows(self.pool, table, sequence)
        table.slide(computed)
        missing = self._missing_to(sequence, table, computed)
        source: Source = "blocks" if table.resident else "host"
        return Placement(table, computed, missing, source, self.cross.nowhere, lender, held.lease)

    def _step_back(self, sequence: Sequence) -> None:
        """To where it can go on: recurrent layers may have lost their states since it gave way."""
        start = self.states.nearest(sequence, sequence.num_computed)
        if start < sequence.num_computed:
            sequence.table.truncate(start)
            sequence.num_computed = start

    def _startable(self, sequence: Sequence, table: BlockTable, most: int) -> int:
        """Of the first `most` tokens of a table those that the sequence can start behind, and write on; the table has
        no others afterwards. Slots that only this step fills cannot be copied."""
        computed = most
        while (start := table.copyable(table.servable(self.states.nearest(sequence, computed)))) < computed:
            computed = start
        table.truncate(computed)
        return computed

    def _match(self, sequence: Sequence) -> Placement:
        """What the prefix index knows, down to the head of a block."""
        table = BlockTable(self.pool, sequence.group.salt)
        keep_windows(self.pool, table, sequence)
        computed = 0
        if self.prefix_caching and sequence.group.request.params.prompt_logprobs is None:
            most = most_inherited(self.pool, sequence)
            computed = table.match_prefix(sequence.tokens, most)
            computed += table.match_partial(sequence.tokens, most)
            if self.states.nearest(sequence, computed) < computed:
                computed = self._startable(sequence, table, computed)
        missing = self._missing_to(sequence, table, computed)
        whole_blocks = self._expected(sequence) // self.pool.block_size * self.pool.block_size
        found_all = computed > 0 and computed >= whole_blocks
        source: Source = "prefix_cache" if found_all else "recompute"
        return Placement(table, computed, missing, source, self.cross.nowhere)

    def _expected(self, sequence: Sequence) -> int:
        """Tokens that a child inherits when nothing was lost; 0 for anybody else."""
        lineage, parent = sequence.group.request.terms.lineage, sequence.group.ties.parent
        if lineage is None:
            return 0
        most = min(lineage.at, most_inherited(self.pool, sequence))
        held = None if parent is None else parent.choice(lineage.choice)
        return most if held is None else min(most, held.full_len)

    def _missing_to(self, sequence: Sequence, table: BlockTable, computed: int) -> int:
        """Device blocks that must be free before the sequence is let in with `table`."""
        work = sequence.work
        return table.blocks_to_reach(computed, work.goal_len(sequence)) + work.spare_blocks(sequence)

    # --- room ----------------------------------------------------------------------------------------------------

    def make_room(self, num_blocks: int) -> bool:
        """Moves leases to the host until so many device blocks are free; False if that is not enough."""
        if self.pool.num_free >= num_blocks:
            return True
        # Mostly the first lease will do; where many are held by open sequences, each look goes over more of them.
        records, begin, count = self._leases.on_device(), 0, 1
        while begin < len(records) and self.host.num_free > 0:
            self._move_out(records[begin : begin + count], num_blocks)
            if self.pool.num_free >= num_blocks:
                return True
            begin, count = begin + count, 4 * count
        if self.host.num_free > 0:
            self._move_out(records, num_blocks)  # blocks that several leases share move only together
        while self.pool.num_free < num_blocks and self._leases.let_stored_go():
            pass
        return self.pool.num_free >= num_blocks

    def try_swap_out(self, sequence: Sequence) -> bool:
        """Moves a preempted sequence to the host, if leases cannot come to need the place."""
        tables = [sequence.table]
        group = sequence.group
        others_run = any(s.status is Status.RUNNING for s in group.sequences if s is not sequence)
        if not others_run:
            tables += self.cross.idle(group.cross)
        uses = Counter(block for table in tables for block in table.blocks if not is_on_host(block))
        moving = sum(self.pool.ref_count(block) == count for block, count in uses.items())
        if moving == 0 or self.host.num_free - moving < self._reserved_for_leases():
            return False
        pairs = try_swap_out(tables, self.host)
        if pairs is None:
            return False
        self.tier.write(pairs)
        return True

    def _reserved_for_leases(self) -> int:
        """Free host blocks that leases, present and promised, may still need."""
        budget = self._leases.budget
        return max(0, budget.used - self.device_budget - budget.held_on_host)

    def _move_out(self, records: list[Record], num_blocks: int) -> None:
        """Moves blocks that nobody else holds until so many are free, those of the first records first."""
        tables = [table for record in reversed(records) for table in record.tables()]
        pairs = swap_out_some(tables, self.host, num_blocks - self.pool.num_free)
        if pairs:
            self.tier.write(pairs)
            self._leases.note_move(records, [(device, -host) for device, host in pairs])


def _costliest(placement: Placement) -> Source:
    """Of the ways that its blocks come from."""
    return max(placement.source, placement.cross.source, key=get_args(Source).index)
