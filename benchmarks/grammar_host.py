"""What a grammar costs the host: µs of CPU for a row and a step, free and under a JSON schema, and where they go.

    python -m benchmarks.grammar_host [--shape qwen3-0.6b] [--rows 1,16,64,256] [--rounds 5] [--json FILE]
    python -m benchmarks.grammar_host --beside TREE [--rounds 9]

The engine, its loop, its masks and its threads are real. The device is not there (timed_runner.py): it takes
`--step-ms` for a step, waits for the masks as a GPU does, and says tokens that were chosen beforehand. So the time of a
step shows what comes too late. Parts are CPU time of the threads that do them; what no part names is handing the
interpreter over, waking threads, and the client. With another tree, mostly the one before a change, both take turns: on
a machine that others use only the ratios mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import SHAPES, write_model
from benchmarks.structured import PROMPT, SCHEMA, seconds_per_token
from benchmarks.timed_runner import TimedRunner, scripts_of, timed_engine
from bequest.engine.constraints import mask_maker
from bequest.engine.constraints.grammar import Grammar, GrammarMasks, GrammarSource, Vocabulary, compile_source
from bequest.engine.engine import AsyncEngine
from bequest.engine.scheduling.scheduler import Scheduler

HERE = Path(__file__).parent.parent
MOST = 256  # rows
# By name: whose method it is, and which.
PARTS: dict[str, tuple[type, str]] = {
    "masks": (GrammarMasks, "fill_step"),
    "around masks": (mask_maker._Work, "_make"),
    "taking tokens": (mask_maker._Work, "_advance"),
    "at the launch": (mask_maker.MaskMaker, "add"),
    "planning": (Scheduler, "plan"),
    "applying": (Scheduler, "apply"),
    "texts": (AsyncEngine, "_deliver"),
    "(the device)": (TimedRunner, "sampled"),
}


class Clock:
    """CPU time of methods. It takes some itself, so it is used in rounds of its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Clock:
        for part, (owner, name) in PARTS.items():
            method = getattr(owner, name)
            setattr(owner, name, self._timed(part, method))
            self._undo.append(lambda owner=owner, name=name, method=method: setattr(owner, name, method))  # type: ignore[misc]
        return self

    def __exit__(self, *error: object) -> None:
        for undo in self._undo:
            undo()

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            before = time.thread_time()
            try:
                return method(*args)
            finally:
                self.seconds[part] += time.thread_time() - before

        return timed


class World:
    """An engine, and what its answers are held to."""

    def __init__(self, shape: str | None, step_ms: float, tokens: int) -> None:
        """Within a running event loop."""
        sys.setswitchinterval(0.0005)  # as the server has it
        self._tokens = tokens
        with tempfile.TemporaryDirectory() as folder:
            model = None if shape is None else write_model(shape, Path(folder) / shape)
            self.engine, text, self._runner = timed_engine(step_ms * 1e-3, MOST, model)
        info = self.engine.info
        source, vocabulary = (
            GrammarSource("json_schema", json.dumps(SCHEMA)),
            Vocabulary(text.tokenizer, info.vocab_size, info.eos_token_ids),
        )
        self._grammar = Grammar(source, vocabulary)
        self._scripts = scripts_of(self._grammar, MOST, tokens)
        self._runner.follow(self._scripts, PROMPT)
        self._start = compile_source(source, vocabulary.tokens)
        self._turn = 0

    async def round(self, rows: int, bound: bool) -> dict[str, float]:
        """Of a step: ms, µs of CPU for each row, and waits."""
        self._turn += 1
        rule = self._grammar if bound else None
        cpu, waits = time.process_time(), _waits()
        seconds = await seconds_per_token(self.engine, rule, rows, self._tokens, f"{self._turn}")
        spent = time.process_time() - cpu
        return {
            "ms": seconds * 1e3,
            "us": spent / (rows * self._tokens) * 1e6,
            "waits": (_waits() - waits) / self._tokens,
        }

    async def parts(self, rows: int) -> dict[str, float]:
        """µs of CPU for each row and step, under the schema; what they take more than free, where free takes some."""
        spent: list[dict[str, float]] = []
        for bound in (False, True):
            with Clock() as clock:
                total = (await self.round(rows, bound))["us"]
            spent.append({name: s / (rows * self._tokens) * 1e6 for name, s in clock.seconds.items()} | {"all": total})
        free, held = spent
        more = {name: held.get(name, 0.0) - free.get(name, 0.0) for name in (*PARTS, "all")}
        more["around masks"] -= more["masks"]
        before = time.thread_time()
        for script in self._scripts[:rows]:
            self._start.copy().consume(script.tolist())
        moving = (time.thread_time() - before) / (rows * self._tokens) * 1e6
        more["masks"] -= moving
        rest = more.pop("all") - moving - sum(more.values())
        return {"moving": moving, **more, "all else": rest}


def _waits() -> int:
    """Voluntary context switches of the process."""
    return sum(
        int(line.split()[1])
        for thread in Path("/proc/self/task").iterdir()
        for line in (thread / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


async def serve(shape: str | None, step_ms: float, tokens: int) -> None:
    """Rounds that are asked for on stdin, a line each; the figures of free ones and of those under the schema."""
    world = World(shape, step_ms, tokens)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        rows = int(line)
        print(json.dumps([await world.round(rows, bound) for bound in (False, True)]), flush=True)
    await world.engine.stop()


def compare(other: Path, options: argparse.Namespace) -> None:
    """By turns; this tree by the other's."""
    command = [sys.executable, str(Path(__file__)), "--serve", "--step-ms", str(options.step_ms)]
    command += ["--tokens", str(options.tokens)] + (["--shape", options.shape] if options.shape else [])
    trees = [
        subprocess.Popen(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for tree in (other, HERE)
    ]

    def ask(tree: subprocess.Popen[str], rows: int) -> list[dict[str, float]]:
        assert tree.stdin is not None and tree.stdout is not None
        tree.stdin.write(f"{rows}\n")
        tree.stdin.flush()
        figures: list[dict[str, float]] = json.loads(tree.stdout.readline())
        return figures

    try:
        for tree in trees:
            assert tree.stdout is not None and tree.stdout.readline() == "ready\n"
        print("rows   µs of CPU a row, under the schema less free: before, now, ratio   ms by free ms: before, now")
        for rows in options.rows:
            turns: list[list[list[dict[str, float]]]] = [[], []]
            for turn in range(options.rounds + 1):
                for number in (0, 1) if turn % 2 else (1, 0):
                    figures = ask(trees[number], rows)
                    if turn:  # the first warms up
                        turns[number].append(figures)
            cost = [[held["us"] - free["us"] for free, held in tree] for tree in turns]
            late = [[held["ms"] / free["ms"] for free, held in tree] for tree in turns]
            ratio = statistics.median(now / before for before, now in zip(*cost, strict=True))
            costs = f"{statistics.median(cost[0]):8.2f} {statistics.median(cost[1]):8.2f} {ratio:7.3f}"
            print(f"{rows:4} {costs}     {statistics.median(late[0]):.3f} {statistics.median(late[1]):.3f}", flush=True)
    finally:
        for tree in trees:
            tree.terminate()
            tree.wait()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    world = World(options.shape, options.step_ms, options.tokens)
    found: dict[str, Any] = {}
    for rows in options.rows:
        rounds = [[await world.round(rows, bound) for bound in (False, True)] for _ in range(options.rounds + 1)][1:]
        free, held = ({key: statistics.median(r[i][key] for r in rounds) for key in rounds[0][i]} for i in (0, 1))
        parts = [await world.parts(rows) for _ in range(3)]
        medians = {part: statistics.median(p[part] for p in parts) for part in parts[0]}
        found[str(rows)] = {"free": free, "held": held, "parts": medians}
        print(f"{rows} rows")
        for name, of in (("free", free), ("under the schema", held)):
            print(
                f"  {name:18} {of['ms']:7.3f} ms a step {of['us']:8.2f} µs of CPU a row {of['waits']:6.1f} waits a step"
            )
        for part, spent in medians.items():
            print(f"    {part:16} {spent:8.2f} µs a row")
    await world.engine.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), help="whose vocabulary it is; else the embedded model's")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=1.9)
    parser.add_argument("--beside", type=Path, help="another tree, which takes turns with this one")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.shape, options.step_ms, options.tokens))
    elif options.beside is not None:
        compare(options.beside, options)
    else:
        figures = asyncio.run(measure(options))
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
