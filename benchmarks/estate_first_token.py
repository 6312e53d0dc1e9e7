"""How soon a child of a leased parent has its first token, by where the lease is, beside computing the parent again.

    python -m benchmarks.estate_first_token [--tokens 4000] [--model DIR] [--device cpu] [--folder DIR]
    python -m benchmarks.estate_first_token --shape llama-3.1-8b --tokens 16000 --kv-cache-gb 12    # on a GPU

A prompt is leased into files. Its children are timed, each with a suffix of its own: the lease is on the disk, of which
the operating system has no copy; in files of which it has one; in the host's memory; and nowhere, under a salt of their
own, so that nothing is inherited. Bytes per second stand beside those of reading the same files alone. `--shape` takes
random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.model_shapes import SHAPES, write_model
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Lineage, Request, Retain, SamplingParams, Terms

_ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the first token of children of a leased parent.")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-gb", type=float, default=1.0)
    parser.add_argument("--host-cache-gb", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, help="of the files: on the disk that is measured")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        figures = asyncio.run(_measure(given, Path(folder)))
    print(f"{'':<24}{'s':>10}{'MB/s':>10}{'times sooner':>14}")
    for name, (seconds, rate) in figures.items():
        sooner = "" if name.startswith("reading") else f"{figures['recomputed'][0] / seconds:.1f}"
        print(f"{name:<24}{seconds:>10.3f}{rate:>10.0f}{sooner:>14}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures))
    return 0


async def _measure(given: argparse.Namespace, folder: Path) -> dict[str, tuple[float, float]]:
    """By name: seconds and megabytes per second."""
    files = folder / "estates"
    model = given.model if given.shape is None else str(write_model(given.shape, folder / given.shape))
    config = EngineConfig(
        model=model,
        device=given.device,
        load_format="auto" if given.shape is None else "dummy",
        estate_dir=str(files),
        durable_wait=120.0,
        max_model_len=given.tokens + 64,
        kv_cache_gb=given.kv_cache_gb,
        host_cache_gb=given.host_cache_gb,
    )
    engine = (await build_engine(config)).engine
    try:
        before = await _lease(engine, given.tokens)
        num_bytes = sum(file.stat().st_size for file in (files / "blocks").iterdir())
        print(f"{len(before)} tokens, {num_bytes / 1e6:.0f} MB", flush=True)
        ways: dict[str, tuple[str, Callable[[], None]]] = {
            "from the host": ("host", lambda: _move_to_host(engine)),
            "from files, cached": ("file", lambda: _let_go(engine)),
            "from the disk": ("file", lambda: _let_go(engine, files)),
        }
        figures, tokens = {}, set()
        for name, (source, prepare) in ways.items():
            timed = [await _child(engine, before, prepare, source, i) for i in range(given.repeats)]
            tokens.add(tuple(token for _, token in timed))
            seconds = statistics.median(seconds for seconds, _ in timed)
            figures[name] = seconds, num_bytes / 1e6 / seconds
        assert len(tokens) == 1, f"the tokens of children differ: {tokens}"
        timed = [await _whole(engine, before, i) for i in range(given.repeats)]
        same = tokens == {tuple(token for _, token in timed)}
        # In bfloat16 a step of other sizes rounds otherwise, and random weights have many likeliest tokens.
        assert same or engine.info.dtype != "float32", f"the tokens differ from those of {timed}"
        print(f"recomputed tokens are {'the same' if same else 'others'} ({engine.info.dtype})", flush=True)
        figures["recomputed"] = statistics.median(seconds for seconds, _ in timed), 0.0
    finally:
        await engine.stop()
    for name, cached in (("reading cached files", True), ("reading the disk", False)):
        seconds = _reading(files, cached=cached)
        figures[name] = seconds, num_bytes / 1e6 / seconds
    return figures


async def _lease(engine: AsyncEngine, num_tokens: int) -> tuple[int, ...]:
    prompt = tuple(20 + 7 * i % 2000 for i in range(num_tokens))
    retained = None
    async for delta in engine.generate(_request("parent", prompt, Terms(retain=Retain(3600, durable=True)))):
        retained = delta.retained or retained
    assert retained is not None and retained.durable, f"the lease is not on the disk: {retained}"
    return engine.parent("t", "parent").choices[0].token_ids


def _move_to_host(engine: AsyncEngine) -> None:
    """As others do who need the room. The next step carries it out."""
    cache = engine.scheduler.cache
    record = engine.retention.find("t", "parent")
    assert cache.make_room(cache.pool.num_free + sum(len(table) for table in record.tables()) - 1)
    assert record.tables()[0].num_on_host > 0


def _let_go(engine: AsyncEngine, uncached: Path | None = None) -> None:
    """Nothing of the parent is in memory, and nothing of these files either."""
    record = engine.retention.find("t", "parent")
    while record.tables():
        assert engine.retention.leases.let_stored_go()
    for kept in record.kept.values():
        kept.epochs = type(kept.epochs)()
    engine._vault._unload((record, 0))  # type: ignore[union-attr]
    if uncached is not None:
        _uncache(uncached)


def _uncache(files: Path) -> None:
    """The operating system forgets its copies. REQUIRES: they are on the disk"""
    for file in (files / "blocks").iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


async def _child(
    engine: AsyncEngine, before: tuple[int, ...], prepare: Callable[[], None], source: str, number: int
) -> tuple[float, int]:
    prepare()
    await _timed(engine, _request(f"between-{number}", (7, 8, 9), Terms(keep_record=False), "apart"), computed=3)
    terms = Terms(lineage=Lineage("parent", 0, len(before)), keep_record=False)
    asked = _request(f"child-{number}", (*before, 5, 6 + number), terms)
    return await _timed(engine, asked, computed=3, source=source)


async def _whole(engine: AsyncEngine, before: tuple[int, ...], number: int) -> tuple[float, int]:
    asked = _request(f"whole-{number}", (*before, 5, 6 + number), Terms(keep_record=False), f"salt-{number}")
    return await _timed(engine, asked, computed=len(before) + 2)


async def _timed(engine: AsyncEngine, asked: Request, computed: int, source: str | None = None) -> tuple[float, int]:
    began, first, token = time.perf_counter(), 0.0, -1
    async for delta in engine.generate(asked):
        first = first or time.perf_counter() - began
        for choice in delta.choices:
            token = choice.token_ids[-1] if choice.token_ids else token
        if delta.inheritance is not None:
            assert delta.inheritance.source == source, delta.inheritance
        if delta.usage is not None:
            assert delta.usage.prompt_tokens - delta.usage.cached_tokens == computed, delta.usage
    return first, token


def _request(name: str, prompt: tuple[int, ...], terms: Terms, salt: str = "") -> Request:
    return Request(name, "t", prompt, _ONE, terms=terms, cache_salt=salt)


def _reading(files: Path, *, cached: bool) -> float:
    """Seconds that reading the blocks alone takes."""
    if not cached:
        _uncache(files)
    began, into = time.perf_counter(), bytearray(8 << 20)
    for file in (files / "blocks").iterdir():
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(into):
                pass
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
