"""What hidden states cost: of a retained parent, with a generation, and beside generations that want none.

    python -m benchmarks.hidden_states [--model PATH | --shape qwen3-0.6b] [--rounds 7] [--json FILE]

On a GPU, or on a CPU with the embedded model; with --shape random weights of that shape.

All through the engine, without HTTP. What is compared is measured in turns, so that a busy machine bears on all of it.

  parent      the last position of a parent of 700 tokens, against the same from the full text
  generation  128 tokens after 64, alone and 8 at once: without states, with the last token's of the last layer, and
              with all sampled tokens' of 5 layers
  beside      generations with pauses between them, alone and while extractions take what is left over
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.model_shapes import SHAPES, write_model
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Delta, Lineage, OutputMode, Request, Retain, SamplingParams, Terms
from bequest.engine.types.hidden import HiddenStatesParams

PARENT_TOKENS = 700
PROMPT, OUTPUT = 64, 128
EXTRACT = SamplingParams(max_tokens=0)
_ids = itertools.count()


@dataclass
class Times:
    """Of one request, in seconds."""

    first: float
    total: float
    gaps: list[float]
    last: Delta


def request(tokens: Sequence[int], params: SamplingParams, **fields: Any) -> Request:
    number = next(_ids)
    # A salt of its own: nothing is found in the prefix index by chance.
    fields = {"cache_salt": f"{number}", "output": OutputMode.DELTA} | fields
    return Request(f"r{number}", "t", tuple(tokens), params, **fields)


async def run(engine: AsyncEngine, asked: Request) -> Times:
    began = time.perf_counter()
    deltas = [(delta, time.perf_counter()) async for delta in engine.generate(asked)]
    at = [when for _, when in deltas]
    return Times(at[0] - began, at[-1] - began, np.diff(at).tolist(), deltas[-1][0])


def some_tokens(draw: random.Random, vocab_size: int, count: int) -> list[int]:
    return [draw.randrange(100, min(vocab_size, 30_000)) for _ in range(count)]


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    p50, p99 = np.percentile(np.asarray(seconds) * 1e3, [50, 99])
    return float(p50), float(p99)


async def of_a_parent(engine: AsyncEngine, draw: random.Random, rounds: int) -> dict[str, Any]:
    last = HiddenStatesParams((engine.info.num_layers,))
    inherited: list[float] = []
    full: list[float] = []
    computed = set()
    for _ in range(rounds):
        params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
        prompt = some_tokens(draw, engine.info.vocab_size, PARENT_TOKENS - 10)
        parent = request(prompt, params, terms=Terms(retain=Retain(600)))
        tokens = list(prompt)
        async for delta in engine.generate(parent):
            tokens += delta.choices[0].token_ids
        assert len(tokens) == PARENT_TOKENS
        terms = Terms(lineage=Lineage(parent.id, 0, PARENT_TOKENS))
        asked = request(tokens, EXTRACT, hidden_states=last, terms=terms, cache_salt=parent.cache_salt)
        times = await run(engine, asked)
        inherited.append(times.total)
        assert times.last.hidden_states is not None
        computed.add(times.last.hidden_states.computed_tokens)
        full.append((await run(engine, request(tokens, EXTRACT, hidden_states=last))).total)
        engine.forget("t", parent.id)
    ratio = median(full) / median(inherited)
    print(f"last position of {PARENT_TOKENS} tokens (p50 / p99 ms)")
    print(
        "  retained parent  {:9.1f} {:9.1f}".format(*percentiles(inherited)), f"  {sorted(computed)} token(s) computed"
    )
    print("  full text        {:9.1f} {:9.1f}".format(*percentiles(full)), f"  {ratio:.1f} x", flush=True)
    return {
        "parent_ms": percentiles(inherited),
        "full_ms": percentiles(full),
        "ratio": ratio,
        "computed": sorted(computed),
    }


def modes(num_layers: int) -> dict[str, HiddenStatesParams | None]:
    five = tuple(sorted({round(i * num_layers / 4) for i in range(5)}))
    return {
        "without": None,
        "last layer, last token": HiddenStatesParams((num_layers,)),
        "5 layers, all sampled": HiddenStatesParams(five, "all"),
    }


async def with_generation(engine: AsyncEngine, draw: random.Random, rounds: int, width: int) -> dict[str, Any]:
    wanted = modes(engine.info.num_layers)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    totals: dict[str, list[float]] = {mode: [] for mode in wanted}
    gaps: dict[str, list[float]] = {mode: [] for mode in wanted}
    for number in range(rounds):
        order = list(wanted)
        order = order[number % len(order) :] + order[: number % len(order)]
        for mode in order:
            prompts = [some_tokens(draw, engine.info.vocab_size, PROMPT) for _ in range(width)]
            asked = [request(prompt, params, hidden_states=wanted[mode]) for prompt in prompts]
            began = time.perf_counter()
            times = await asyncio.gather(*(run(engine, one) for one in asked))
            totals[mode].append(time.perf_counter() - began)
            # The last delivery of a generation with states has no token.
            gaps[mode] += [gap for one in times for gap in one.gaps[: OUTPUT - 1]]
    print(f"{width} generation(s) of {OUTPUT} tokens: p50 s, between tokens p50 / p99 ms, over without: p50, best")
    figures = {}
    for mode in wanted:
        over = median(a / b for a, b in zip(totals[mode], totals["without"], strict=True))
        best = min(totals[mode]) / min(totals["without"])  # what a busy machine disturbs least
        p50, p99 = percentiles(gaps[mode])
        shares = f"{100 * (over - 1):+5.1f} % {100 * (best - 1):+5.1f} %"
        print(f"  {mode:24} {median(totals[mode]):8.3f} {p50:8.2f} {p99:8.2f}   {shares}", flush=True)
        figures[mode] = {"seconds": median(totals[mode]), "gap_ms": [p50, p99], "over": over, "best_over": best}
    return figures


async def beside_generations(engine: AsyncEngine, draw: random.Random, rounds: int) -> dict[str, Any]:
    """Generations one after the other with pauses, alone and with extractions waiting all the time."""
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    firsts: dict[str, list[float]] = {"alone": [], "beside extractions": []}
    gaps: dict[str, list[float]] = {"alone": [], "beside extractions": []}
    extracted, seconds = 0, 0.0
    everything = HiddenStatesParams((engine.info.num_layers,), "all")

    async def extract() -> None:
        nonlocal extracted
        while True:
            tokens = some_tokens(draw, engine.info.vocab_size, 256)
            await run(engine, request(tokens, EXTRACT, hidden_states=everything, terms=Terms(keep_record=False)))
            extracted += len(tokens)

    for _ in range(rounds):
        for mode in firsts:
            began = time.perf_counter()
            tasks = [asyncio.ensure_future(extract()) for _ in range(4 if mode != "alone" else 0)]
            for _ in range(3):
                await asyncio.sleep(0.4)
                times = await run(engine, request(some_tokens(draw, engine.info.vocab_size, PROMPT), params))
                firsts[mode].append(times.first)
                gaps[mode] += times.gaps
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            seconds += time.perf_counter() - began if tasks else 0
    print("generations without states (ms): first token p50 / p99, between tokens p50 / p99")
    figures: dict[str, Any] = {"extracted_tokens_per_s": extracted / seconds}
    for mode in firsts:
        first, gap = percentiles(firsts[mode]), percentiles(gaps[mode])
        print(f"  {mode:20}", "{:9.1f} {:9.1f} {:9.2f} {:9.2f}".format(*first, *gap))
        figures[mode] = {"first_ms": first, "gap_ms": gap}
    print(f"  extracted meanwhile: {extracted / seconds:.0f} tokens/s", flush=True)
    return figures


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = EngineConfig(model=options.model, max_model_len=2048, extraction_share=options.share)
    if options.shape is not None:
        directory = write_model(options.shape, folder / options.shape)
        config = replace(config, model=str(directory), load_format="dummy")
    built = await build_engine(config)
    engine, draw = built.engine, random.Random(options.seed)
    try:
        await run(
            engine, request(some_tokens(draw, engine.info.vocab_size, 600), SamplingParams(max_tokens=16))
        )  # warm
        figures = {"parent": await of_a_parent(engine, draw, options.rounds)}
        for width in (1, 8):
            figures[f"generation {width}"] = await with_generation(engine, draw, options.rounds, width)
        figures["beside"] = await beside_generations(engine, draw, options.rounds)
    finally:
        await engine.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--share", type=float, default=EngineConfig().extraction_share)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
