"""Adapters on a GPU beside the same work without them: random weights and random adapters of a known shape.

    python -m benchmarks.gpu_adapters [--shape llama-3.1-8b] [--context 128 1024] [--rank 16] [--large-rank 38]
                                      [--adapters 64] [--turns 3] [--crowds-only] [--json FILE]

Decode steps of as many sequences as there are adapters, each with one of its own, and of all with the same one; a
single stream; and the gaps between tokens of those sequences while one more adapter is loaded. The longer the context,
the more bytes of the cache are beside those of adapters. Prompts are computed once, without adapters, and all crowds
read what that left in the cache: a step moves the same bytes, whatever is in them. Ratios are of times of the same run,
which takes turns with and without adapters. A step counts if it makes a token for every stream and computes no prompt,
behind such a one. `floor` is the ratio that the bytes alone would allow: those of weights and cache over those and the
adapters'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.floors import DecodeStep
from benchmarks.gpu_engine import tokens
from benchmarks.model_shapes import SHAPES, write_model
from benchmarks.random_adapters import write_adapter
from bequest.engine.build import build_engine
from bequest.engine.cache import salt
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.models.hf_config import parse_hf_config
from bequest.engine.types import OutputMode, Request, SamplingParams
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.watching.observation import StepStats

STEPS = 96


def share_prompts() -> None:
    """The parts of the prefix index that adapters have for themselves become one."""
    own = salt.pack_salt

    def of_all(tenant: str, cache_salt: str, encoder: EncoderInput | None = None, _: AdapterRef | None = None) -> bytes:
        return own(tenant, cache_salt, encoder)

    salt.pack_salt = of_all


def write_copies(first: Path, count: int) -> list[str]:
    """As `--lora` takes them: the same file many times is as good as others."""
    entries = [f"a0={first}"]
    for i in range(1, count):
        directory = first.parent / f"a{i}"
        directory.mkdir()
        for file in first.iterdir():
            os.link(file, directory / file.name)
        entries.append(f"a{i}={directory}")
    return entries


async def stream(engine: AsyncEngine, name: str, prompt: tuple[int, ...], length: int, salt: str) -> list[float]:
    """The moments at which its tokens came."""
    params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
    adapter = engine.adapters.find(name) if name else None
    request = Request(f"{salt}-{prompt[:2]}-{name}", "bench", prompt, params, output=OutputMode.DELTA, adapter=adapter)
    return [time.perf_counter() async for _ in engine.generate(request)]


class Steps:
    """An Observer: when steps were applied, and what they made."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int, int]] = []

    def on_step(self, stats: StepStats) -> None:
        self._seen.append((time.perf_counter(), stats.generated_tokens, stats.prompt_tokens))

    def on_finish(self, stats: object) -> None:
        pass

    def forget(self) -> None:
        self._seen.clear()

    def seconds_of(self, count: int) -> float:
        """The mean, of steps that made a token for each of `count` streams and computed no prompt, behind such ones."""
        full = [(made, prompt) == (count, 0) for _, made, prompt in self._seen]
        pairs = zip(pairwise(self._seen), pairwise(full), strict=True)
        between = [now[0] - last[0] for (last, now), both in pairs if all(both)]
        assert len(between) >= STEPS // 2, f"{len(between)} steps of {count} streams"
        return statistics.fmean(between)


@dataclass(frozen=True)
class Bench:
    engine: AsyncEngine
    steps: Steps

    async def ask(self, names: list[str], context: int, length: int, salt: str) -> None:
        prompts = (tokens(context, i) for i in range(len(names)))
        await asyncio.gather(*(stream(self.engine, n, p, length, salt) for n, p in zip(names, prompts, strict=True)))

    async def step_seconds(self, names: list[str], context: int, salt: str) -> float:
        """Of a decode step of streams whose prompts are in the cache."""
        await self.ask(names, context, 4, f"{salt}-first")
        self.steps.forget()
        await self.ask(names, context, 8 + STEPS, f"{salt}-long")
        return self.steps.seconds_of(len(names))

    async def measure(self, crowds: dict[str, list[str]], context: int, turns: int) -> dict[str, float]:
        """Medians in milliseconds, by turns."""
        seen: dict[str, list[float]] = {what: [] for what in crowds}
        for turn in range(turns):
            for what, names in crowds.items():
                seen[what].append(await self.step_seconds(names, context, f"{context}-{what}-{turn}"))
        return {what: 1e3 * statistics.median(times) for what, times in seen.items()}


async def gaps(engine: AsyncEngine, names: list[str], salt: str, load: Path | None) -> tuple[float, float, float]:
    """The median and the 99th percentile between tokens in milliseconds; how long the load took, in seconds."""

    async def load_one() -> float:
        await asyncio.sleep(0.8)
        if load is None:
            return 0.0
        started = time.perf_counter()
        await engine.adapters.load("large", load)
        return time.perf_counter() - started

    streams = [stream(engine, name, tokens(64, i), 400, salt) for i, name in enumerate(names)]
    loading = asyncio.create_task(load_one())
    moments = await asyncio.gather(*streams)
    between = sorted(1e3 * (b - a) for one in moments for a, b in pairwise(one[8:]))
    if load is not None:
        await loading
        engine.adapters.unload("large")
    return statistics.median(between), between[len(between) * 99 // 100], await loading


class Figures(dict[str, Any]):
    """Shown as they come: a run that is cut short has told what it has."""

    def tell(self, more: dict[str, Any]) -> None:
        for name, value in more.items():
            print(f"  {name:60} {value:,.3f}" if isinstance(value, float) else f"  {name:60} {value}", flush=True)
        self.update(more)


async def measure(options: argparse.Namespace, folder: Path) -> Figures:
    shape, count = SHAPES[options.shape], options.adapters
    size = write_adapter(folder / "adapters" / "a0", shape.config, options.rank)
    config = EngineConfig(
        model=str(write_model(options.shape, folder / options.shape)),
        load_format="dummy",
        device="cuda",
        max_model_len=max(1024, *options.context) + 1024,
        max_num_seqs=count,
        lora=write_copies(folder / "adapters" / "a0", count),
        lora_slots=count + 1,
        max_loras=count + 1,
        max_lora_rank=max(options.rank, options.large_rank),
    )
    share_prompts()
    steps = Steps()
    bench = Bench((await build_engine(config, steps)).engine, steps)
    figures = Figures()
    figures.tell({"shape": options.shape, "adapters": count, "rank": options.rank, "MB": size / 1e6})
    none, each, same = [""] * count, [f"a{i}" for i in range(count)], ["a0"] * count
    described = parse_hf_config(shape.config, options.shape)
    for context in options.context:
        crowds = {"none": none, "each its own": each, "all the same": same}
        crowd = await bench.measure(crowds, context, options.turns)
        read = DecodeStep(count, context + STEPS // 2).bytes(described)
        told: dict[str, Any] = {f"{what}, ms": value for what, value in crowd.items()}
        told |= {f"{what}, of none": crowd["none"] / value for what, value in crowd.items() if what != "none"}
        told["floor"] = read / (read + count * size)
        figures.tell({f"{count} streams at {context}: {what}": value for what, value in told.items()})
    if not options.crowds_only:
        size = await asyncio.to_thread(write_adapter, folder / "large", shape.config, options.large_rank)
        figures.tell(await measure_others(bench, options, each, folder / "large", size))
    await bench.engine.stop()
    return figures


async def measure_others(
    bench: Bench, options: argparse.Namespace, each: list[str], load: Path, size: int
) -> dict[str, Any]:
    """A single stream, and a load beside the crowd."""
    alone = await bench.measure({"none": [""], "one": ["a0"]}, 128, options.turns)
    figures: dict[str, Any] = {f"a single stream: {what}, ms": value for what, value in alone.items()}
    figures["a single stream: one, of none"] = alone["none"] / alone["one"]
    still = await gaps(bench.engine, each, "still", None)
    loading = await gaps(bench.engine, each, "loading", load)
    figures["between tokens: median, p99, ms"] = [round(value, 3) for value in still[:2]]
    figures[f"between tokens while {size / 1e6:.0f} MB load: median, p99, ms"] = [round(v, 3) for v in loading[:2]]
    figures["seconds of the load"] = loading[2]
    figures["p99 while loading, of p99"] = loading[1] / still[1]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--large-rank", type=int, default=38)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--crowds-only", action="store_true", help="no single stream, no load beside others")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
