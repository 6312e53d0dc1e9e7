"""What a snapshot says of blocks and requests agrees with the pools."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bequest.engine.types import Retain, SamplingParams
from bequest.engine.watching.block_map import FREE, IN_USE, LEASED, NO_GROUP, NOBODY, SHARED, STORED, WARM
from tests.engine.harness import Setup, ask, request, running, until
from tests.engine.test_vault import a_lease, vault

LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)


async def test_kinds_of_blocks() -> None:
    async with running(Setup(num_blocks=200, block_size=4, num_lease_blocks=50)) as (engine, _):
        blocks = engine.snapshot().map.device
        assert (blocks.kinds == FREE).all() and len(blocks.kinds) == 199 and (blocks.owners == NOBODY).all()
        leased = await ask(engine, request(range(20, 40), retain=Retain(60.0)))
        assert leased.retained is not None
        assert (engine.snapshot().map.device.kinds == LEASED).sum() == leased.retained.blocks
        two = SamplingParams(max_tokens=300, n=2, temperature=0, ignore_eos=True)
        asked = request(range(100, 120), two, name="mine")
        engine.submit(asked, lambda _: None)
        await until(lambda: engine.snapshot().requests[0].generated_tokens >= 2)
        snapshot = engine.snapshot()
        counts = np.bincount(snapshot.map.device.kinds, minlength=6)
        assert counts[SHARED] >= 4 and counts[IN_USE] >= 2 and counts[LEASED] == leased.retained.blocks
        assert counts[IN_USE] + counts[SHARED] + counts[LEASED] == engine.scheduler.pool.num_used
        for number, kind in enumerate(snapshot.map.device.kinds.tolist(), 1):
            assert (engine.scheduler.pool.ref_count(number) > 0) == (kind > WARM)
        [shown] = snapshot.requests
        assert (shown.id, shown.name, shown.status, shown.sequences) == (asked.id, "mine", "running", 2)
        assert shown.prompt_tokens == 20 and shown.generated_tokens >= 2 and shown.blocks > 10
        assert snapshot.states is None and snapshot.leased_states == 0
        engine.abort(asked.id)


async def test_what_an_answer_leaves_is_warm_and_its_tenants() -> None:
    async with running(Setup(num_blocks=200, block_size=4)) as (engine, _):
        for tenant, first in (("a", 20), ("b", 60)):
            await ask(engine, request(range(first, first + 20), tenant=tenant))
        blocks = engine.snapshot().map
        assert blocks.tenants == ("b", "a"), "the latest first"
        for number, tenant in enumerate(blocks.tenants):
            [record] = engine.scheduler.retention.of(tenant)
            own = blocks.device.owners == number
            assert own.sum() == record.num_left_blocks(engine.scheduler.pool) >= 5
            assert (blocks.device.kinds[own] == WARM).all()
        # The last, partly filled block of an answer is known by its record alone.
        known = {int(block) for block, _ in engine.scheduler.pool.indexed_blocks()}
        assert known < {int(i) + 1 for i in np.flatnonzero(blocks.device.kinds == WARM)}


async def test_what_nobody_recorded_is_warm_by_the_index() -> None:
    async with running(Setup(num_blocks=200, block_size=4)) as (engine, _):
        await ask(engine, request(range(20, 40), keep_record=False))
        blocks = engine.snapshot().map
        assert blocks.tenants == () and (blocks.device.owners == NOBODY).all()
        assert (blocks.device.kinds == WARM).sum() == engine.scheduler.pool.num_indexed >= 5


async def test_a_lease_in_files_is_stored(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        _, answer = await a_lease(engine)
        assert answer.retained is not None and answer.retained.durable
        kinds = engine.snapshot().map.device.kinds
        assert (kinds == STORED).sum() == answer.retained.blocks and not (kinds == LEASED).any()


async def test_the_host_and_the_queue() -> None:
    setup = Setup(num_blocks=60, block_size=4, num_host_blocks=100, num_lease_blocks=10, max_num_seqs=2)
    async with running(setup) as (engine, _):
        for start in (20, 220):
            await ask(engine, request(range(start, start + 40), retain=Retain(60.0)))
        for number in range(3):
            engine.submit(request(range(500 + number, 600 + number), LONG), lambda _: None)
        await until(lambda: engine.scheduler.cache.host.num_used > 0)
        snapshot = engine.snapshot()
        assert (snapshot.map.host.kinds != FREE).sum() == engine.scheduler.cache.host.num_used
        assert len(snapshot.map.host.kinds) == 99
        assert "waiting" in {shown.status for shown in snapshot.requests}
        for shown in snapshot.requests:
            engine.abort(shown.id)


async def test_groups_of_blocks() -> None:
    """Of layers that see all tokens, and of two strips with a window: held ones, on the host too, and warm ones."""
    windows = (0, 6, 6)
    setup = Setup(num_blocks=48, num_host_blocks=100, num_lease_blocks=20, windows=windows, chunk=8, max_model_len=96)
    async with running(setup) as (engine, _):
        await ask(engine, request(range(20, 60), retain=Retain(600.0)))
        for first in range(100, 900, 80):  # which has the lease move
            await ask(engine, request(range(first, first + 80), keep_record=False))
        engine.submit(asked := request(range(60, 90), SamplingParams(max_tokens=60, ignore_eos=True)), lambda _: None)
        await until(lambda: engine.snapshot().requests[0].generated_tokens >= 2)
        blocks, pool = engine.snapshot().map, engine.scheduler.pool
        assert blocks.windows == (0, 6)
        tables = [record.tables() for record in engine.scheduler.retention.leases.holders()]
        tables.append(sequence.table for sequence in engine._groups[asked.id].sequences)
        entries = [(entry, i) for each in tables for table in each for i, entry in enumerate(table.entries) if entry]
        held = pool.indexed_blocks().tolist()
        assert any(entry < 0 for entry, _ in entries) and held
        for entry, strip in [(entry, i % len(windows)) for entry, i in entries] + held:
            field = blocks.device if entry > 0 else blocks.host
            assert field.groups[abs(entry) - 1] == (0 if strip == 0 else 1)
        assert ((blocks.device.groups == NO_GROUP) >= (blocks.device.kinds == FREE)).all()
        engine.abort(asked.id)
