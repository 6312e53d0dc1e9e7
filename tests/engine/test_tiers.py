"""A tier that takes its time, or loses what it was given: who waits for bytes holds nothing, and others pass it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from bequest.engine.cache.tiers.host import HostTier
from bequest.engine.cache.tiers.ticket import Ticket, done
from bequest.engine.cache.tiers.tier import BlockPairs
from bequest.engine.types import Retain, SamplingParams
from tests.engine.harness import Setup, ask, request, running, until
from tests.engine.paged_fake import expected_tokens
from tests.engine.test_leases_under_load import child_of
from tests.engine.test_random_schedule import drive
from tests.engine.world import World

STEPS = 150  # of each of ten worlds


class SlowTier(HostTier):
    """Has nothing at hand that was written since it was read last: that comes when `arrive` is called, or is lost."""

    def __init__(self, pool: HostTier, losing: float = 0.0, seed: int = 0) -> None:
        super().__init__(pool.pool)
        self._far: set[int] = set()
        self._losing, self._draw = losing, random.Random(seed)
        self.waiting: dict[Ticket, list[int]] = {}
        self.num_waits = self.num_lost = 0

    def read(self, blocks: Sequence[int]) -> Ticket:
        far = [block for block in blocks if block in self._far]
        if not far:
            return done()
        ticket = Ticket()
        if self._draw.random() < self._losing:
            self.num_lost += 1
            ticket.settle(OSError("the disk is gone"))
            return ticket
        self.num_waits += 1
        self.waiting[ticket] = far
        return ticket

    def bring(self, pairs: BlockPairs) -> None:
        assert not self._far & {host for host, _ in pairs}, "blocks were taken that are not at hand"
        super().bring(pairs)

    def write(self, pairs: BlockPairs) -> Ticket:
        self._far.update(host for _, host in pairs)
        return super().write(pairs)

    def arrive(self, share: float = 1.0) -> None:
        for ticket in [t for t in self.waiting if self._draw.random() < share]:
            self._far.difference_update(self.waiting.pop(ticket))
            ticket.settle()


class SlowWorld(World):
    def __init__(self, seed: int, most_encoder: int = 0, losing: float = 0.0) -> None:
        super().__init__(seed, most_encoder)
        host = self.scheduler.cache.tier
        assert isinstance(host, HostTier)
        self.tier = self.scheduler.cache.tier = SlowTier(host, losing, seed)
        self.losing = losing

    def launch(self) -> bool:
        self.moved = True
        self.tier.arrive(0.2)
        launched = super().launch()
        while not launched and not self.launched and self.tier.waiting:
            self.tier.arrive()  # nothing else could move
            launched = super().launch()
        return launched

    def check_promises(self) -> None:
        if self.losing == 0:
            super().check_promises()


@pytest.mark.parametrize("most_encoder", [0, 50])
def test_random_steps_over_a_slow_tier(most_encoder: int) -> None:
    waits = 0
    for seed in range(400, 410):
        world = SlowWorld(seed, most_encoder)
        drive(world, STEPS)
        assert world.seen["finished"] > 5
        waits += world.tier.num_waits
    assert waits > 10


@pytest.mark.parametrize("most_encoder", [0, 50])
def test_random_steps_over_a_tier_that_loses_blocks(most_encoder: int) -> None:
    """What is lost is computed again: no token changes."""
    lost = 0
    for seed in range(420, 430):
        world = SlowWorld(seed, most_encoder, losing=0.7)
        drive(world, STEPS)
        assert world.seen["finished"] > 5
        lost += world.tier.num_lost
    assert lost > 5


async def test_others_pass_who_waits_for_bytes() -> None:
    setup = Setup(num_blocks=25, num_host_blocks=60, num_lease_blocks=4, prefix_caching=False, max_num_seqs=2)
    async with running(setup) as (engine, _):
        cache = engine.scheduler.cache
        assert isinstance(cache.tier, HostTier)
        tier = cache.tier = SlowTier(cache.tier)
        parent = request([1] * 20, retain=Retain(600))
        await ask(engine, parent)
        await ask(engine, request([2] * 40, SamplingParams(max_tokens=40, temperature=0)))  # the lease has to go
        assert cache.host.num_used > 0
        child = child_of(engine, parent.id, [7], 6)
        answers = []
        engine.submit(child, answers.append)
        await until(lambda: tier.waiting)
        scheduler = engine.scheduler
        assert scheduler.num_running == 0 and scheduler.num_waiting == 1 and engine.num_waiting("t") == 1
        for _ in range(3):  # all slots are free for others, of the same tenant too
            asked = [request([3, i] * 5, tenant=tenant) for i, tenant in enumerate(["t", "u"])]
            for one in asked:
                assert (await ask(engine, one)).token_ids[0] == expected_tokens(one.prompt_token_ids, 8)
        assert scheduler.num_waiting == 1 and not answers
        tier.arrive()
        await until(lambda: answers and answers[-1].finished)
        assert [t for a in answers for c in a.choices for t in c.token_ids] == expected_tokens(
            child.prompt_token_ids, 6
        )
        assert answers[0].inheritance.source == "host" and answers[0].inheritance.computed_tokens == 2
        engine.forget("t", parent.id)


async def test_who_leaves_while_its_bytes_come_leaves_nothing() -> None:
    setup = Setup(num_blocks=25, num_host_blocks=60, num_lease_blocks=4, prefix_caching=False)
    async with running(setup) as (engine, _):
        cache = engine.scheduler.cache
        assert isinstance(cache.tier, HostTier)
        tier = cache.tier = SlowTier(cache.tier)
        parent = request([1] * 20, retain=Retain(600))
        await ask(engine, parent)
        await ask(engine, request([2] * 40, SamplingParams(max_tokens=40, temperature=0)))
        child = child_of(engine, parent.id, [7], 6)
        engine.submit(child, lambda _: None)
        await until(lambda: tier.waiting)
        engine.abort(child.id)
        assert engine.scheduler.num_waiting == 0
        engine.forget("t", parent.id)
        tier.arrive()


def test_a_ticket_is_settled_once() -> None:
    ticket, calls = Ticket(), []
    ticket.then(lambda: calls.append(1))
    assert ticket.pending and not calls
    ticket.settle(OSError())
    ticket.then(lambda: calls.append(2))
    assert ticket.failed and calls == [1, 2] and not done().pending
    with pytest.raises(AssertionError):
        ticket.settle()
