"""Leases: records that keep their blocks until a time, and the budget they are paid from.

A lease is promised when its request is admitted and granted when it ends. A record may hold its blocks beyond its
lease, for children that were let in while it was good; it pays for them until it lets them go.

Owned by the event-loop thread; the clocks are passed in.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

from engine._C import BlockPool, BlockTable, count_distinct_blocks
from engine.budget import LeaseBudget
from engine.errors import EngineError, InsufficientRetention
from engine.records import Record
from engine.sequence import Group
from engine.types import Request, Retained

# A lease without max_tokens is charged for this many tokens of completion, and again whenever they are used up.
OPEN_ENDED_TOKENS = 1024


class Leases:
    def __init__(self, budget: LeaseBudget, pool: BlockPool, wall: Callable[[], float]) -> None:
        self.budget = budget
        self._pool = pool
        self._wall = wall
        self._holders: OrderedDict[Record, None] = OrderedDict()  # least recently used first
        self._expiries: list[tuple[float, str, Record]] = []  # heap; stale entries are skipped

    # --- while the request runs ----------------------------------------------------------------------------------

    def promise(self, record: Record, request: Request, ttl: float, creditor: Record | None) -> None:
        """Charges the most that the request can come to, less what the lease of its parent pays for.

        Raises RetentionTooLarge or InsufficientRetention.
        """
        open_ended = request.retain is not None and request.retain.open_ended
        tokens = min(request.params.max_tokens, OPEN_ENDED_TOKENS) if open_ended else request.params.max_tokens
        whole = self._most_blocks(request, tokens)
        discount = self._shared_blocks(request, creditor)
        self.budget.open_lease(record.tenant, whole - discount, whole, self._earliest_expiry())
        record.charge, record.discount, record.ttl, record.lost = whole - discount, discount, ttl, None

    def extend(self, group: Group, num_output: int) -> None:
        """An open-ended lease of a running group is to cover `num_output` tokens of each choice, or is given up."""
        record = group.record
        if record is None or record.ttl is None:
            return
        whole = self._most_blocks(group.request, num_output)
        more = whole - record.discount - record.charge
        try:
            self.budget.promise(record.tenant, more, whole, self._earliest_expiry())
        except EngineError as error:
            self.give_up(record, f"the answer outgrew what could be leased: {error.message}")
            return
        record.charge += more

    def give_up(self, record: Record, why: str) -> None:
        """A running request will not be leased after all."""
        if record.ttl is None:
            return
        self._end_promise(record)
        self.budget.close_lease(record.tenant)
        record.ttl, record.lost = None, why
        self.release_if_free(record)

    def hold(self, record: Record, table: BlockTable) -> None:
        """A choice of a promised lease has ended and keeps its blocks."""
        self.budget.hold(record.tenant, [table])
        self._holders[record] = None

    # --- after its end -------------------------------------------------------------------------------------------

    def grant(self, record: Record, now: float) -> Retained:
        """The request has ended: the lease counts from now."""
        assert record.ttl is not None
        self._end_promise(record)
        self.set_expiry(record, record.ttl, now)
        assert record.expires_at_wall is not None
        return Retained(record.id, record.expires_at_wall, record.num_tokens, record.num_held_blocks())

    def set_expiry(self, record: Record, ttl: float, now: float) -> None:
        record.ttl = ttl
        record.expires_at = now + ttl
        record.expires_at_wall = self._wall() + ttl
        self._holders[record] = None
        heapq.heappush(self._expiries, (record.expires_at, record.id, record))

    def revive(self, record: Record) -> None:
        """Makes a holder of a record whose blocks are all still there. Raises InsufficientRetention and the like."""
        if record.ttl is None:
            tables = record.tables() or self._adopt(record)
            fresh = self.budget.num_unpaid(record.tenant, tables)
            try:
                whole = count_distinct_blocks(tables)
                self.budget.open_lease(record.tenant, fresh, whole, self._earliest_expiry())
            except EngineError:
                if not record.tables():
                    _free(tables)
                raise
            self.budget.settle(record.tenant, fresh)
            if not record.tables():
                self.budget.hold(record.tenant, tables)
                for kept, table in zip(record.kept.values(), tables, strict=True):
                    kept.table, kept.epochs = table, []

    def end(self, record: Record) -> None:
        """The lease is over; the blocks go when no open child needs them."""
        if record.ttl is not None:
            self.budget.close_lease(record.tenant)
        record.ttl = record.expires_at = record.expires_at_wall = None
        self.release_if_free(record)

    def release_if_free(self, record: Record) -> None:
        """Gives the blocks back that neither a lease nor an open child needs."""
        if record.ttl is not None or record.pins > 0 or record not in self._holders:
            return
        del self._holders[record]
        self.budget.let_go(record.tenant, record.tables())
        for kept in record.kept.values():
            if kept.table is not None:
                kept.epochs = kept.table.epochs()
                kept.table.free()
                kept.table = None

    def touch(self, record: Record) -> None:
        if record in self._holders:
            self._holders.move_to_end(record)

    # --- time and room -------------------------------------------------------------------------------------------

    def next_expiry(self) -> float | None:
        while self._expiries and self._expiries[0][2].expires_at != self._expiries[0][0]:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def pop_expired(self, now: float) -> Record | None:
        due = self.next_expiry()
        return None if due is None or due > now else heapq.heappop(self._expiries)[2]

    def holders(self) -> list[Record]:
        """Every record that holds blocks, least recently used first."""
        return list(self._holders)

    def device_tables(self) -> list[BlockTable]:
        return [table for record in self._holders for table in record.tables()]

    # --- inside --------------------------------------------------------------------------------------------------

    def _most_blocks(self, request: Request, num_output: int) -> int:
        """Blocks of all choices with so many tokens each; the full blocks of their prompt are shared."""
        prompt, size = len(request.prompt_token_ids), self._pool.block_size
        shared = prompt // size
        return shared + request.params.n * (-(-(prompt + num_output) // size) - shared)

    def _shared_blocks(self, request: Request, creditor: Record | None) -> int:
        if creditor is None or request.lineage is None or not creditor.leased:
            return 0
        estate = creditor.choice(request.lineage.choice)
        if estate is None:
            return 0
        return min(request.lineage.at, estate.computed, len(request.prompt_token_ids) - 1) // self._pool.block_size

    def _end_promise(self, record: Record) -> None:
        self.budget.settle(record.tenant, record.charge)
        record.charge = record.discount = 0

    def _adopt(self, record: Record) -> list[BlockTable]:
        tables = []
        for kept in record.kept.values():
            table, num_blocks = BlockTable.adopt(self._pool, record.salt, kept.epochs)
            tables.append(table)
            if num_blocks * self._pool.block_size < kept.computed:
                _free(tables)
                raise InsufficientRetention(
                    f"The request '{record.id}' cannot be leased any more: its blocks have been reused. Continue from "
                    "it with `retain` to lease its tokens anew.",
                    param="ttl",
                    details={"budget_blocks": self.budget.capacity, "used_blocks": self.budget.used},
                )
        return tables

    def _earliest_expiry(self) -> float | None:
        self.next_expiry()
        return self._expiries[0][2].expires_at_wall if self._expiries else None


def _free(tables: Iterable[BlockTable]) -> None:
    for table in tables:
        table.free()
