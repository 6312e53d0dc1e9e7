"""The whole engine on a GPU with random weights of known shapes: single stream, decode steps, offline load, start-up.

    python -m benchmarks.gpu_engine [--shapes qwen3-0.6b llama-3.1-8b] [--kv-cache-dtype fp8] [--quantization fp8]
                                    [--load-only | --streams-only] [--context 1024] [--quick] [--json FILE]

Every figure comes with what it is compared to, measured in the same run: the floor of a decode step is the bytes of the
weights, of the KV and of the states that it must move (benchmarks/floors.py) over the read bandwidth that this device
shows.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import logging
import multiprocessing
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.floors import DecodeStep
from benchmarks.model_shapes import GPU_SHAPES, SHAPES, write_model
from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.models.hf_config import parse_hf_config
from bequest.engine.types import OutputMode, Request, SamplingParams
from bequest.engine.watching.observation import StepStats

_SINGLE_STREAMS = 5  # one behind the other; each is a quarter of a second on the small shape


@dataclass
class Busy:
    """An Observer: how long the device worked, and for what."""

    seconds: float = 0.0
    with_prompts: float = 0.0  # of it, in steps that computed prompts
    prompt_steps: int = 0
    other_steps: int = 0

    def on_step(self, stats: StepStats) -> None:
        self.seconds += stats.seconds
        if stats.prompt_tokens > 0:
            self.with_prompts += stats.seconds
            self.prompt_steps += 1
        else:
            self.other_steps += 1

    def on_finish(self, stats: object) -> None:
        pass

    def forget(self) -> None:
        self.seconds = self.with_prompts = 0.0
        self.prompt_steps = self.other_steps = 0


def read_bandwidth() -> float:
    """Bytes per second of summing 8 GiB, the best of five."""
    data = torch.empty(4 << 30, dtype=torch.bfloat16, device="cuda").fill_(1.0).view(torch.int32)
    best = 0.0
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.max()
        end.record()
        end.synchronize()
        best = max(best, data.nbytes / (start.elapsed_time(end) / 1e3))
    return best


def tokens(count: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1000, 30000) for _ in range(count))


async def run_requests(built: Built, jobs: list[tuple[int, int]], salt: str) -> float:
    """Seconds for all (prompt length, output length) jobs at once."""

    async def one(i: int, prompt_len: int, output_len: int) -> None:
        params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
        request = Request(f"{salt}-{i}", "bench", tokens(prompt_len, hash((salt, i))), params, output=OutputMode.FINAL)
        async for _ in built.engine.generate(request):
            pass

    started = time.perf_counter()
    await asyncio.gather(*(one(i, *job) for i, job in enumerate(jobs)))
    return time.perf_counter() - started


async def decode_rate(built: Built, batch: int, context: int, steps: int, salt: str) -> float:
    """Seconds per decode step of `batch` sequences: the difference of a long and a short run on the same prompts."""
    short = await run_requests(built, [(context, 8)] * batch, salt)  # also fills the prefix cache
    short = await run_requests(built, [(context, 8)] * batch, salt)
    long = await run_requests(built, [(context, 8 + steps)] * batch, salt)
    return (long - short) / steps


async def replay_times(built: Built) -> dict[str, float]:
    """Milliseconds of decode graphs over padding: all of a step but attention, experts and the engine around it."""
    runner: Any = built.engine._device._runner._runner  # of the one that can sleep
    figures = {}
    for size, captured in runner._graphs.items():
        if size.prefill or not size.merges or size.num_tokens not in (1, 32, 256):
            continue
        with torch.cuda.stream(runner._stream):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            runner._stage_padding(size)
            captured.graph.replay()
            start.record()
            for _ in range(20):
                captured.graph.replay()
            end.record()
            end.synchronize()
        figures[f"graph_{size.num_tokens}_ms"] = start.elapsed_time(end) / 20
    return figures


@dataclass(frozen=True)
class Trial:
    shape: str
    kv_cache_dtype: Any
    quantization: Any
    quick: bool
    bandwidth: float
    process_began: float
    load_only: bool = False
    streams_only: bool = False
    context: int = 1024  # of the steps that are timed


async def measure(trial: Trial, directory: Path) -> dict[str, Any]:
    shape, quick = trial.shape, trial.quick
    figures: dict[str, Any] = {"shape": shape, "kv_cache_dtype": trial.kv_cache_dtype}
    figures["quantization"] = trial.quantization
    busy = Busy()
    config = EngineConfig(
        model=str(directory),
        load_format="dummy",
        max_model_len=2560,
        max_num_seqs=256,
        device="cuda",
        kv_cache_dtype=trial.kv_cache_dtype,
        quantization=trial.quantization,
    )
    built = await build_engine(config, busy)  # type: ignore[arg-type]
    await run_requests(built, [(16, 1)], "first")
    figures["start_to_first_token_seconds"] = time.time() - trial.process_began
    if not trial.load_only:
        figures |= await measure_streams(built, trial, busy)
    if trial.streams_only:
        await built.engine.stop()
        return figures
    count, prompt_len, output_len = SHAPES[shape].load
    count = count // 4 if quick else count
    busy.forget()
    seconds = await run_requests(built, [(prompt_len, output_len)] * count, "load")
    figures["load_gpu_busy_share"] = busy.seconds / seconds
    figures["load_share_of_steps_with_prompts"] = busy.with_prompts / seconds
    figures["load_prompt_steps"], figures["load_other_steps"] = busy.prompt_steps, busy.other_steps
    figures["load"] = f"{count} × ({prompt_len}, {output_len})"
    figures["load_tokens_per_second"] = count * output_len / seconds
    await built.engine.stop()
    return figures


async def measure_streams(built: Built, trial: Trial, busy: Busy) -> dict[str, float]:
    """Steps of 1 and 32 sequences, and a single stream."""
    figures = await replay_times(built)
    config = parse_hf_config(SHAPES[trial.shape].config, trial.shape)
    for batch in (1, 32):
        seconds = await decode_rate(built, batch, trial.context, 64 if trial.quick else 256, f"decode{batch}")
        kv_itemsize = 2 if trial.kv_cache_dtype == "auto" else 1
        codes = trial.quantization != "auto"
        least = DecodeStep(batch, trial.context + 64, 2, kv_itemsize, in_codes=codes)
        floor = least.bytes(config) / trial.bandwidth
        figures[f"decode_{batch}_ms"] = seconds * 1e3
        figures[f"decode_{batch}_over_floor"] = seconds / floor
    busy.forget()
    seconds = [await run_requests(built, [(512, 512)], f"single{turn}") for turn in range(_SINGLE_STREAMS)]
    figures["single_stream_tokens_per_second"] = 512 / statistics.median(seconds)
    figures["single_stream_least_tokens_per_second"] = 512 / max(seconds)
    figures["single_stream_most_tokens_per_second"] = 512 / min(seconds)
    figures["single_stream_gpu_busy_share"] = busy.seconds / sum(seconds)
    return figures


def in_own_process(trial: Trial) -> dict[str, Any]:
    """Start-up counts from the start of a process, and an engine has its GPU to itself."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_shape, (trial,))


def _measure_shape(trial: Trial) -> dict[str, Any]:
    logging.basicConfig(level="INFO", format="%(message)s")
    faulthandler.dump_traceback_later(240, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(trial.shape, Path(folder) / trial.shape)
        return asyncio.run(measure(trial, directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=GPU_SHAPES, choices=list(SHAPES))
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--quantization", choices=["auto", "fp8"], default="auto")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--load-only", action="store_true", help="start-up and offline load, no single streams")
    either.add_argument("--streams-only", action="store_true", help="no offline load")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the steps that are timed")
    parser.add_argument("--quick", action="store_true", help="a quarter of the load, for a first look")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")
    bandwidth = read_bandwidth()
    torch.cuda.empty_cache()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    results = []
    for shape in options.shapes:
        formats = options.kv_cache_dtype, options.quantization
        parts = (options.load_only, options.streams_only, options.context)
        trial = Trial(shape, *formats, options.quick, bandwidth, time.time(), *parts)
        results.append(in_own_process(trial))
        for name, value in results[-1].items():
            print(f"  {name:36} {value:,.3f}" if isinstance(value, float) else f"  {name:36} {value}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"bandwidth": bandwidth, "engines": results}, indent=2))


if __name__ == "__main__":
    main()
