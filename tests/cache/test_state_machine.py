"""Random histories of pool, tables, index, records and swap against a model that simulates the memory.

The memory is a dict of slots. A write puts the whole history of a position, (salt, tokens up to it), into its slot;
copies and swaps move slots as they were reported. So a table reads back exactly its own histories if and only if every
mapping, share, copy, match, revival and move was right. Reference counts are recounted from the tables after each rule.

Inside a plan nothing touches the memory until the plan ends; then, as in a step: swaps outward, swaps inward, copies
(all reads before all writes), writes of the forward.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bequest.engine._C import BlockPool, BlockTable, TokenList, swap_out_some, try_swap_in, try_swap_out

History = tuple[bytes, tuple[int, ...]]
Pairs = list[tuple[int, int]]
Record = tuple[bytes, list[int], Pairs]
tokens_of_prompt = st.lists(st.integers(0, 1), min_size=1, max_size=9)
new_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=4)
salts = st.sampled_from([b"a", b"a", b""])
which = st.integers(0, 999)  # picks one of those that live
ninths = st.sampled_from([9, 9, 0, 2, 4, 5, 7, 8])
groups = st.sets(st.integers(0, 5), min_size=1, max_size=4)

MOST_SEQUENCES = 6
some = precondition(lambda self: self.live)
some_and_room = precondition(lambda self: 0 < len(self.live) < MOST_SEQUENCES)


@dataclass(eq=False)
class Sequence:
    """A table and what it must read back."""

    table: BlockTable
    salt: bytes
    tokens: list[int]
    in_plan: bool = False  # this plan writes it or swaps it in: it is left alone until the plan ends

    def history(self, position: int) -> History:
        return (self.salt, tuple(self.tokens[: position + 1]))


@dataclass
class Memory:
    """Slots of both pools, and what the open plan will do to them."""

    block_size: int
    slots: dict[tuple[int, int], History] = field(default_factory=dict)  # (block, or -block of the host; slot)
    out: Pairs = field(default_factory=list)
    back: Pairs = field(default_factory=list)
    copies: Pairs = field(default_factory=list)
    writes: list[tuple[int, int, History]] = field(default_factory=list)

    def run(self) -> None:
        for pairs in (self.out, self.back, self.copies):
            self._copy(pairs)
        for block, slot, history in self.writes:
            self.slots[block, slot] = history
        self.out, self.back, self.copies, self.writes = [], [], [], []

    def _copy(self, pairs: Pairs) -> None:
        moved = {
            (target, slot): self.slots[source, slot]
            for source, target in pairs
            for slot in range(self.block_size)
            if (source, slot) in self.slots
        }
        for _, target in pairs:
            for slot in range(self.block_size):
                self.slots.pop((target, slot), None)
        self.slots.update(moved)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 3),
        num_blocks=st.integers(4, 16),
        num_host_blocks=st.integers(1, 8),
        hash_bits=st.sampled_from([0, 1, 32]),
        indexed=st.sampled_from([True, True, True, False]),
    )
    def make_pools(self, block_size: int, num_blocks: int, num_host_blocks: int, hash_bits: int, indexed: bool) -> None:
        self.device = BlockPool(num_blocks, block_size, indexed, hash_bits)
        self.host = BlockPool(num_host_blocks, block_size, prefix_index=False)
        self.indexed = indexed
        self.block_size = block_size
        self.memory = Memory(block_size)
        self.live: list[Sequence] = []
        self.records: list[Record] = []
        self.kept: list[int] = []  # references the open plan keeps: blocks, or -block of the host
        self.planning = False

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        if self.planning:
            self.end_plan()
        for sequence in self.live:
            sequence.table.free()
        for pool in (self.device, self.host):
            assert pool.num_free == pool.num_blocks - 1
            pool.check()

    # --- helpers

    def join(self, table: BlockTable, salt: bytes, tokens: list[int], in_plan: bool = False) -> Sequence:
        sequence = Sequence(table, salt, tokens, in_plan)
        self.live.append(sequence)
        return sequence

    def at(self, i: int) -> Sequence:
        return self.live[i % len(self.live)]

    def settle(self) -> None:
        if not self.planning:
            self.memory.run()

    def owners(self) -> Counter[int]:
        return Counter(entry for sequence in self.live for entry in sequence.table.blocks)

    # --- plans

    @precondition(lambda self: not self.planning)
    @rule()
    def begin_plan(self) -> None:
        self.device.begin_plan()
        self.host.begin_plan()
        self.planning = True

    @precondition(lambda self: self.planning)
    @rule()
    def end_plan(self) -> None:
        self.device.end_plan()
        self.host.end_plan()
        self.planning = False
        self.kept.clear()
        self.memory.run()
        for sequence in self.live:
            sequence.in_plan = False

    # --- tables

    @precondition(lambda self: len(self.live) < MOST_SEQUENCES)
    @rule(
        salt=salts, tokens=tokens_of_prompt, short=st.integers(0, 2), ends_inside=st.booleans(), commits=st.booleans()
    )
    def start(self, salt: bytes, tokens: list[int], short: int, ends_inside: bool, commits: bool) -> None:
        """A request: finds what it can, computes the rest."""
        table, known, limit = BlockTable(self.device, salt), TokenList(tokens), len(tokens) - short
        matched = table.match_prefix(known, limit)
        assert matched % self.block_size == 0 and matched <= max(0, limit)
        assert matched == len(table) * self.block_size
        if ends_inside:
            head = table.match_partial(known, limit)
            assert head < self.block_size and matched + head <= max(0, limit)
            assert len(table) == -(-(matched + head) // self.block_size)
            assert head == 0 or not self.is_written_by_plan(table.blocks[-1]), "it could not be copied in this plan"
            matched += head
        sequence = self.join(table, salt, tokens[:matched])
        self.try_write(sequence, matched, tokens[matched:])
        if commits:
            self.try_commit(sequence, len(sequence.tokens))

    @some
    @rule(i=which, new=new_tokens, commits=st.booleans())
    def append(self, i: int, new: list[int], commits: bool) -> None:
        sequence = self.at(i)
        self.try_write(sequence, len(sequence.tokens), new)
        if commits:
            self.try_commit(sequence, len(sequence.tokens))

    @some
    @rule(i=which, part=ninths, new=new_tokens)
    def rewrite(self, i: int, part: int, new: list[int]) -> None:
        """Replaces the tokens from some position on."""
        sequence = self.at(i)
        self.try_write(sequence, len(sequence.tokens) * part // 9, new)

    def try_write(self, sequence: Sequence, begin: int, new: list[int]) -> None:
        table, end, first = sequence.table, begin + len(new), begin // self.block_size
        if sequence.in_plan or not table.resident or not new:
            return
        if begin % self.block_size > self.settled_slots(table.blocks[first] if first < len(table) else 0):
            return  # an Error, which has a test of its own
        needed, before, free = table.blocks_needed(begin, end), table.blocks, self.device.num_free
        copies = table.try_prepare_write(begin, end)
        assert (copies is None) == (needed > free)
        if copies is None:
            assert table.blocks == before and self.device.num_free == free
            return
        changed = [i for i, block in enumerate(table.blocks) if i >= len(before) or block != before[i]]
        # Fewer where the pool is so short that a block which the write gave up comes straight back to its place.
        assert len(changed) <= needed
        assert copies in ([], [(before[first], table.blocks[first])] if first < len(before) else [])
        if self.planning:
            self.kept += [source for source, _ in copies]
            sequence.in_plan = True
        sequence.tokens = sequence.tokens[:begin] + new
        self.memory.copies += copies
        for position in range(begin, end):
            block = table.blocks[position // self.block_size]
            self.memory.writes.append((block, position % self.block_size, sequence.history(position)))
        self.settle()

    def is_written_by_plan(self, block: int) -> bool:
        return any(block == written for written, _, _ in self.memory.writes)

    def settled_slots(self, block: int) -> int:
        """Slots that are the same before and after the copies and writes of the open plan."""
        if any(block == target for _, target in self.memory.copies):
            return 0
        return min((slot for written, slot, _ in self.memory.writes if written == block), default=self.block_size)

    @some
    @rule(i=which, part=ninths)
    def commit(self, i: int, part: int) -> None:
        self.try_commit(self.at(i), len(self.at(i).tokens) * part // 9)

    def try_commit(self, sequence: Sequence, computed: int) -> None:
        if not sequence.table.resident:
            return
        sequence.table.commit(TokenList(sequence.tokens), computed)
        if self.indexed:
            probe = BlockTable(self.device, sequence.salt)
            full = computed // self.block_size * self.block_size
            assert probe.match_prefix(TokenList(sequence.tokens), computed) == full

    @some
    @rule(i=which, part=ninths)
    def uncommit(self, i: int, part: int) -> None:
        self.at(i).table.uncommit(len(self.at(i).tokens) * part // 9)

    @some_and_room
    @rule(i=which)
    def fork(self, i: int) -> None:
        parent = self.at(i)
        child = parent.table.fork()
        assert child.blocks == parent.table.blocks
        self.join(child, parent.salt, list(parent.tokens), parent.in_plan)

    @some_and_room
    @rule(i=which, part=ninths)
    def slice_to(self, i: int, part: int) -> None:
        parent = self.at(i)
        length = len(parent.tokens) * part // 9
        child = parent.table.slice_to(length)
        assert child.blocks == parent.table.blocks[: -(-length // self.block_size)]
        self.join(child, parent.salt, parent.tokens[:length], parent.in_plan)

    @some_and_room
    @rule(i=which, part=ninths, new=new_tokens)
    def branch(self, i: int, part: int, new: list[int]) -> None:
        """A child of a sequence that this very plan may write: it shares full blocks and copies the last one."""
        parent = self.at(i)
        length = len(parent.tokens) * part // 9
        child = self.join(parent.table.slice_to(length), parent.salt, parent.tokens[:length])
        self.try_write(child, length, new)
        child.in_plan |= parent.in_plan

    @precondition(lambda self: len(self.live) > 1)
    @rule(i=which, j=which)
    def share_front(self, i: int, j: int) -> None:
        """Two sequences that computed the same keep it once."""
        one, other = self.at(i), self.at(j)
        if one.in_plan or other.in_plan or one.salt != other.salt:
            return
        differ = [k for k, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b]
        count = min([len(one.tokens), len(other.tokens), *differ[:1]]) // self.block_size
        one.table.share_front(other.table, count)
        assert one.table.blocks[:count] == other.table.blocks[:count]

    @some
    @rule(i=which, part=ninths)
    def truncate(self, i: int, part: int) -> None:
        sequence = self.at(i)
        if not sequence.in_plan:
            length = len(sequence.tokens) * part // 9
            sequence.table.truncate(length)
            sequence.tokens = sequence.tokens[:length]

    @some
    @rule(i=which, explicitly=st.booleans())
    def end(self, i: int, explicitly: bool) -> None:
        """A sequence ends, maybe by its destructor; a record of it stays."""
        sequence = self.at(i)
        if sequence.in_plan:
            return
        self.record(i)
        self.live.remove(sequence)
        if explicitly:
            sequence.table.free()
            sequence.table.free()
            assert sequence.table.blocks == []

    # --- records

    @some
    @rule(i=which)
    def record(self, i: int) -> None:
        sequence = self.at(i)
        self.records.append((sequence.salt, list(sequence.tokens), list(sequence.table.epochs())))

    @precondition(lambda self: self.records and len(self.live) < MOST_SEQUENCES)
    @rule(i=which)
    def adopt(self, i: int) -> None:
        salt, tokens, pairs = self.records[i % len(self.records)]
        table = BlockTable.adopt(self.device, salt, pairs)
        count = len(table)
        assert count == len(table) and table.blocks == [block for block, _ in pairs[:count]]
        if count < len(pairs):
            block, epoch = pairs[count]
            assert self.device.epoch(block) != epoch
        # In the middle of a plan its blocks may wait for their content.
        self.join(table, salt, tokens[: count * self.block_size], in_plan=self.planning)

    # --- swap

    def pick(self, chosen: set[int]) -> list[Sequence]:
        return [s for i, s in enumerate(self.live) if i in chosen]

    @some
    @rule(chosen=groups)
    def swap_out(self, chosen: set[int]) -> None:
        picked = [s for s in self.pick(chosen) if not s.in_plan]
        inside = Counter(e for s in picked for e in s.table.blocks if e > 0)
        outside = self.owners() + Counter(self.kept)
        moving = [block for block in inside if inside[block] == outside[block]]
        if self.planning and any(self.is_written_by_plan(block) for block in moving):
            return  # an Error, which has a test of its own
        before, free = [s.table.blocks for s in picked], self.host.num_free
        pairs = try_swap_out([s.table for s in picked], self.host)
        assert (pairs is None) == (len(moving) > free)
        if pairs is None:
            assert before == [s.table.blocks for s in picked]
            return
        assert [device for device, _ in pairs] == moving
        target = {device: -host for device, host in pairs}
        assert [s.table.blocks for s in picked] == [[target.get(e, e) for e in blocks] for blocks in before]
        self.memory.out += [(device, -host) for device, host in pairs]
        self.settle()

    @some
    @rule(chosen=groups, most=st.integers(0, 5))
    def swap_some_out(self, chosen: set[int], most: int) -> None:
        """As many as fit of those that only the chosen hold; what this plan writes or brought in stays."""
        picked = self.pick(chosen)
        inside = Counter(e for s in picked for e in s.table.blocks if e > 0)
        outside = self.owners() + Counter(self.kept)
        arrived = {device for _, device in self.memory.back} if self.planning else set()
        own = [block for block in inside if inside[block] == outside[block]]
        movable = [block for block in own if not self.is_written_by_plan(block) and block not in arrived]
        count = min(most, self.host.num_free, len(movable))
        before = [s.table.blocks for s in picked]
        pairs = swap_out_some([s.table for s in picked], self.host, most)
        assert [device for device, _ in pairs] == movable[len(movable) - count :]
        target = {device: -host for device, host in pairs}
        assert [s.table.blocks for s in picked] == [[target.get(e, e) for e in blocks] for blocks in before]
        self.memory.out += [(device, -host) for device, host in pairs]
        self.settle()

    @some
    @rule(chosen=groups)
    def swap_in(self, chosen: set[int]) -> None:
        picked = self.pick(chosen)
        uses = Counter(e for s in picked for e in s.table.blocks if e < 0)
        before, free = [s.table.blocks for s in picked], self.device.num_free
        pairs = try_swap_in([s.table for s in picked], self.device)
        assert (pairs is None) == (len(uses) > free)
        if pairs is None:
            assert before == [s.table.blocks for s in picked]
            return
        assert [-host for host, _ in pairs] == list(uses)
        target = {-host: device for host, device in pairs}
        assert [s.table.blocks for s in picked] == [[target.get(e, e) for e in blocks] for blocks in before]
        if self.planning:
            self.kept += uses.elements()
            for sequence, blocks in zip(picked, before, strict=True):
                sequence.in_plan |= any(entry < 0 for entry in blocks)
        self.memory.back += [(-host, device) for host, device in pairs]
        self.settle()

    @rule()
    def clear_index(self) -> None:
        self.device.clear_index()
        assert self.device.num_indexed == self.device.num_roots == 0

    @invariant()
    def pools_are_sound(self) -> None:
        if not hasattr(self, "device"):
            return
        owners = self.owners() + Counter(self.kept)
        for pool, sign in ((self.device, 1), (self.host, -1)):
            pool.check()
            used = [owners[sign * block] for block in range(1, pool.num_blocks)]
            assert used == [pool.ref_count(block) for block in range(1, pool.num_blocks)]
            assert pool.num_free == used.count(0)
        for sequence in self.live:
            on_host = sum(entry < 0 for entry in sequence.table.blocks)
            assert (sequence.table.num_on_host, sequence.table.resident) == (on_host, on_host == 0)
            for block in sequence.table.blocks:
                assert block < 0 or self.device.settled_slots(block) == self.settled_slots(block)

    @invariant()
    def tables_read_back_their_own_tokens(self) -> None:
        if not hasattr(self, "device") or self.planning:
            return
        for sequence in self.live:
            blocks = sequence.table.blocks
            for position in range(len(sequence.tokens)):
                slot = (blocks[position // self.block_size], position % self.block_size)
                assert self.memory.slots.get(slot) == sequence.history(position)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=100, stateful_step_count=40)


# Hypothesis shrinks what it finds, but its histories are short and thin. These are long and crowded.
STEPS: dict[str, tuple[int, Callable[[random.Random], dict[str, object]]]] = {
    "start": (
        8,
        lambda rng: {
            "salt": rng.choice([b"a", b"a", b""]),
            "tokens": [rng.randrange(2) for _ in range(rng.randint(1, 9))],
            "short": rng.randrange(3),
            "ends_inside": rng.random() < 0.5,
            "commits": rng.random() < 0.7,
        },
    ),
    "append": (8, lambda rng: {**one(rng), "new": some_tokens(rng), "commits": rng.random() < 0.7}),
    "rewrite": (2, lambda rng: {**part(rng), "new": some_tokens(rng)}),
    "commit": (2, lambda rng: part(rng)),
    "uncommit": (1, lambda rng: part(rng)),
    "fork": (4, lambda rng: one(rng)),
    "slice_to": (2, lambda rng: part(rng)),
    "branch": (4, lambda rng: {**part(rng), "new": some_tokens(rng)}),
    "share_front": (2, lambda rng: {**one(rng), "j": rng.randrange(1000)}),
    "truncate": (2, lambda rng: part(rng)),
    "end": (6, lambda rng: {**one(rng), "explicitly": rng.random() < 0.5}),
    "record": (1, lambda rng: one(rng)),
    "adopt": (4, lambda rng: one(rng)),
    "swap_out": (3, lambda rng: {"chosen": set(rng.sample(range(6), rng.randint(1, 3)))}),
    "swap_some_out": (3, lambda rng: {"chosen": set(rng.sample(range(6), 3)), "most": rng.randrange(6)}),
    "swap_in": (4, lambda rng: {"chosen": set(rng.sample(range(6), rng.randint(1, 6)))}),
    "begin_plan": (3, lambda rng: {}),
    "end_plan": (2, lambda rng: {}),
    "clear_index": (1, lambda rng: {}),
}


def one(rng: random.Random) -> dict[str, object]:
    return {"i": rng.randrange(1000)}


def part(rng: random.Random) -> dict[str, object]:
    return {**one(rng), "part": rng.choice([9, 9, 0, 2, 4, 5, 7, 8])}


def some_tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randint(1, 4))]


def may(machine: CacheMachine, name: str) -> bool:
    if name in ("begin_plan", "end_plan"):
        return machine.planning == (name == "end_plan")
    if name in ("start", "fork", "slice_to", "branch", "adopt") and len(machine.live) >= MOST_SEQUENCES:
        return False
    return name == "start" or bool(machine.records if name == "adopt" else machine.live)


@pytest.mark.parametrize("seed", range(24))
def test_random_walk(seed: int) -> None:
    rng = random.Random(seed)
    machine = CacheMachine()
    machine.make_pools(
        block_size=rng.randint(1, 4),
        num_blocks=rng.randint(5, 20),
        num_host_blocks=rng.randint(1, 10),
        hash_bits=rng.choice([0, 1, 2, 32]),
        indexed=seed % 6 != 5,
    )
    names, weights = list(STEPS), [weight for weight, _ in STEPS.values()]
    for _ in range(1500):
        name = rng.choices(names, weights)[0]
        if may(machine, name):
            getattr(machine, name)(**STEPS[name][1](rng))
            machine.pools_are_sound()
            machine.tables_read_back_their_own_tokens()
    machine.teardown()
