"""Random loads, unloads and requests with adapters: every answer is compared, and nothing may be left behind.

    python -m benchmarks.adapter_soak [--operations 1000] [--seed 0]

A tiny model with random weights on the CPU. Names are loaded with changing files while requests run: plain ones,
several choices, beams, leased parents with children. An answer must be, to the bit, what an engine says that has this
one adapter and nothing else to do. At the end every block is free, and memory is as it was after the first fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.model_shapes import SHAPES, write_model
from benchmarks.random_adapters import write_adapter
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import AdapterInUse, AdapterNotFound, InvalidAdapter
from bequest.engine.types import BeamParams, Lineage, OutputMode, Request, Retain, SamplingParams, Terms

SHAPE = "llama-tiny"
NUM_FILES, NUM_NAMES, NUM_PROMPTS = 6, 5, 4
AT_ONCE = 8
MOST_GROWTH = 64 << 20  # bytes

PLAIN = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
KINDS = {
    "plain": PLAIN,
    "choices": SamplingParams(max_tokens=5, temperature=1, seed=3, n=3, ignore_eos=True),
    "beams": SamplingParams(max_tokens=4, temperature=0, n=2, beams=BeamParams(3)),
    "child": PLAIN,
}
Tokens = dict[int, tuple[int, ...]]
_ids = count()


def prompt(number: int) -> tuple[int, ...]:
    draw = random.Random(number)
    return tuple(draw.randrange(3, 250) for _ in range(9 + 7 * number))


async def answer(engine: AsyncEngine, name: str, tokens: tuple[int, ...], kind: str, terms: Terms) -> Tokens:
    adapter = engine.adapters.find(name)
    asked = Request(f"r{next(_ids)}", "t", tokens, KINDS[kind], output=OutputMode.FINAL, terms=terms, adapter=adapter)
    found: Tokens = {}
    async for delta in engine.generate(asked):
        found |= {choice.index: tuple(choice.token_ids) for choice in delta.choices}
    return found


async def ask(engine: AsyncEngine, name: str, number: int, kind: str) -> Tokens:
    """A child continues what a leased parent has said; the parent is released behind it."""
    if kind != "child":
        return await answer(engine, name, prompt(number), kind, Terms())
    parent = f"parent-{next(_ids)}"
    said = await answer(engine, name, prompt(number), "plain", Terms(name=parent, retain=Retain(600)))
    tokens = (*prompt(number), *said[0])
    child = await answer(engine, name, (*tokens, 7, 8), kind, Terms(lineage=Lineage(parent, 0, len(tokens))))
    engine.set_ttl("t", parent, None)
    return child


@dataclass
class Soak:
    directories: list[Path]
    model: Path
    done: Counter[str] = field(default_factory=Counter)
    expected: dict[tuple[int | None, int, str], Tokens] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # of the names that are loaded

    def config(self) -> EngineConfig:
        return EngineConfig(
            model=str(self.model),
            load_format="dummy",
            device="cpu",
            dtype="float32",
            threads=1,
            block_size=4,
            num_blocks=400,
            max_model_len=128,
            max_loras=NUM_NAMES - 1,
        )

    async def learn(self) -> None:
        """What engines say that have one adapter, or none."""
        for file in (None, *range(len(self.directories))):
            engine = (await build_engine(self.config())).engine
            if file is not None:
                await engine.adapters.load("one", self.directories[file])
            for number in range(NUM_PROMPTS):
                for kind in KINDS:
                    self.expected[file, number, kind] = await ask(engine, "one", number, kind)
            await engine.stop()

    async def operate(self, engine: AsyncEngine, draw: random.Random) -> None:
        what = draw.choices(("load", "unload", "request"), (2, 2, 4))[0]
        try:
            if what == "load":
                name, file = f"a{draw.randrange(NUM_NAMES)}", draw.randrange(len(self.directories))
                await engine.adapters.load(name, self.directories[file])
                self.files[name] = file
            elif what == "unload":
                await self._unload(engine, draw.choice([*self.files, "unknown"]))
            else:
                await self._request(engine, draw)
            self.done[what] += 1
        except (AdapterNotFound, InvalidAdapter) as error:
            self.done[f"{what}: {error.code}"] += 1

    async def _unload(self, engine: AsyncEngine, name: str) -> None:
        """When those are done that need it; no others come meanwhile."""
        self.files.pop(name, None)
        while True:
            try:
                return engine.adapters.unload(name)
            except AdapterInUse as error:
                self.done[f"unload: {error.code}"] += 1
                await asyncio.sleep(0.002)

    async def _request(self, engine: AsyncEngine, draw: random.Random) -> None:
        name = draw.choice(["", *self.files])
        file, number, kind = self.files.get(name), draw.randrange(NUM_PROMPTS), draw.choice(list(KINDS))
        said = await ask(engine, name, number, kind)
        assert said == self.expected[file, number, kind], (name, file, number, kind, said)

    async def run(self, operations: int, seed: int) -> int:
        """Bytes that memory has grown by since the first fifth."""
        await self.learn()
        assert len({str(self.expected[file, 0, "plain"]) for file in range(len(self.directories))}) > 1, "too alike"
        draw, engine = random.Random(seed), (await build_engine(self.config())).engine
        left, early = iter(range(operations)), 0

        async def work() -> None:
            nonlocal early
            for number in left:
                await self.operate(engine, draw)
                if number == operations // 5:
                    early = _peak_bytes()

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        for name in list(self.files):
            engine.adapters.unload(name)
        await engine.stop()
        engine.scheduler.check_idle()
        return _peak_bytes() - early


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def soak(operations: int, seed: int) -> tuple[Counter[str], int]:
    with tempfile.TemporaryDirectory() as folder:
        directories = [Path(folder) / f"adapter-{i}" for i in range(NUM_FILES)]
        for i, directory in enumerate(directories):
            write_adapter(directory, SHAPES[SHAPE].config, 1 + 3 * i, seed=i, size=0.3)
        one = Soak(directories, write_model(SHAPE, Path(folder) / SHAPE))
        return one.done, asyncio.run(one.run(operations, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done, growth = soak(options.operations, options.seed)
    for what, number in sorted(done.items()):
        print(f"{what:32} {number:6,}")
    print(f"no answer differs, no block is lost, memory grew by {growth / 2**20:.1f} MiB")
    if growth > MOST_GROWTH:
        raise SystemExit(f"memory grew by more than {MOST_GROWTH >> 20} MiB")


if __name__ == "__main__":
    main()
