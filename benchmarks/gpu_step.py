"""Where the time of streams goes on a GPU: kernel by kernel, of the steps of an engine with random weights.

    python -m benchmarks.gpu_step [--shape llama-3.1-8b] [--weights auto|fp8|int4] [--kv-cache-dtype fp8]
                                  [--streams 1 64] [--json FILE]

Kernels begin before those ahead have ended, so what counts is the time from the end of one to the end of the next. It
is given for each kernel by its name, with the part of it in which nothing ran, over the number of decode steps. One
stream has its prompt in the prefix cache; several compute theirs, 512 in and 256 out. They are first timed without a
profiler, which makes steps longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu_engine import run_requests
from benchmarks.gpu_int4 import CodesBackend
from benchmarks.model_shapes import SHAPES, write_model
from bequest.engine.backends.cuda import backend
from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig

PROMPT, STEPS = 512, 256


@dataclass
class Share:
    """Of a step."""

    kernel: str
    launches: float = 0.0
    us: float = 0.0  # from the end of what was before
    idle_us: float = 0.0  # of which nothing ran


def shares(events: Iterable[tuple[str, float, float]], steps: int) -> list[Share]:
    """events: name, begin and end in µs, of one device"""
    found: dict[str, Share] = defaultdict(lambda: Share(""))
    last = None
    for name, begin, end in sorted(events, key=lambda event: event[2]):
        share = found[name]
        share.kernel = name
        share.launches += 1 / steps
        if last is not None:
            share.us += max(0.0, end - last) / steps
            share.idle_us += max(0.0, begin - last) / steps
        last = end if last is None else max(last, end)
    return sorted(found.values(), key=lambda share: -share.us)


def device_events(profile: Any) -> list[tuple[str, float, float]]:
    events = profile.profiler.kineto_results.events()
    on_device = (event for event in events if event.device_type().name == "CUDA")
    return [(event.name(), event.start_ns() / 1e3, event.end_ns() / 1e3) for event in on_device]


async def measure(config: EngineConfig, streams: list[int]) -> list[dict[str, Any]]:
    built = await build_engine(config)
    await run_requests(built, [(PROMPT, 64)] * 4, "warm")
    results = [await profile_streams(built, count) for count in streams]
    await built.engine.stop()
    return results


async def profile_streams(built: Built, count: int) -> dict[str, Any]:
    jobs = [(PROMPT, STEPS)] * count
    await run_requests(built, jobs, "profiled" if count == 1 else "before")
    seconds = await run_requests(built, jobs, "profiled" if count == 1 else "timed")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        profiled = await run_requests(built, jobs, "profiled")
        torch.cuda.synchronize()
    return {
        "streams": count,
        "tokens_per_second": count * STEPS / seconds,
        "ms_of_a_step": 1e3 * seconds / STEPS,
        "ms_of_a_profiled_step": 1e3 * profiled / STEPS,
        "shares": [asdict(share) for share in shares(device_events(profile), STEPS)],
    }


def show(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if name != "shares":
            print(f"  {name:36} {value:,.3f}")
    print(f"  {'launches':>8} {'µs':>9} {'idle':>8}  kernel")
    for share in figures["shares"][:24]:
        print(f"  {share['launches']:8.2f} {share['us']:9.2f} {share['idle_us']:8.2f}  {share['kernel'][:110]}")


def engine_config(
    folder: Path, shape: str, weights: str, kv_cache_dtype: Literal["auto", "fp8"] = "auto"
) -> EngineConfig:
    """Of an engine with random weights of a shape, `auto`, in `fp8` or in `int4`."""
    if weights == "int4":
        CodesBackend.head = SHAPES[shape].config["vocab_size"]
        backend.CudaBackend = CodesBackend  # type: ignore[misc]
    return EngineConfig(
        model=str(write_model(shape, folder / shape)),
        load_format="dummy",
        max_model_len=2560,
        max_num_seqs=256,
        device="cuda",
        kv_cache_dtype=kv_cache_dtype,
        quantization="fp8" if weights == "fp8" else "auto",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--weights", default="auto", choices=["auto", "fp8", "int4"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(Path(folder), options.shape, options.weights, options.kv_cache_dtype)
        results = asyncio.run(measure(config, options.streams))
    print(f"{options.shape}, weights {options.weights}, cache {options.kv_cache_dtype}")
    for figures in results:
        show(figures)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
