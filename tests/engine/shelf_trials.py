"""What holds for leases wherever they are kept; tests run it for each place."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import ParentLost, ParentNotFound
from bequest.engine.types import SamplingParams
from tests.engine.harness import ask, ask_all, request, running, until
from tests.engine.paged_fake import expected_tokens
from tests.engine.shelves import Shelves
from tests.engine.test_estates import child_of
from tests.engine.test_vault import LASTING, SETUP, a_lease, check_child, mutated


@asynccontextmanager
async def engine_on(shelves: Shelves) -> AsyncIterator[AsyncEngine]:
    """Its end leaves the leases there."""
    async with running(SETUP) as (engine, _):
        await engine.open_files(shelves.open(), 20.0)
        try:
            yield engine
            assert await engine.drain(20)
        finally:
            for record in engine.retention.leases.holders():
                engine.retention.leases.end(record)
    engine._vault._writer.shutdown()  # type: ignore[union-attr]  # it has closed the shelf


async def outlives_its_process(shelves: Shelves) -> None:
    async with engine_on(shelves) as engine:
        parent, answer = await a_lease(engine, 30, name="mine", cache_salt="s")
        assert answer.retained is not None and answer.retained.durable
    async with engine_on(shelves) as engine:
        assert engine.record("t", "mine").grade == "stored"
        await check_child(engine, parent.id, "file")
        await check_child(engine, parent.id, "blocks")
        engine.set_ttl("t", parent.id, 5000)
        await until(lambda: shelves.num_leases() == 1)
    async with engine_on(shelves) as engine:
        expires_at = engine.record("t", parent.id).expires_at
        assert expires_at is not None and 4900 < expires_at - time.time() <= 5000
        await check_child(engine, "mine", "file")
        engine.forget("t", parent.id)
        await until(lambda: shelves.is_empty)


async def stores_shared_blocks_once(shelves: Shelves) -> None:
    async with engine_on(shelves) as engine:
        asked = SamplingParams(max_tokens=6, n=3, temperature=1, seed=3, ignore_eos=True)
        parent = request([3] * 18, asked, retain=LASTING)
        await ask(engine, parent)
        block, size = engine._device.block_layout.num_bytes, shelves.num_bytes()
        child = child_of(engine, parent.id, [5] * 8, choice=1, retain=LASTING)
        await ask(engine, child)
        assert size == (4 + 3 * 2) * block
        more = shelves.num_bytes() - size
        assert more == (-(-(18 + 6 + 8 + 5) // 4) - 5) * block, "five whole blocks are the parent's"
        engine.forget("t", parent.id)
    async with engine_on(shelves) as engine:
        with pytest.raises(ParentNotFound):
            engine.parent("t", parent.id)
        await check_child(engine, child.id, "file")
        engine.forget("t", child.id)
        await until(lambda: shelves.is_empty)


async def serves_a_crowd(shelves: Shelves) -> None:
    async with engine_on(shelves) as engine:
        parents = [(await a_lease(engine, 10 + 3 * i))[0] for i in range(5)]
    async with engine_on(shelves) as engine:
        children = [child_of(engine, parent.id, [i, 5]) for i in range(4) for parent in parents]
        for asked, answer in zip(children, await ask_all(engine, children), strict=True):
            assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, 6)
            assert answer.inheritance is not None and answer.inheritance.computed_tokens == 3


async def refuses_what_is_broken(shelves: Shelves, how: str) -> None:
    async with engine_on(shelves) as engine:
        parent, _ = await a_lease(engine)
    data = bytearray(shelves.look("blocks"))
    data[len(data) // 2] ^= 4
    shelves.change("blocks", {"gone": None, "cut": bytes(data[:-1])}.get(how, bytes(data)))
    async with engine_on(shelves) as engine:
        with pytest.raises(ParentLost):
            await ask(engine, child_of(engine, parent.id, [7]))
        engine.forget("t", parent.id)
        await until(lambda: shelves.is_empty)


async def refuses_broken_manifests(shelves: Shelves, count: int) -> None:
    async with engine_on(shelves) as engine:
        parent, _ = await a_lease(engine, name="mine")
    whole, draw = shelves.look("leases"), random.Random(5)
    for _ in range(count):
        shelves.change("leases", whole[:8] + mutated(whole[8:], draw))  # behind the time, where there is one
        async with engine_on(shelves) as engine:
            with pytest.raises(ParentLost):
                engine.parent("t", parent.id)


async def leaves_others_alone(shelves: Shelves) -> None:
    """Leases of another layout are not continued."""
    async with engine_on(shelves) as engine:
        parent, _ = await a_lease(engine)
    async with running(replace(SETUP, block_size=8)) as (engine, _):
        await engine.open_files(shelves.open(), 20.0)
        with pytest.raises(ParentNotFound):
            engine.parent("t", parent.id)
        assert not engine.records("t")
