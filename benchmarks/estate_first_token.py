"""How soon a child of a stored parent has its first token, beside computing the parent again.

    python -m benchmarks.estate_first_token [--tokens 4000] [--model DIR] [--device cpu]

One engine leases a prompt into files and ends. A second one finds the lease; children of it are timed, each with a
suffix of its own, and the bytes are read from the files every time. Then the same tokens are sent whole, under a salt
of their own, so that nothing is inherited. The bytes per second are beside those of reading the same files alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Lineage, Request, Retain, SamplingParams, Terms

_ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the first token of children of a stored parent.")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(_measure(given, Path(folder)))
    print("\n".join(f"{name:<28}{value:.3f}" for name, value in figures.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(figures))
    return 0


async def _measure(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    config = EngineConfig(
        model=given.model, device=given.device, estate_dir=str(folder), durable_wait=120.0, kv_cache_gb=1.0
    )
    prompt = tuple(20 + 7 * i % 4000 for i in range(given.tokens))
    engine = (await build_engine(config)).engine
    parent = _request("parent", prompt, Terms(retain=Retain(3600, durable=True)))
    retained = None
    async for delta in engine.generate(parent):
        retained = delta.retained or retained
    assert retained is not None and retained.durable, f"the lease is not on the disk: {retained}"
    before = engine.parent("t", "parent").choices[0].token_ids
    await engine.stop()
    engine = (await build_engine(config)).engine
    stored = [await _child(engine, before, i) for i in range(given.repeats)]
    whole = [await _whole(engine, before, i) for i in range(given.repeats)]
    await engine.stop()
    assert [token for _, token in stored] == [token for _, token in whole], "the tokens differ"
    num_bytes = sum(file.stat().st_size for file in (folder / "blocks").iterdir())
    seconds = statistics.median(seconds for seconds, _ in stored)
    again = statistics.median(seconds for seconds, _ in whole)
    return {
        "tokens": float(len(before)),
        "MB": num_bytes / 1e6,
        "from files, s": seconds,
        "recomputed, s": again,
        "times sooner": again / seconds,
        "MB/s of the child": num_bytes / 1e6 / seconds,
        "MB/s of reading alone": num_bytes / 1e6 / _reading(folder),
    }


async def _child(engine: AsyncEngine, before: tuple[int, ...], number: int) -> tuple[float, int]:
    """Nothing of the parent is in memory when it comes."""
    record = engine.retention.find("t", "parent")
    for kept in record.kept.values():
        kept.epochs = type(kept.epochs)()
    engine._vault._unload((record, 0))  # type: ignore[union-attr]
    terms = Terms(lineage=Lineage("parent", 0, len(before)))
    asked = _request(f"child-{number}", (*before, 5, 6 + number), terms)
    return await _timed(engine, asked, computed=3)


async def _whole(engine: AsyncEngine, before: tuple[int, ...], number: int) -> tuple[float, int]:
    asked = _request(f"whole-{number}", (*before, 5, 6 + number), Terms(), f"salt-{number}")
    return await _timed(engine, asked, computed=len(before) + 2)


async def _timed(engine: AsyncEngine, asked: Request, computed: int) -> tuple[float, int]:
    began, first, token = time.perf_counter(), 0.0, -1
    async for delta in engine.generate(asked):
        first = first or time.perf_counter() - began
        for choice in delta.choices:
            token = choice.token_ids[-1] if choice.token_ids else token
        if delta.usage is not None:
            assert delta.usage.prompt_tokens - delta.usage.cached_tokens == computed, delta.usage
    return first, token


def _request(name: str, prompt: tuple[int, ...], terms: Terms, salt: str = "") -> Request:
    return Request(name, "t", prompt, _ONE, terms=terms, cache_salt=salt)


def _reading(folder: Path) -> float:
    """Seconds that reading the blocks takes, of which the operating system has a copy."""
    began = time.perf_counter()
    for file in (folder / "blocks").iterdir():
        file.read_bytes()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
