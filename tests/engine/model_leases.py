"""A trial of leases with a real runner, on whichever device: their KV goes to the host and comes back as it was."""

from __future__ import annotations

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.types import Lineage, Retain, SamplingParams
from tests.engine.harness import ask, ask_all, request

FLOOD = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)


async def check_leases_survive(config: EngineConfig) -> None:
    """REQUIRES: a cache of about 40 blocks of 16 tokens and a host pool, so that a flood moves the leases there."""
    built = await build_engine(config)
    engine = built.engine
    try:
        prompts = [[5 + (7 * i + j) % 80 for j in range(20 + 3 * i)] for i in range(4)]
        parents = [await ask(engine, request(prompt, GREEDY, retain=Retain(600))) for prompt in prompts]
        for i in range(6):
            await ask_all(
                engine, [request([6 + i + k, *[9 + (i + j) % 70 for j in range(60)]], FLOOD) for k in range(6)]
            )
        sources = set()
        for prompt, parent in zip(prompts, parents, strict=True):
            whole = [*prompt, *parent.token_ids[0], 11, 12, 13]
            lineage = Lineage(parent.id, 0, len(whole) - 3)
            child = await ask(engine, request(whole, GREEDY, lineage=lineage))
            fresh = await ask(engine, request(whole, GREEDY, cache_salt="apart"))
            assert child.inheritance is not None and child.inheritance.computed_tokens == 4
            assert child.token_ids == fresh.token_ids
            assert max(abs(a - b) for a, b in zip(child.logprobs, fresh.logprobs, strict=True)) < 1e-3
            sources.add(child.inheritance.source)
            engine.forget("t", parent.id)
        assert "host" in sources and sources <= {"host", "blocks"}
        assert await engine.drain(10)
    finally:
        await engine.stop()
    engine.scheduler.check_idle()
