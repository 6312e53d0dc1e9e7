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


async def check_states_survive(config: EngineConfig) -> None:
    """Leases of a hybrid whose states go to the host and come back, ten times over: children equal fresh requests.

    REQUIRES: a model with recurrent layers, two sequences at once and a host pool"""
    engine = (await build_engine(config)).engine
    try:
        prompts = [[5 + (7 * i + j) % 80 for j in range(20 + 3 * i)] for i in range(6)]
        parents = [await ask(engine, request(prompt, GREEDY, retain=Retain(600))) for prompt in prompts]
        states = engine.snapshot().states
        assert states is not None and states.total == 8 and states.on_host >= 4
        for turn in range(10):
            flood = [[6 + turn + k, *[9 + (turn + j) % 70 for j in range(60)]] for k in range(2)]
            await ask_all(engine, [request(prompt, FLOOD) for prompt in flood])
            # The one that was used last, and the one that waited longest.
            for number in (turn % len(parents), (turn + 1) % len(parents)):
                prompt, parent = prompts[number], parents[number]
                whole = [*prompt, *parent.token_ids[0], 11 + turn, 12, 13]
                child = await ask(engine, request(whole, GREEDY, lineage=Lineage(parent.id, 0, len(whole) - 3)))
                fresh = await ask(engine, request(whole, GREEDY, cache_salt=f"apart {turn}"))
                assert child.inheritance is not None and child.inheritance.computed_tokens == 4
                assert child.inheritance.source in ("blocks", "host")
                assert child.token_ids == fresh.token_ids
                assert max(abs(a - b) for a, b in zip(child.logprobs, fresh.logprobs, strict=True)) < 1e-3
        for parent in parents:
            engine.forget("t", parent.id)
        states = engine.snapshot().states
        assert states is not None and states.held == states.on_host == 0
        assert await engine.drain(10)
    finally:
        await engine.stop()
    engine.scheduler.check_idle()
