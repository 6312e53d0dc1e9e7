"""Kills a server of durable leases at random moments, and starts it again on the same directory.

    python -m benchmarks.estate_crashes --kills 1000 --folder build/crashes

The server is the engine over a runner that stores tokens in its blocks and hashes what it reads back (tests/engine):
wrong bytes give wrong tokens. It writes down a lease when the answer has said `durable`, as a client would. Each run
first continues leases of the runs before: every one that was promised must be there, with the tokens that it would have
had, for suffix + 1 computed tokens. Others are there or not, never wrong. With a folder the benchmark goes on where it
was ended, over the same leases.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import EngineError, InsufficientRetention, ParentNotFound
from bequest.engine.types import Lineage, Retain, SamplingParams
from bequest.engine.vault.shelf import Shelf
from tests.engine.harness import Setup, ask, make_engine, request
from tests.engine.paged_fake import expected_tokens

SETUP = Setup(num_blocks=120, num_host_blocks=60, num_lease_blocks=60, num_file_blocks=4000)
_CHECKED = 12  # leases that a run continues before it makes new ones
_CLIENTS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a server of durable leases, and looks what it kept.")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="writes the figures there")
    parser.add_argument("--folder", type=Path, help="keeps leases and figures there, and goes on from them")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)  # the process that is killed
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(_serve(given.serve, random.Random(given.seed)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        figures = crashes(given.kills, given.seed, given.folder or Path(folder))
    print("\n".join(f"{name:<24}{value}" for name, value in figures.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(figures))
    return 0 if figures["wrong"] == 0 else 1


def crashes(kills: int, seed: int, folder: Path) -> dict[str, int]:
    """Until there were so many in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "promised").touch()
    kept = folder / "figures.json"
    figures = dict.fromkeys(("kills", "promised", "continued", "found unpromised", "wrong"), 0)
    if kept.exists():
        figures |= json.loads(kept.read_text())
    for number in range(figures["kills"], kills + 1):
        draw = random.Random(seed + number)
        told = _run(folder, seed + number, None if number == kills else draw.uniform(0.0, 0.6))
        figures["kills"] += number < kills
        figures["continued"] += told.count("continued")
        figures["found unpromised"] += told.count("unpromised")
        figures["promised"] = len((folder / "promised").read_text().splitlines())
        wrong = [line for line in told if line.startswith("wrong")]
        figures["wrong"] += len(wrong)
        for line in wrong:
            print(f"run {number}: {line}", file=sys.stderr)
        kept.write_text(json.dumps(figures))
    return figures


def _run(path: Path, seed: int, seconds: float | None) -> list[str]:
    """A run that is killed so long after it is ready; None: it ends by itself, once it has looked at all leases."""
    command = [sys.executable, "-m", "benchmarks.estate_crashes", "--serve", str(path), "--seed", str(seed)]
    last = {"LAST": "1"} if seconds is None else {}
    env = {**os.environ, **last}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        told = _told(process, seconds)
    expected = 0 if seconds is None else -signal.SIGKILL
    if process.returncode != expected:
        told.append(f"wrong: the run ended with {process.returncode}, not {expected}")
    return told


def _told(process: subprocess.Popen[str], seconds: float | None) -> list[str]:
    assert process.stdout is not None
    told = [process.stdout.readline().strip()]
    if told[0] != "ready":
        return [f"wrong: the server did not start ({told[0]!r})"]
    if seconds is not None:
        told.append(process.stdout.readline().strip())  # it continues or promises: there is load
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    return told + process.stdout.read().splitlines()


# --- the process that is killed ------------------------------------------------------------------------------------


async def _serve(path: Path, draw: random.Random) -> None:
    engine, _ = make_engine(SETUP)
    await engine.open_files(Shelf(path / "estates"), 5.0)
    print("ready", flush=True)
    promised = [json.loads(line) for line in (path / "promised").read_text().splitlines() if line.endswith("}")]
    known, last = {one["id"]: one for one in promised}, "LAST" in os.environ
    some = promised if last else draw.sample(promised, min(_CHECKED, len(promised)))
    for one in some:
        await _continue(engine, one, draw, path)
    for entry in engine.records("t"):
        if entry.grade == "stored" and entry.id not in known:
            kept = engine.retention.find("t", entry.id).kept[0]
            await _continue(engine, {"id": entry.id, "tokens": kept.tokens.to_list(), "extra": True}, draw, path)
    if last:
        os._exit(0)
    gone = _gone(path)
    earlier = [one for one in promised if one["id"] not in gone]
    await asyncio.gather(*(_load(engine, draw, path, earlier) for _ in range(_CLIENTS)))


async def _continue(engine: AsyncEngine, one: dict[str, object], draw: random.Random, path: Path) -> None:
    """A child of a lease; it may be durable itself."""
    assert isinstance(one["tokens"], list)
    if one.get("forgotten") or (_gone(path) & {one["id"]}):
        return
    suffix = [draw.randrange(10, 60) for _ in range(draw.randint(1, 9))]
    tokens = [*one["tokens"], *suffix]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    asked = request(tokens, params, lineage=Lineage(str(one["id"]), 0, len(one["tokens"])))
    try:
        known = engine.parent("t", str(one["id"])).choices[0].token_ids
        answer = await ask(engine, asked)
    except ParentNotFound:
        print("lost" if "extra" in one else f"wrong: {one['id']} was promised and is not there", flush=True)
        return
    except EngineError as error:
        print(f"wrong: {one['id']}: {error.code} {error.message}", flush=True)
        return
    inherited = answer.inheritance
    right = list(known) == one["tokens"] and answer.token_ids[0] == expected_tokens(tokens, 4)
    if not right or inherited is None or inherited.computed_tokens != len(suffix) + 1:
        print(f"wrong: {one['id']}: tokens {right}, {inherited}", flush=True)
        return
    print("unpromised" if "extra" in one else "continued", flush=True)


async def _load(engine: AsyncEngine, draw: random.Random, path: Path, earlier: list[dict[str, object]]) -> None:
    """A client: leases, their children, and some that are deleted, of `earlier` runs, too."""
    mine: list[dict[str, object]] = []
    while True:
        prompt, lineage = [draw.randrange(10, 60) for _ in range(draw.randint(1, 60))], None
        if mine and draw.random() < 0.5:
            parent = draw.choice(mine)
            assert isinstance(parent["tokens"], list)
            lineage = Lineage(str(parent["id"]), 0, len(parent["tokens"]))
            prompt = [*parent["tokens"], *prompt[:6]]
        if len(prompt) > 150:
            continue
        params = SamplingParams(max_tokens=draw.randint(1, 12), temperature=0, ignore_eos=True)
        name = f"run{os.getpid()}-{draw.randrange(1 << 40)}"
        asked = request(prompt, params, retain=Retain(86400, durable=True), lineage=lineage, name=name)
        asked = replace(asked, id=name + "-id")
        try:
            answer = await ask(engine, asked)
        except InsufficientRetention:  # a client makes room, of its own leases or of earlier ones
            if mine:
                _forget(engine, mine.pop(draw.randrange(len(mine))), path)
            elif earlier:
                _forget(engine, earlier.pop(draw.randrange(len(earlier))), path)
            await asyncio.sleep(0.001)
            continue
        assert answer.retained is not None
        if answer.retained.durable:
            one: dict[str, object] = {"id": asked.id, "tokens": [*prompt, *answer.token_ids[0]]}
            _write_down(path / "promised", json.dumps(one))
            print("promised", flush=True)
            mine.append(one)


def _forget(engine: AsyncEngine, one: dict[str, object], path: Path) -> None:
    _write_down(path / "forgotten", str(one["id"]))
    engine.forget("t", str(one["id"]))


def _gone(path: Path) -> set[object]:
    file = path / "forgotten"
    return set(file.read_text().splitlines()) if file.exists() else set()


def _write_down(file: Path, line: str) -> None:
    """In one write, so that a kill leaves whole lines."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode() + b"\n")
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
