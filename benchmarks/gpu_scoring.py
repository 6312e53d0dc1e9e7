"""Scoring 64 suffixes of a resident parent: in one request, and as 64 requests for log-probabilities of whole prompts.

    python -m benchmarks.gpu_scoring [--shape qwen3-0.6b] [--suffixes 64] [--parent 704]

Random weights of a known shape. Both ways in one run on one engine, medians; the scores are compared as well.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.model_shapes import SHAPES, write_model
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Delta, Lineage, OutputMode, Request, Retain, SamplingParams, Terms

ROUNDS = 12


async def last_delta(engine: AsyncEngine, request: Request) -> Delta:
    async for delta in engine.generate(request):
        if delta.finished:
            return delta
    raise AssertionError("a stream ends with a finished delta")


async def measure(shape: str, num_suffixes: int, parent_len: int) -> None:
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(shape, Path(folder) / "model")
        engine = (
            await build_engine(EngineConfig(model=str(directory), load_format="dummy", max_model_len=4096))
        ).engine
        prompt = tuple(draw.randrange(1000, 30000) for _ in range(parent_len))
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        parent = Request("p", "t", prompt, params, output=OutputMode.FINAL, terms=Terms(retain=Retain(600.0)))
        tokens = (*prompt, *(await last_delta(engine, parent)).choices[0].token_ids)
        suffixes = tuple(tuple(draw.randrange(1000, 30000) for _ in range(3)) for _ in range(num_suffixes))
        terms, whole, steps = Terms(lineage=Lineage("p", 0, len(tokens)), keep_record=False), [], []
        scores: list[list[float]] = []
        for number in range(ROUNDS):
            asked = Request(
                f"s{number}",
                "t",
                tokens,
                SamplingParams(max_tokens=0, logprobs=0),
                output=OutputMode.FINAL,
                terms=terms,
                suffixes=suffixes,
            )
            before, start = engine.num_steps, time.perf_counter()
            delta = await last_delta(engine, asked)
            whole.append(time.perf_counter() - start)
            steps.append(engine.num_steps - before)
            scores = [[one.logprob for one in choice.logprobs or ()] for choice in delta.choices]
        apart, singles, alone = [], [], Terms(keep_record=False)
        for number in range(2):
            params = SamplingParams(max_tokens=0, prompt_logprobs=0)
            asked_apart = [
                Request(f"a{number}-{i}", "t", (*tokens, *suffix), params, output=OutputMode.FINAL, terms=alone)
                for i, suffix in enumerate(suffixes)
            ]
            start = time.perf_counter()
            deltas = await asyncio.gather(*(last_delta(engine, request) for request in asked_apart))
            apart.append(time.perf_counter() - start)
            told = [delta.prompt_logprobs or () for delta in deltas]
            singles = [[one.logprob for one in part[len(tokens) :] if one is not None] for part in told]
        await engine.stop()
    difference = float(np.abs(np.asarray(scores) - np.asarray(singles)).max())
    print(f"{shape}: {num_suffixes} suffixes of a parent of {len(tokens)} tokens, steps of each: {sorted(set(steps))}")
    print(f"one request {statistics.median(whole) * 1e3:.1f} ms, separate ones {min(apart) * 1e3:.1f} ms")
    print(f"largest difference of a log-probability: {difference:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--suffixes", type=int, default=64)
    parser.add_argument("--parent", type=int, default=704)
    options = parser.parse_args()
    asyncio.run(measure(options.shape, options.suffixes, options.parent))


if __name__ == "__main__":
    main()
