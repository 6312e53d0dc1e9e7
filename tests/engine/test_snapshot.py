"""What a snapshot says of blocks and requests agrees with the pools."""

from __future__ import annotations

import numpy as np

from bequest.engine.types import Retain, SamplingParams
from bequest.engine.watching.snapshot import FREE, IN_USE, LEASED, SHARED
from tests.engine.harness import Setup, ask, request, running, until

LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)


async def test_kinds_of_blocks() -> None:
    async with running(Setup(num_blocks=200, block_size=4, num_lease_blocks=50)) as (engine, _):
        assert (engine.snapshot().blocks == FREE).all() and len(engine.snapshot().blocks) == 199
        leased = await ask(engine, request(range(20, 40), retain=Retain(60.0)))
        assert leased.retained is not None
        assert (engine.snapshot().blocks == LEASED).sum() == leased.retained.blocks
        two = SamplingParams(max_tokens=300, n=2, temperature=0, ignore_eos=True)
        asked = request(range(100, 120), two, name="mine")
        engine.submit(asked, lambda _: None)
        await until(lambda: engine.snapshot().requests[0].generated_tokens >= 2)
        snapshot = engine.snapshot()
        counts = np.bincount(snapshot.blocks, minlength=4)
        assert counts[SHARED] >= 4 and counts[IN_USE] >= 2 and counts[LEASED] == leased.retained.blocks
        assert len(snapshot.blocks) - counts[FREE] == engine.scheduler.pool.num_used
        for number, kind in enumerate(snapshot.blocks.tolist(), 1):
            assert (engine.scheduler.pool.ref_count(number) > 0) == (kind != FREE)
        [shown] = snapshot.requests
        assert (shown.id, shown.name, shown.status, shown.sequences) == (asked.id, "mine", "running", 2)
        assert shown.prompt_tokens == 20 and shown.generated_tokens >= 2 and shown.blocks > 10
        engine.abort(asked.id)


async def test_the_host_and_the_queue() -> None:
    setup = Setup(num_blocks=60, block_size=4, num_host_blocks=100, num_lease_blocks=10, max_num_seqs=2)
    async with running(setup) as (engine, _):
        for start in (20, 220):
            await ask(engine, request(range(start, start + 40), retain=Retain(60.0)))
        for number in range(3):
            engine.submit(request(range(500 + number, 600 + number), LONG), lambda _: None)
        await until(lambda: engine.scheduler.cache.host.num_used > 0)
        snapshot = engine.snapshot()
        assert (snapshot.host_blocks != FREE).sum() == engine.scheduler.cache.host.num_used
        assert len(snapshot.host_blocks) == 99
        assert "waiting" in {shown.status for shown in snapshot.requests}
        for shown in snapshot.requests:
            engine.abort(shown.id)
