"""States of recurrent layers whose bytes come from elsewhere, piece by piece, while others run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bequest.engine.engine import AsyncEngine
from bequest.engine.inheritance.estates import Coming
from bequest.engine.types import Lineage, Retain
from bequest.engine.types.blocks import BlockBytes
from bequest.engine.types.estate import Estate
from bequest.engine.types.recurrent import StateSizes
from tests.engine.harness import Setup, ask, request, running
from tests.engine.paged_fake import expected_tokens
from tests.engine.test_recurrent import PARAMS, prompt


@asynccontextmanager
async def coming(engine: AsyncEngine, estate: Estate) -> AsyncIterator[None]:
    """An estate whose blocks are there, and whose states are on their way until the end."""
    desk, begun, there = engine._estates, asyncio.Event(), asyncio.Event()
    write = desk._write_states

    async def late(coming: Coming, content: BlockBytes) -> None:
        begun.set()
        await there.wait()
        await write(coming, content)

    desk._write_states = late  # type: ignore[method-assign]
    task = asyncio.create_task(engine.import_estate("t", estate, 60))
    await begun.wait()
    yield
    there.set()
    await task
    desk._write_states = write  # type: ignore[method-assign]


async def test_nobody_goes_on_from_a_state_that_is_on_its_way() -> None:
    states = StateSizes(num_slots=14, num_lease_slots=6, interval=24)
    async with running(Setup(states=states, num_lease_blocks=60, max_num_seqs=2, eos=())) as (engine, _):
        parent = await ask(engine, request(prompt(40), PARAMS, retain=Retain(60)))
        estate = await engine.export_estate("t", parent.id)
        engine.forget("t", parent.id)
        engine.scheduler.cache.states.forget_warm()  # blocks of these tokens are still found
        async with coming(engine, estate):
            again = await ask(engine, request(prompt(40), PARAMS))
        assert again.token_ids == parent.token_ids
        tokens = estate.deed.choices[0].token_ids
        child = await ask(engine, request([*tokens, 5], PARAMS, lineage=Lineage(parent.id, 0, len(tokens))))
        assert child.inheritance is not None and child.inheritance.computed_tokens < 4
        engine.forget("t", parent.id)


async def test_states_on_their_way_are_counted() -> None:
    """As those of leases: others move to the host for whoever runs."""
    states = StateSizes(num_slots=5, num_lease_slots=3, interval=100, num_host_slots=1)
    setup = Setup(states=states, num_lease_blocks=60, max_num_seqs=1, eos=())
    async with running(setup) as (there, _), running(setup) as (engine, _):
        estates = []
        for seed in (1, 2):
            parent = await ask(there, request(prompt(4, seed=seed), PARAMS, retain=Retain(60)))
            estates.append(await there.export_estate("t", parent.id))
            there.forget("t", parent.id)
        first, second = (estate.deed.id for estate in estates)
        await engine.import_estate("t", estates[0], 60)  # has the host's slot
        leased = [request(prompt(4, seed=3 + i), PARAMS, retain=Retain(60)) for i in range(2)]
        for one in leased:
            await ask(engine, one)
        tokens = estates[0].deed.choices[0].token_ids
        async with coming(engine, estates[1]):
            child = request([*tokens, 5], PARAMS, lineage=Lineage(first, 0, len(tokens)))
            answer = await ask(engine, child)
            assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, PARAMS.max_tokens)
        for name in (first, second, *(one.id for one in leased)):
            engine.forget("t", name)
