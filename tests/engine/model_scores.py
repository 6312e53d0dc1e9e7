"""Scores of suffixes on a real model, beside one request for each of them with log-probabilities of its prompt."""

from __future__ import annotations

import random

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import ChoiceDelta, Delta, Lineage, OutputMode, Request, Retain, SamplingParams, Terms

NUM_SUFFIXES = 64


async def last_delta(engine: AsyncEngine, request: Request) -> Delta:
    async for delta in engine.generate(request):
        if delta.finished:
            return delta
    raise AssertionError("a stream ends with a finished delta")


async def scores_and_singles(config: EngineConfig) -> tuple[list[ChoiceDelta], list[list[float]], int]:
    """Scores behind a leased parent, the log-probabilities of whole prompts, and the steps that scoring took."""
    draw = random.Random(5)
    engine = (await build_engine(config)).engine
    try:
        prompt = tuple(draw.randrange(10, 60) for _ in range(21))
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        parent = Request("p", "t", prompt, params, output=OutputMode.FINAL, terms=Terms(retain=Retain(60.0)))
        answer = (await last_delta(engine, parent)).choices[0].token_ids
        tokens = (*prompt, *answer)
        suffixes = tuple(tuple(draw.randrange(10, 60) for _ in range(1 + i % 4)) for i in range(NUM_SUFFIXES))
        asked = Request(
            "s",
            "t",
            tokens,
            SamplingParams(max_tokens=0, logprobs=2),
            output=OutputMode.FINAL,
            terms=Terms(lineage=Lineage("p", 0, len(tokens))),
            suffixes=suffixes,
        )
        before = engine.num_steps
        scored = list((await last_delta(engine, asked)).choices)
        num_steps = engine.num_steps - before
        singles = [await single(engine, f"r{i}", tokens, suffix) for i, suffix in enumerate(suffixes)]
    finally:
        await engine.stop()
    return scored, singles, num_steps


async def single(engine: AsyncEngine, name: str, tokens: tuple[int, ...], suffix: tuple[int, ...]) -> list[float]:
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    told = (await last_delta(engine, Request(name, "t", (*tokens, *suffix), params))).prompt_logprobs
    assert told is not None
    return [one.logprob for one in told[len(tokens) :] if one is not None]
