"""How long a server takes to sleep and to wake, and what it gives back.

    python -m benchmarks.sleep_times [--model DIR] [--device cpu]
    python -m benchmarks.sleep_times --shape llama-3.1-8b               # random weights, on a GPU

A lease is held over each sleep. Its child's tokens must be those of before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.model_shapes import SHAPES, write_model
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Lineage, Request, Retain, SamplingParams, Terms

_TWENTY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times sleep.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--verbose", action="store_true", help="shows how long each phase of waking takes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.verbose:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(_measure(given, Path(folder)))
    print(f"{'given back, GB':>16}{'to sleep, s':>14}{'to wake, s':>14}{'first token, s':>16}")
    for row in rows:
        print(f"{row[0] / 1e9:>16.2f}{row[1]:>14.2f}{row[2]:>14.2f}{row[3]:>16.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps(rows))
    return 0


async def _measure(given: argparse.Namespace, folder: Path) -> list[tuple[int, float, float, float]]:
    """Of each sleep: bytes, and seconds to sleep, to wake, and then to the first token."""
    model = given.model if given.shape is None else str(write_model(given.shape, folder / given.shape))
    load_format = "auto" if given.shape is None else "dummy"
    config = EngineConfig(model=model, device=given.device, load_format=load_format, max_model_len=4096)
    began = time.perf_counter()
    engine = (await build_engine(config)).engine
    print(f"start: {time.perf_counter() - began:.2f} s", flush=True)
    try:
        await _ask(engine, Request("parent", "t", tuple(range(20, 520)), _TWENTY, terms=Terms(retain=Retain(3600))))
        before = await _child(engine)
        rows = []
        for _ in range(given.repeats):
            began = time.perf_counter()
            given_back = await engine.sleep(wakes_itself=False)
            asleep = time.perf_counter()
            await engine.wake()
            awake = time.perf_counter()
            first, tokens = await _child(engine)
            assert tokens == before[1], "the tokens differ from those before the sleep"
            rows.append((given_back, asleep - began, awake - asleep, first))
        return rows
    finally:
        await engine.stop()


async def _child(engine: AsyncEngine) -> tuple[float, list[int]]:
    known = engine.parent("t", "parent").choices[0].token_ids
    terms = Terms(lineage=Lineage("parent", 0, len(known)), keep_record=False)
    return await _ask(engine, Request("child", "t", (*known, 30, 31), _TWENTY, terms=terms))


async def _ask(engine: AsyncEngine, asked: Request) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens."""
    began, first, tokens = time.perf_counter(), 0.0, list[int]()
    async for delta in engine.generate(asked):
        first = first or time.perf_counter() - began
        for choice in delta.choices:
            tokens += choice.token_ids
    return first, tokens


if __name__ == "__main__":
    sys.exit(main())
