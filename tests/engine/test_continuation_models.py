"""Real kernels: a continuation's tokens and log-probabilities are, to the bit, those of one fresh request with the same
tokens: from blocks, from the host, from a running parent, at block boundaries and beside them. All in float32."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Inheritance, Lineage, Request, Retain, SamplingParams, TokenLogprob
from tests.engine.harness import ask_all, request
from tests.tiny_models import VOCAB_SIZE

MAX_LEN = 96
# Beside the longest request there is room for a few blocks of leases; the rest goes to the host.
SCENARIOS = {
    "ample": {"block_size": 4, "num_blocks": 600, "max_num_batched_tokens": 64},
    "tiny": {"block_size": 4, "num_blocks": 34, "max_num_batched_tokens": 64},
    "tiny-plain": {"block_size": 8, "num_blocks": 18, "max_num_batched_tokens": 7, "pipelined": False},
    "tiny-no-prefix": {"block_size": 16, "num_blocks": 9, "enable_prefix_caching": False},
}
INTERVAL = 8  # of states
LENGTHS = (1, 3, 8, 15, 16, 17, 33)
Told = tuple[list[int], list[TokenLogprob], Inheritance | None]


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, logprobs=3, ignore_eos=True)


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


async def tell(engine: AsyncEngine, asked: Request) -> Told:
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    inheritance = None
    async for delta in engine.generate(asked):
        inheritance = delta.inheritance or inheritance
        for choice in delta.choices:
            tokens += choice.token_ids
            logprobs += choice.logprobs or ()
    return tokens, logprobs, inheritance


async def compare(engine: AsyncEngine, asked: Request) -> Inheritance:
    """Asks for a continuation, and for the same tokens under another name, where nothing can be inherited. Both at
    once: a step of both takes hardly longer than one of either."""
    alone = request(asked.prompt_token_ids, asked.params, tenant=asked.id, keep_record=False)
    (*child, inheritance), (*fresh, _) = await asyncio.gather(tell(engine, asked), tell(engine, alone))
    assert child == fresh
    assert inheritance is not None
    return inheritance


async def run(config: EngineConfig, pressed: bool, recurrent: bool = False) -> None:
    engine = (await build_engine(config)).engine
    sources = []
    try:
        leases = [request(prompt(length), params(6), retain=Retain(600)) for length in LENGTHS]
        await ask_all(engine, leases)
        for suffix, count, at_end in ((prompt(5), 7, True), ([], 7, True), (prompt(3), 2, False)):
            crowd = [request([i, *prompt(40 + i)], params(12), keep_record=False) for i in range(4)]
            await ask_all(engine, crowd)
            for lease in leases:
                tokens = engine.parent("t", lease.id).choices[0].token_ids
                at = len(tokens) if at_end else len(tokens) // 2 + 1
                lineage = Lineage(lease.id, 0, at)
                told = await compare(engine, request([*tokens[:at], *suffix], params(count), lineage=lineage))
                sources.append(told.source)
                # Recurrent layers go on from the end of the parent, or from the state before a branch.
                more = 0 if at_end or not recurrent else INTERVAL - 1
                assert len(suffix) + at_end <= told.computed_tokens <= len(suffix) + at_end + more
        expected = {"blocks", "host", "recompute"} if recurrent else {"blocks", "host"}
        assert set(sources) <= expected and ("host" in sources) == pressed
        for lease in leases:
            engine.forget("t", lease.id)
        await branch_from_a_running_one(engine)
    finally:
        await engine.stop()
    engine.scheduler.check_idle()


async def branch_from_a_running_one(engine: AsyncEngine) -> None:
    stream = engine.generate(parent := request(prompt(20), params(30)))
    await anext(stream)
    tokens = engine.parent("t", parent.id).choices[0].token_ids
    await compare(engine, request([*tokens, 9], params(5), lineage=Lineage(parent.id, 0, len(tokens))))
    async for _ in stream:
        pass


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "ministral3", "qwen3", "smollm3", "qwen3.5", "qwen3.5-moe", "qwen3-moe", "gemma4-shared"],
)
def test_to_the_bit(name: str, scenario: str, tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(
        model=str(tiny_model(name)),
        device="cpu",
        dtype="float32",
        max_model_len=MAX_LEN,
        host_cache_gb=0.002,
        state_interval=INTERVAL,
        **SCENARIOS[scenario],  # type: ignore[arg-type]
    )
    asyncio.run(run(config, pressed=scenario != "ample", recurrent=name.startswith("qwen3.5")))
