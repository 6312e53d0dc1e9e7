"""Block accounting of requests with a cross table and a self table per sequence, as equations.

Without sharing, blocks(request) = |cross table| + Σ |self table of each sequence|. In general it is the number of
distinct blocks of its tables; allocate, swap-out, swap-in, free, free-cross and reset move exactly those that have no
other owner between the device pool, the host pool and the free lists, and a shared block moves once and stays shared.
After every move the free counts of both pools are compared with what these sentences say, from a model that knows
nothing of tables: sets of (request, part, block number) on the device and on the host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bequest.engine._C import BlockPool, BlockTable, count_distinct_blocks, try_swap_in, try_swap_out

which = st.integers(0, 999)
MOST = 5  # requests at once


def ceil_div(length: int, size: int) -> int:
    return -(-length // size)


@dataclass(eq=False)
class Request:
    """Tables, and the names of their blocks in the model: equal names are one block."""

    cross: BlockTable
    selves: list[BlockTable]
    cross_names: list[int]
    self_names: list[list[int]]
    swapped: bool = False
    lengths: list[int] = field(default_factory=list)

    @property
    def tables(self) -> list[BlockTable]:
        return [self.cross, *self.selves]

    @property
    def names(self) -> list[list[int]]:
        return [self.cross_names, *self.self_names]


class Accounting(RuleBasedStateMachine):
    @initialize(block_size=st.integers(1, 4), num_blocks=st.integers(4, 40), num_host=st.integers(1, 30))
    def start(self, block_size: int, num_blocks: int, num_host: int) -> None:
        self.size = block_size
        self.device = BlockPool(num_blocks, block_size)
        self.host = BlockPool(num_host, block_size, prefix_index=False)
        self.requests: list[Request] = []
        self.on_host: set[int] = set()  # names
        self.next_name = 0

    # --- the model

    def owners(self) -> Counter[int]:
        return Counter(name for r in self.requests for names in r.names for name in names)

    def used(self) -> tuple[int, int]:
        """Blocks in use on the device and on the host."""
        alive = set(self.owners())
        return len(alive - self.on_host), len(alive & self.on_host)

    def fresh(self, count: int) -> list[int]:
        names = list(range(self.next_name, self.next_name + count))
        self.next_name += count
        return names

    def own(self, request: Request) -> set[int]:
        """Names that nobody but this request has."""
        inside = Counter(name for names in request.names for name in names)
        everywhere = self.owners()
        return {name for name, count in inside.items() if everywhere[name] == count}

    def free(self) -> tuple[int, int]:
        return self.device.num_free, self.host.num_free

    def pick(self, i: int) -> Request:
        return self.requests[i % len(self.requests)]

    # --- moves

    @precondition(lambda self: len(self.requests) < MOST)
    @rule(cross=st.integers(1, 20), selves=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def allocate(self, cross: int, selves: list[int]) -> None:
        """A request without sharing: |cross| + Σ |self| blocks leave the free list, or none."""
        needed = ceil_div(cross, self.size) + sum(ceil_div(length, self.size) for length in selves)
        before = self.free()
        if needed > before[0]:
            return
        tables = [BlockTable(self.device) for _ in range(1 + len(selves))]
        for table, length in zip(tables, [cross, *selves], strict=True):
            assert table.try_prepare_write(0, length) == []
        request = Request(
            tables[0],
            tables[1:],
            self.fresh(ceil_div(cross, self.size)),
            [self.fresh(ceil_div(length, self.size)) for length in selves],
            lengths=list(selves),
        )
        self.requests.append(request)
        assert self.free() == (before[0] - needed, before[1])
        assert count_distinct_blocks(request.tables) == needed

    @precondition(lambda self: self.requests and len(self.requests) < MOST)
    @rule(i=which, length=st.integers(1, 9))
    def equal_input(self, i: int, length: int) -> None:
        """Another request shares the cross table: it takes blocks for its self table alone."""
        other = self.pick(i)
        needed, before = ceil_div(length, self.size), self.free()
        if needed > before[0] or other.swapped:
            return
        table = BlockTable(self.device)
        assert table.try_prepare_write(0, length) == []
        cross = other.cross.fork()
        request = Request(cross, [table], list(other.cross_names), [self.fresh(needed)], lengths=[length])
        self.requests.append(request)
        assert self.free() == (before[0] - needed, before[1])

    @precondition(lambda self: self.requests)
    @rule(i=which)
    def fork(self, i: int) -> None:
        """One more choice: it takes nothing until it writes."""
        request, before = self.pick(i), self.free()
        request.selves.append(request.selves[0].fork())
        request.self_names.append(list(request.self_names[0]))
        request.lengths.append(request.lengths[0])
        assert self.free() == before

    @precondition(lambda self: self.requests)
    @rule(i=which, j=which, count=st.integers(1, 6))
    def append(self, i: int, j: int, count: int) -> None:
        """A sequence grows: new blocks, and a copy of its last one if somebody else has that too."""
        request = self.pick(i)
        number = j % len(request.selves)
        table, names, begin = request.selves[number], request.self_names[number], request.lengths[number]
        if request.swapped or not table.resident:
            return
        inside = begin % self.size > 0
        copied = inside and self.owners()[names[-1]] > 1
        needed = ceil_div(begin + count, self.size) - ceil_div(begin, self.size) + copied
        before = self.free()
        copies = table.try_prepare_write(begin, begin + count)
        assert (copies is None) == (needed > before[0])
        if copies is None:
            assert self.free() == before
            return
        assert len(copies) == copied
        if copied:
            names[-1:] = self.fresh(1)
        names += self.fresh(needed - copied)
        request.lengths[number] = begin + count
        assert self.free() == (before[0] - needed, before[1])

    @precondition(lambda self: self.requests)
    @rule(i=which)
    def swap_out(self, i: int) -> None:
        """Its blocks without another owner move, each once; the others stay where they are."""
        request, before = self.pick(i), self.free()
        moving = self.own(request) - self.on_host
        pairs = try_swap_out(request.tables, self.host)
        assert (pairs is None) == (len(moving) > before[1])
        if pairs is None:
            assert self.free() == before
            return
        assert len(pairs) == len(moving)
        self.on_host |= moving
        request.swapped = any(name in self.on_host for names in request.names for name in names)
        assert self.free() == (before[0] + len(moving), before[1] - len(moving))

    @precondition(lambda self: self.requests)
    @rule(i=which)
    def swap_in(self, i: int) -> None:
        """What is on the host comes back, each block once. One that others have there too stays for them, and the two
        are different blocks from then on."""
        request, before = self.pick(i), self.free()
        moving = {name for names in request.names for name in names} & self.on_host
        shared = moving - self.own(request)
        pairs = try_swap_in(request.tables, self.device)
        assert (pairs is None) == (len(moving) > before[0])
        if pairs is None:
            assert self.free() == before
            return
        assert len(pairs) == len(moving)
        renamed = dict(zip(shared, self.fresh(len(shared)), strict=True))
        for names in request.names:
            names[:] = [renamed.get(name, name) for name in names]
        self.on_host -= moving - shared
        request.swapped = False
        assert self.free() == (before[0] - len(moving), before[1] + len(moving) - len(shared))

    @precondition(lambda self: self.requests)
    @rule(i=which)
    def free_request(self, i: int) -> None:
        """Free: its self tables; free-cross: its cross table. Blocks without another owner go back, and no others."""
        request = self.pick(i)
        for part, table in enumerate(reversed(request.tables)):
            before = self.free()
            names = list(reversed(request.names))[part]
            everywhere = self.owners()
            returned = {name for name in names if everywhere[name] == names.count(name)}
            table.free()
            names.clear()
            there = len(returned & self.on_host)
            assert self.free() == (before[0] + len(returned) - there, before[1] + there)
            self.on_host -= returned
        self.requests.remove(request)

    @rule()
    def reset(self) -> None:
        """Everything goes: both pools are as they were."""
        for request in self.requests:
            for table in request.tables:
                table.free()
        self.requests.clear()
        self.on_host.clear()
        assert self.free() == (self.device.num_blocks - 1, self.host.num_blocks - 1)

    @invariant()
    def free_counts_are_what_the_formulas_say(self) -> None:
        if not hasattr(self, "device"):
            return
        used, used_on_host = self.used()
        assert self.free() == (self.device.num_blocks - 1 - used, self.host.num_blocks - 1 - used_on_host)
        for request in self.requests:
            assert count_distinct_blocks(request.tables) == len({name for names in request.names for name in names})
        self.device.check()
        self.host.check()

    def teardown(self) -> None:
        if hasattr(self, "device"):
            self.reset()


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=150, stateful_step_count=40)
