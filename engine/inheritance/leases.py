"""Leases: records that keep their blocks until a time, and the budget they are paid from.

A lease is promised when its request is admitted and granted when it ends. A record may hold its blocks beyond its
lease, for children that were let in while it was good; it pays for them until it lets them go.

Owned by the event-loop thread; the clocks are passed in.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from bequest.engine._C import BlockEpochs, BlockPool, BlockTable, TokenList, count_distinct_blocks
from bequest.engine.cache.cross import CrossTables
from bequest.engine.errors import EngineError, InsufficientRetention
from bequest.engine.inheritance.budget import LeaseBudget
from bequest.engine.inheritance.state_leases import StateLeases
from bequest.engine.state.record import KeptChoice, Living, Record
from bequest.engine.state.recurrent import State
from bequest.engine.state.sequence import Group
from bequest.engine.types import Request, Retained

T = TypeVar("T")

# A lease without max_tokens is charged for this many tokens of completion, and again whenever they are used up.
OPEN_ENDED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Tables of the blocks of a whole record, and its states, with references of their own."""

    tables: dict[int, BlockTable]  # by choice
    inputs: list[BlockTable]  # of its encoder input, if it has one
    states: list[State]  # of recurrent layers

    def all(self) -> list[BlockTable]:
        return [*self.tables.values(), *self.inputs]


class Leases:
    def __init__(
        self,
        budget: LeaseBudget,
        pool: BlockPool,
        cross: CrossTables,
        states: StateLeases,
        wall: Callable[[], float],
    ) -> None:
        self.budget = budget
        self._states = states
        self._pool = pool
        self._cross = cross
        self._wall = wall
        self._holders: set[Record] = set()
        self._on_device: OrderedDict[Record, None] = OrderedDict()  # holders with blocks there, least recent first
        self._expiries: list[tuple[float, str, Record]] = []  # heap; stale entries are skipped

    # --- while the request runs ----------------------------------------------------------------------------------

    def promise(self, record: Record, group: Living, ttl: float, creditor: Record | None) -> None:
        """Charges the most that the request can come to, less what the lease of its parent pays for.

        Raises RetentionTooLarge or InsufficientRetention.
        """
        whole = self.most_blocks(group)
        # That parent may be what gives way to its states: then it is in files alone, and pays for nothing.
        num_states = self._with_room(record.tenant, partial(self._states.check, group))
        discount = self._shared_rows(group.request, creditor)
        cross_discount = self._shared_inputs(record, creditor)
        charge = whole - discount * self._pool.num_whole_strips - cross_discount
        with nullcontext() if creditor is None else creditor.pinned():  # what it pays for must not give way to this
            self._open(record.tenant, charge, whole)
        self._states.promise(record, num_states)
        record.lease.charge, record.lease.ttl, record.lease.lost = charge, ttl, None
        record.lease.discount, record.lease.cross_discount = discount, cross_discount

    def extend(self, group: Group) -> None:
        """The lease of a running group has to cover more than it was charged for, or is given up."""
        record = group.ties.record
        before = self.most_blocks(group)
        group.ties.charged_output += OPEN_ENDED_TOKENS
        if record is None or record.lease.ttl is None:
            return
        whole = self.most_blocks(group)
        more = whole - before
        try:
            num_states = self._with_room(record.tenant, partial(self._states.check, group, record))
            self._with_room(
                record.tenant, partial(self.budget.promise, record.tenant, more, whole, self._earliest_expiry)
            )
        except EngineError as error:
            self.give_up(record, f"the answer outgrew what could be leased: {error.message}")
            return
        record.lease.charge += more
        self._states.promise(record, num_states)

    def give_up(self, record: Record, why: str) -> None:
        """A running request will not be leased after all."""
        if record.lease.ttl is None:
            return
        self._end_promise(record)
        self.budget.close_lease(record.tenant)
        record.lease.ttl, record.lease.lost = None, why
        self.release_if_free(record)

    def hold(self, record: Record, kept: KeptChoice, table: BlockTable, states: list[State]) -> None:
        """A choice of a promised lease has ended and keeps its blocks; they are paid from what was promised. So are its
        states."""
        self._states.hold(record, states)
        if record.encoder is not None and not record.inputs:
            self._hold_input(record)
        self._share_what_is_paid(record, kept, table)
        kept.table, kept.epochs = table, BlockEpochs()
        self._pay(record, table)
        self._add_holder(record)

    def _states_of(self, record: Record, choices: list[KeptChoice]) -> list[list[State]]:
        """What recurrent layers have of ended choices. Raises InsufficientRetention if some of it is gone."""
        found = [self._states.find(record.salt, kept.tokens, kept.computed) for kept in choices]
        if any(states is None for states in found):
            self._states.drop([state for states in found if states is not None for state in states])
            raise self._blocks_are_gone(record)
        return [states for states in found if states is not None]

    def hold_ended(self, record: Record) -> None:
        """A lease was promised to a request some of whose choices had ended. Raises InsufficientRetention."""
        adopted, inputs = self._adopt(record)
        _free(inputs)  # the first choice that is held takes it
        for (kept, table), states in zip(adopted, self._states_of(record, [kept for kept, _ in adopted]), strict=True):
            self.hold(record, kept, table, states)

    # --- after its end -------------------------------------------------------------------------------------------

    def grant(self, record: Record, now: float) -> Retained:
        """The request has ended: the lease counts from now."""
        assert record.lease.ttl is not None
        self._end_promise(record)
        self.set_expiry(record, record.lease.ttl, now)
        assert record.lease.expires_at_wall is not None
        return Retained(record.id, record.lease.expires_at_wall, record.num_tokens, record.num_held_blocks())

    def set_expiry(self, record: Record, ttl: float, now: float) -> None:
        record.lease.ttl = ttl
        record.lease.expires_at = now + ttl
        record.lease.expires_at_wall = self._wall() + ttl
        self._add_holder(record)
        heapq.heappush(self._expiries, (record.lease.expires_at, record.id, record))
        if len(self._expiries) > 2 * len(self._holders) + 64:
            # Leases that were prolonged or ended early must not pile up until the time they once had.
            self._expiries = [entry for entry in self._expiries if entry[2].lease.expires_at == entry[0]]
            heapq.heapify(self._expiries)

    def replace(self, record: Record, kept: KeptChoice, table: BlockTable, computed: int) -> None:
        """Somebody has computed more of an ended choice: his blocks replace its own, if the budget allows for it."""
        if kept.table is None:
            kept.epochs, kept.computed = table.epochs(), computed
            table.free()
            return
        table.keep_for_lease(kept.num_prompt)
        table.slide(computed)
        fresh = self.budget.num_unpaid(record.tenant, [table])
        try:
            self.budget.promise(record.tenant, fresh, len(table), self._earliest_expiry)
        except EngineError:
            table.free()
            return
        self.budget.settle(record.tenant, fresh)
        self.budget.hold(record.tenant, table)
        self.budget.let_go(record.tenant, [kept.table])
        kept.table.free()
        kept.table, kept.computed = table, computed
        self._note_place(record)

    def revive(self, record: Record) -> None:
        """Makes a holder of a record whose blocks are all still there. Raises InsufficientRetention and the like."""
        if record.lease.ttl is not None:
            return
        adopted, inputs = self._adopt(record)
        found = [*(table for _, table in adopted), *inputs]
        tables = record.tables() + found
        fresh = self.budget.num_unpaid(record.tenant, tables)
        states: list[list[State]] = []
        try:
            states = self._states_of(record, [kept for kept, _ in adopted])
            self._states.check_more(sum(map(len, states)))
            self.budget.open_lease(record.tenant, fresh, count_distinct_blocks(tables), self._earliest_expiry)
        except EngineError:
            _free(found)
            self._states.drop([state for part in states for state in part])
            raise
        self.budget.settle(record.tenant, fresh)
        self._take_over(record, found, inputs)
        self._states.hold(record, [state for part in states for state in part])
        for kept, table in adopted:
            kept.table, kept.epochs = table, BlockEpochs()

    def borrow(self, record: Record) -> Borrowed:
        """All that an ended record has, until `give_back`. Raises InsufficientRetention if some of it is gone."""
        adopted, inputs = self._adopt(record)
        states = [state.hold() for state in record.states]
        try:
            states += (s for found in self._states_of(record, [kept for kept, _ in adopted]) for s in found)
            before = [s for kept, _ in adopted for s in self._states.before(record.salt, kept.tokens, kept.computed)]
            states = self._states.lend(states, before)
        except EngineError:
            _free([*(table for _, table in adopted), *inputs])
            self._states.drop(states)
            raise
        tables = {index: kept.table.fork() for index, kept in record.kept.items() if kept.table is not None}
        tables |= {i: table for i, kept in record.kept.items() for other, table in adopted if other is kept}
        return Borrowed(tables, [*inputs, *(held.table.fork() for held in record.inputs)], states)

    def give_back(self, borrowed: Borrowed) -> None:
        """Once."""
        _free(borrowed.all())
        self._states.give_back(borrowed.states)

    def open_import(self, tenant: str, num_blocks: int, num_states: int) -> None:
        """Promises blocks to a record that comes from elsewhere. Raises RetentionTooLarge or InsufficientRetention."""
        self._states.check_more(num_states)
        self._open(tenant, num_blocks, num_blocks)
        self._states.reserve(num_states)

    def drop_import(self, tenant: str, num_blocks: int, num_states: int, owned: Borrowed | None = None) -> None:
        """It does not come after all; `owned` was made for it."""
        if owned is not None:
            _free(owned.all())
            self._states.drop(owned.states)
        self._states.reserve(-num_states)
        self.budget.settle(tenant, num_blocks)
        self.budget.close_lease(tenant)

    def grant_import(self, record: Record, owned: Borrowed, num_blocks: int, ttl: float, now: float) -> None:
        """It is there, and takes over the tables that were made for it."""
        self.budget.settle(record.tenant, num_blocks)
        self._take_over(record, owned.all(), owned.inputs)
        record.lease.states = len(owned.states)
        self._states.hold(record, owned.states)
        for index, table in owned.tables.items():
            record.kept[index].table = table
        self.set_expiry(record, ttl, now)

    def restore(self, record: Record, ttl: float, now: float) -> None:
        """A lease of an earlier process goes on, in files: it holds no blocks."""
        self.budget.restore_lease(record.tenant)
        self.set_expiry(record, ttl, now)

    def end(self, record: Record) -> None:
        """The lease is over; the blocks go when no open child needs them."""
        if record.lease.ttl is not None:
            self.budget.close_lease(record.tenant)
        record.lease.ttl = record.lease.expires_at = record.lease.expires_at_wall = None
        self.release_if_free(record)

    def release_if_free(self, record: Record) -> None:
        """Gives the blocks back that neither a lease nor an open child needs."""
        if record.lease.ttl is not None or record.pins > 0 or record not in self._holders:
            return
        self._holders.remove(record)
        self._free_blocks(record)

    def let_stored_go(self, tenant: str | None = None) -> bool:
        """A lease that is in files, the tenant's or anybody's, does without memory: the one least recently used. False:
        there is none."""
        device = list(self._on_device)
        elsewhere = sorted(self._holders - set(device), key=lambda record: record.identity.created_at)
        for record in (*elsewhere, *device):
            mine = tenant in (None, record.tenant)
            if mine and record.stored is not None and record.pins == 0 and record.tables():
                self._free_blocks(record)
                return True
        return False

    def _open(self, tenant: str, charge: int, whole: int) -> None:
        self._with_room(tenant, partial(self.budget.open_lease, tenant, charge, whole, self._earliest_expiry))

    def _with_room(self, tenant: str, promise: Callable[[], T]) -> T:
        """Leases in files give way to a promise that has no room beside them."""
        while True:
            try:
                return promise()
            except InsufficientRetention as error:
                share = error.reason == "share_of_leases_full"
                if error.reason == "too_many_leases" or not self.let_stored_go(tenant if share else None):
                    raise

    def _free_blocks(self, record: Record) -> None:
        self._states.release(record)
        self._on_device.pop(record, None)
        self.budget.let_go(record.tenant, record.tables())
        for kept in record.kept.values():
            if kept.table is not None:
                kept.epochs = kept.table.epochs()
                kept.table.free()
                kept.table = None
        for held in record.inputs:
            self._cross.let_go(held)
        record.inputs.clear()

    def touch(self, record: Record) -> None:
        if record in self._on_device:
            self._on_device.move_to_end(record)

    # --- time and room -------------------------------------------------------------------------------------------

    def next_expiry(self) -> float | None:
        while self._expiries and self._expiries[0][2].lease.expires_at != self._expiries[0][0]:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def pop_expired(self, now: float) -> Record | None:
        due = self.next_expiry()
        return None if due is None or due > now else heapq.heappop(self._expiries)[2]

    def holders(self) -> list[Record]:
        """Every record that holds blocks."""
        return list(self._holders)

    @property
    def num_states(self) -> int:
        """Of recurrent layers, that records hold."""
        return self._states.num_held

    def on_device(self) -> list[Record]:
        """Those that hold some on the device, least recently used first."""
        return list(self._on_device)

    def note_move(self, records: Iterable[Record], pairs: Iterable[tuple[int, int]]) -> None:
        """Blocks of these records have new numbers: (old, new) as in BlockTable.blocks."""
        self.budget.note_move(pairs)
        for record in records:
            self._note_place(record)

    # --- inside --------------------------------------------------------------------------------------------------

    def most_blocks(self, group: Living) -> int:
        """Blocks of all choices with the tokens that are charged for; the full blocks of their prompt are shared."""
        params, pool = group.request.params, self._pool
        num_output = min(params.max_tokens, group.charged_output)
        prompt, size = len(group.request.prompt_token_ids), pool.block_size
        shared = prompt // size
        whole = shared + params.n * (-(-(prompt + num_output) // size) - shared)
        windows = params.n * pool.most_leased_of_windows(prompt + num_output, prompt)
        return whole * pool.num_whole_strips + windows + self._cross.num_blocks(group.request.encoder)

    def _shared_rows(self, request: Request, creditor: Record | None) -> int:
        if creditor is None or request.terms.lineage is None or not creditor.leased:
            return 0
        held = creditor.choice(request.terms.lineage.choice)
        if held is None or held.lease is None:  # it may be in files alone
            return 0
        alike = held.tokens.common_prefix(TokenList(request.prompt_token_ids))
        most = min(request.terms.lineage.at, held.computed, len(request.prompt_token_ids) - 1, alike)
        return most // self._pool.block_size

    def _shared_inputs(self, record: Record, creditor: Record | None) -> int:
        if creditor is None or not creditor.leased or creditor.salt != record.salt:
            return 0
        return sum(len(held.table) for held in creditor.inputs)

    def _take_over(self, record: Record, tables: list[BlockTable], inputs: list[BlockTable]) -> None:
        """Holds tables that are paid for, of which these are its encoder input's."""
        for table in tables:
            self.budget.hold(record.tenant, table)
        record.inputs += [self._cross.hold(record.salt, table, None) for table in inputs]

    def _hold_input(self, record: Record) -> None:
        """What is the same for all choices of a promised lease. REQUIRES: its group holds it, or it can be found"""
        group = record.group
        held = None if group is None or group.cross is None else group.cross.table.fork()
        table = held or self._cross.find(record.salt)
        assert table is not None, "a choice that ended with its blocks has its cross table"
        if record.lease.cross_discount and group is not None and group.parent is not None:
            # An open child keeps the lease of its parent.
            table.share_front(group.parent.inputs[0].table, record.lease.cross_discount)
        record.inputs.append(self._cross.hold(record.salt, table, None))
        self._pay(record, table)

    def _pay(self, record: Record, table: BlockTable) -> None:
        """From what was promised to a running request."""
        fresh = self.budget.hold(record.tenant, table)
        self.budget.settle(record.tenant, fresh)
        record.lease.charge -= fresh

    def _add_holder(self, record: Record) -> None:
        self._holders.add(record)
        self._note_place(record)

    def _note_place(self, record: Record) -> None:
        if any(table.num_on_host < len(table) for table in record.tables()):
            self._on_device[record] = None
        else:
            self._on_device.pop(record, None)

    def _share_what_is_paid(self, record: Record, kept: KeptChoice, table: BlockTable) -> None:
        """The choices of a request are charged for one prompt, and a child not for what its parent's lease holds. A
        preempted choice may have computed its own, and a child of a lease on the host has its own copy: these go."""
        size = self._pool.block_size
        siblings = record.choice_tables()
        if siblings:
            table.share_front(siblings[0], kept.num_prompt // size)
        elif record.lease.discount and record.group is not None and record.group.parent is not None:
            lineage = record.identity.lineage
            assert lineage is not None, "a discount is a child's"
            held = record.group.parent.kept[lineage.choice]
            assert held.table is not None, "an open child keeps the lease of its parent"
            table.share_front(held.table, record.lease.discount)

    def _end_promise(self, record: Record) -> None:
        self.budget.settle(record.tenant, record.lease.charge)
        self._states.settle(record)
        record.lease.charge = record.lease.discount = record.lease.cross_discount = 0

    def _adopt(self, record: Record) -> tuple[list[tuple[KeptChoice, BlockTable]], list[BlockTable]]:
        """Tables of the choices that hold no blocks, and of an encoder input that it does not hold: all must still be
        there."""
        adopted = []
        absent = [kept for kept in record.kept.values() if kept.table is None]
        wanted = record.encoder is not None and not record.inputs
        found = self._cross.find(record.salt) if wanted else None
        inputs = [] if found is None else [found]
        if absent and wanted and not inputs:
            raise self._blocks_are_gone(record)
        for kept in absent:
            table = BlockTable.adopt(self._pool, record.salt, kept.epochs)
            adopted.append((kept, table))
            if kept.computed == 0 or table.servable(kept.computed) < kept.computed:
                _free([*(table for _, table in adopted), *inputs])
                raise self._blocks_are_gone(record)
        return adopted, inputs

    def _blocks_are_gone(self, record: Record) -> InsufficientRetention:
        rows = sum(-(-len(kept.tokens) // self._pool.block_size) for kept in record.kept.values())
        needed = rows * self._pool.num_strips
        return InsufficientRetention(
            f"The blocks of the request '{record.id}' have been reused.",
            reason="blocks_reused",
            field="ttl",
            details=self.budget.details(record.tenant, needed),
            id=record.id,
        )

    def _earliest_expiry(self, tenant: str) -> float | None:
        """Of the tenant's own leases. Looks at all of them, for an error."""
        own = (lease for due, _, r in self._expiries if r.tenant == tenant and (lease := r.lease).expires_at == due)
        return min((at for lease in own if (at := lease.expires_at_wall) is not None), default=None)


def _free(tables: Iterable[BlockTable]) -> None:
    for table in tables:
        table.free()
