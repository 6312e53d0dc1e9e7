"""Leases while everything around them moves: floods, crowds of children that leave, a budget that is always full."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import InsufficientRetention, ParentNotFound, RetentionTooLarge
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.state.record import Record
from bequest.engine.types import Lineage, Request, Retain, SamplingParams
from tests.engine.harness import Setup, ask, ask_all, request, running
from tests.engine.paged_fake import PagedFakeRunner, expected_tokens

MAX_LEN = 160
ENOUGH = MAX_LEN // 4
TIGHT = Setup(
    num_blocks=1 + ENOUGH + 12, num_lease_blocks=12, num_host_blocks=120, max_model_len=MAX_LEN, max_num_seqs=8
)


def params(count: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **fields)  # type: ignore[arg-type]


def child_of(engine: AsyncEngine, parent: str, suffix: list[int], count: int, **fields: object) -> Request:
    tokens = engine.parent("t", parent).choices[0].token_ids
    return request([*tokens, *suffix], params(count), lineage=Lineage(parent, 0, len(tokens)), **fields)


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
async def test_a_flood_takes_nothing_from_a_lease(pipelined: bool) -> None:
    """Ten times the cache goes through it; every lease then computes its suffix and one token, as it did before."""
    setup = replace(TIGHT, pipelined=pipelined)
    async with running(setup) as (engine, runner):
        lengths = (1, 3, 4, 5, 15, 16, 17, 30)
        asked = [request([40 + i] * length, params(5), retain=Retain(600)) for i, length in enumerate(lengths)]
        await ask_all(engine, asked)
        sources: Counter[str] = Counter()
        before, wave = runner.num_tokens, 0
        while runner.num_tokens - before < 10 * setup.num_blocks * setup.block_size:
            wave += 1
            flood = [request([wave, i, *range(100, 170)], params(40)) for i in range(6)]
            parent = asked[wave % len(asked)]
            child = child_of(engine, parent.id, [7] * (wave % 4), 6)
            *_, answer = await ask_all(engine, [*flood, child])
            assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 6)
            assert answer.inheritance is not None
            assert answer.inheritance.computed_tokens == wave % 4 + 1
            sources[answer.inheritance.source] += 1
        for parent in asked:
            answer = await ask(engine, child := child_of(engine, parent.id, [1, 2], 4))
            assert answer.inheritance is not None and answer.inheritance.computed_tokens == 3
            assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 4)
            sources[answer.inheritance.source] += 1
            engine.forget("t", parent.id)
        assert sources["host"] > 0 and set(sources) <= {"blocks", "host"}


def bytes_of(record: Record, runner: PagedFakeRunner) -> list[list[int]]:
    """What the memory holds under the tables of a lease."""
    size = runner.block_size
    content = []
    for kept in record.kept.values():
        assert kept.table is not None
        slots: list[int] = []
        for block in kept.table.blocks:
            pool = runner.slots if block > 0 else runner.host_slots
            slots += pool[abs(block) * size : (abs(block) + 1) * size].tolist()
        content.append(slots[: kept.computed])
    return content


def count_preemptions(scheduler: Scheduler) -> Counter[str]:
    seen: Counter[str] = Counter()
    plan = scheduler.plan

    def counting(now: float, *ahead: int):
        launch = plan(now, *ahead)
        seen["preempted"] += launch.num_preempted if launch else 0
        return launch

    scheduler.plan = counting  # type: ignore[method-assign]
    return seen


async def live_and_leave(engine: AsyncEngine, asked: Request, fate: str, after: int) -> str:
    """A child that is aborted by its id, disconnects, or stays to the end."""
    stream = engine.generate(asked)
    tokens: list[int] = []
    count = 0
    async for delta in stream:
        tokens += [t for choice in delta.choices for t in choice.token_ids]
        count += 1
        if fate != "stays" and count > after:
            if fate == "aborted":
                engine.abort(asked.id)
            break
    await stream.aclose()  # type: ignore[attr-defined]
    assert tokens == expected_tokens(asked.prompt_token_ids, len(tokens))
    return fate


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [16, 18])
async def test_a_hundred_children_leave_their_parent_as_it_was(length: int, seed: int) -> None:
    draw = random.Random(seed)
    setup = replace(TIGHT, pipelined=seed % 2 == 0, max_num_seqs=24)
    async with running(setup) as (engine, runner):
        seen = count_preemptions(engine.scheduler)
        parent = await ask(engine, request(range(60, 60 + length), params(7), retain=Retain(600)))
        record = engine.retention.find("t", parent.id)
        before = (bytes_of(record, runner), record.kept[0].tokens.to_list(), record.kept[0].computed)
        used = engine.load().used_blocks
        children = [child_of(engine, parent.id, [i] * draw.randint(0, 9), draw.randint(1, 60)) for i in range(100)]
        fates = [(draw.choice(["aborted", "disconnected", "stays"]), draw.randint(0, 20)) for _ in children]
        await asyncio.gather(
            *(live_and_leave(engine, child, *fate) for child, fate in zip(children, fates, strict=True))
        )
        assert seen["preempted"] > 0
        assert (bytes_of(record, runner), record.kept[0].tokens.to_list(), record.kept[0].computed) == before
        load = engine.load()
        assert load.used_blocks + load.used_host_blocks == used
        table = record.kept[0].table
        assert table is not None and table.num_shared == 0 and record.pins == 0 and record.children == 100
        answer = await ask(engine, last := child_of(engine, parent.id, [3], 5))
        assert answer.inheritance is not None and answer.inheritance.computed_tokens == 2
        assert answer.token_ids[0] == expected_tokens(last.prompt_token_ids, 5)
        engine.forget("t", parent.id)
        assert engine.load().used_blocks == engine.load().used_host_blocks == engine.load().retention_charged == 0


class Client:
    """Asks, continues, prolongs and forgets at random, and wants every answer to be right."""

    def __init__(self, engine: AsyncEngine, seed: int, seen: Counter[str]) -> None:
        self.engine = engine
        self.draw = random.Random(seed)
        self.seen = seen
        self.mine: list[str] = []

    async def run(self, count: int) -> None:
        for _ in range(count):
            try:
                await asyncio.wait_for(self.once(), 20)
            except (InsufficientRetention, RetentionTooLarge, ParentNotFound) as error:
                self.seen[type(error).__name__] += 1
                with suppress(ParentNotFound):
                    if self.mine and self.draw.random() < 0.3:
                        self.engine.forget("t", self.mine.pop(0))

    async def once(self) -> None:
        draw, engine = self.draw, self.engine
        what = draw.choice(["ask", "continue", "continue", "continue", "leave", "prolong", "forget"])
        if what in ("ask", "leave") or not self.mine:
            asked = request(
                [draw.randrange(10, 900) for _ in range(draw.randint(1, 60))],
                params(draw.randint(0, 40)),
                retain=Retain(draw.choice([0.01, 0.1, 60])),
            )
        elif what == "continue":
            count, suffix = draw.randint(0, 12), [draw.randrange(900) for _ in range(draw.randint(0, 10))]
            retain = draw.choice([None, Retain(60)])
            parent = draw.choice(self.mine)
            if len(engine.parent("t", parent).choices[0].token_ids) > MAX_LEN - 25:
                return
            asked = child_of(engine, parent, suffix, count, retain=retain)
        else:
            parent = self.mine.pop(0)
            if what == "prolong":
                engine.set_ttl("t", parent, draw.choice([0.01, None]))
            else:
                engine.forget("t", parent)
            return
        if what == "leave":
            await live_and_leave(engine, asked, "disconnected", draw.randint(0, 5))
        else:
            await self.ask(asked)

    async def ask(self, asked: Request) -> None:
        answer = await ask(self.engine, asked)
        assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, asked.params.max_tokens)
        assert answer.usage is not None
        self.seen["answered"] += 1
        budget = self.engine.retention.leases.budget
        assert budget.used <= budget.capacity
        self.seen["full"] += budget.used > 0.9 * budget.capacity
        if asked.terms.retain is not None:
            assert answer.retained is not None and answer.retention_lost is None
            self.mine.append(asked.id)
        if answer.inheritance is not None:
            self.seen[answer.inheritance.source] += 1


@pytest.mark.parametrize("seed", range(4))
async def test_a_budget_that_is_always_full_stops_nobody(seed: int) -> None:
    setup = replace(TIGHT, pipelined=seed % 2 == 0, prefix_caching=seed % 4 < 2, num_host_blocks=60)
    seen: Counter[str] = Counter()
    async with running(setup) as (engine, _):
        for turn in range(10):  # leases run out by the clock, so that how much happens in a turn is chance
            first = 1000 * seed + 12 * turn
            await asyncio.gather(*(Client(engine, first + i, seen).run(60) for i in range(12)))
            assert engine.state == "ready"
            if seen["answered"] > 50 and seen["full"] > 20:
                break
        for entry in engine.records("t"):
            engine.forget("t", entry.id)
    assert seen["answered"] > 50 and seen["full"] > 20 and seen["InsufficientRetention"] > 0
    assert seen["blocks"] > 0
