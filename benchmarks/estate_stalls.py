"""What writing leases to files costs others: the time between tokens of streams beside requests with durable leases.

    python -m benchmarks.estate_stalls [--seconds 20] [--fsync 0.2] [--disk-mb 20] [--device cpu]
    python -m benchmarks.estate_stalls --shape llama-3.1-8b --streams 16 --prompt 512 --every 0.3       # on a GPU

The same load runs twice, in turns: prompts whose leases stay in memory, and prompts whose leases go to files, each
`--every` so many seconds. Streams beside them are timed, token by token. `--fsync` makes every flush of the disk wait
so many seconds longer, and `--disk-mb` bounds the megabytes that it takes in a second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.model_shapes import SHAPES, write_model
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import InsufficientRetention
from bequest.engine.types import Request, Retain, SamplingParams, Terms
from bequest.engine.vault import shelf

_NUMBERS = itertools.count()
_TTL = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Times tokens of streams beside leases that are written to files.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt that is leased")
    parser.add_argument("--every", type=float, default=1.0, help="seconds from one lease of a writer to its next")
    parser.add_argument("--fsync", type=float, default=0.0)
    parser.add_argument("--disk-mb", type=float, default=0.0, help="0: as fast as it is")
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(_measure(given, folder))
    print("\n".join(f"{name:<28}{value:.2f}" for name, value in figures.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(figures))
    return 0


async def _measure(given: argparse.Namespace, folder: str) -> dict[str, float]:
    model = given.model if given.shape is None else str(write_model(given.shape, Path(folder) / "model"))
    config = EngineConfig(
        model=model,
        device=given.device,
        load_format="auto" if given.shape is None else "dummy",
        estate_dir=str(Path(folder) / "estates"),
        max_model_len=4096,
    )
    engine = (await build_engine(config)).engine
    gaps: dict[bool, list[float]] = {False: [], True: []}
    leases = dict.fromkeys(gaps, 0)
    try:
        await _turn(engine, given, False, 2.0)  # warm
        _slow_down(given.fsync, given.disk_mb * 1e6)
        for _ in range(given.turns):
            for durable in gaps:
                found, count = await _turn(engine, given, durable, given.seconds)
                gaps[durable] += found
                leases[durable] += count
    finally:
        await engine.stop()
    p99 = {durable: 1e3 * statistics.quantiles(found, n=100)[98] for durable, found in gaps.items()}
    median = {durable: 1e3 * statistics.median(found) for durable, found in gaps.items()}
    return {
        "leases in memory": float(leases[False]),
        "leases in files": float(leases[True]),
        "median, memory, ms": median[False],
        "median, files, ms": median[True],
        "p99, memory, ms": p99[False],
        "p99, files, ms": p99[True],
        "p99, files / memory": p99[True] / p99[False],
    }


def _slow_down(seconds: float, bytes_per_second: float) -> None:
    """Of a flush; 0: no bound."""
    flush, write = shelf.os.fsync, shelf._write

    def slow_flush(descriptor: int) -> None:
        time.sleep(seconds)
        flush(descriptor)

    def slow_write(descriptor: int, data: memoryview) -> None:
        time.sleep(len(data) / bytes_per_second if bytes_per_second else 0.0)
        write(descriptor, data)

    shelf.os.fsync, shelf._write = slow_flush, slow_write  # type: ignore[assignment]


async def _turn(
    engine: AsyncEngine, given: argparse.Namespace, durable: bool, seconds: float
) -> tuple[list[float], int]:
    """Seconds between tokens, and leases that were made."""
    end = time.perf_counter() + seconds
    streams = [_stream(engine, end) for _ in range(given.streams)]
    writers = [_lease(engine, given, durable, end) for _ in range(given.writers)]
    found = await asyncio.gather(asyncio.gather(*streams), asyncio.gather(*writers))
    return [gap for gaps in found[0] for gap in gaps], sum(found[1])


async def _stream(engine: AsyncEngine, end: float) -> list[float]:
    gaps: list[float] = []
    while time.perf_counter() < end:
        last = None
        async for _ in engine.generate(_request((5, 6, 7), 200, None)):
            now = time.perf_counter()
            gaps += [] if last is None else [now - last]
            last = now
            if now >= end:
                break
    return gaps


async def _lease(engine: AsyncEngine, given: argparse.Namespace, durable: bool, end: float) -> int:
    """Leases that are granted as they are asked for: one that is to last and does not, is none."""
    count, due = 0, time.perf_counter()
    while time.perf_counter() < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        due += given.every
        prompt = tuple(20 + (7 * i + next(_NUMBERS)) % 2000 for i in range(given.prompt))
        try:
            async for delta in engine.generate(_request(prompt, 4, Retain(_TTL, durable=durable))):
                count += delta.retained is not None and bool(delta.retained.durable) == durable
        except InsufficientRetention:
            await asyncio.sleep(0.05)
    return count


def _request(prompt: tuple[int, ...], max_tokens: int, retain: Retain | None) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    terms = Terms(retain=retain, keep_record=retain is not None)
    return Request(f"r{next(_NUMBERS)}-{os.getpid()}", "t", prompt, params, terms=terms)


if __name__ == "__main__":
    sys.exit(main())
