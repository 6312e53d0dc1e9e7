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
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import EngineError, InsufficientRetention, ParentNotFound
from bequest.engine.types import Lineage, Retain, SamplingParams
from bequest.engine.vault.shelf import Shelf
from tests.engine.harness import Setup, ask, make_engine, request
from tests.engine.paged_fake import expected_tokens

SETUP = Setup(num_blocks=120, num_host_blocks=60, num_lease_blocks=60, num_file_blocks=4000)
_CHECKED, _CHECKED_UNPROMISED = 4, 2  # leases that a run continues before it makes new ones
_CLIENTS = 4
_MOST_LINES = 20


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a server of durable leases, and looks what it kept.")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="writes the figures there")
    parser.add_argument("--folder", type=Path, help="keeps leases and figures there, and goes on from them")
    given = parser.parse_args()
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
        _drop_torn_lines(folder)
        moment = None if number == kills else Moment(draw.randint(1, _MOST_LINES), draw.uniform(0.0, 0.3))
        told = _run(folder, seed + number, moment)
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


def _drop_torn_lines(folder: Path) -> None:
    """A client that was killed while it wrote knows of no promise and has deleted nothing."""
    for file in (folder / "promised", folder / "forgotten"):
        if file.exists():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


class Moment(NamedTuple):
    """Of a kill. Events first, so that a busy machine has as much load behind it as an idle one."""

    lines: int  # that the server has told: it continues, or promises
    seconds: float  # after that


def _run(path: Path, seed: int, end: Moment | None) -> list[str]:
    """A run that is killed then; None: it ends by itself, once it has looked at all leases."""
    reading, writing = os.pipe()
    process = os.fork()  # nothing is imported again: a start costs what a server's does behind its imports
    if process == 0:
        os.close(reading)
        os.dup2(writing, sys.stdout.fileno())
        _serve_and_exit(path, random.Random(seed), last=end is None)
    os.close(writing)
    with os.fdopen(reading) as told_to:
        told = _told(process, told_to, end)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    expected = 0 if end is None else -signal.SIGKILL
    if code != expected:
        told.append(f"wrong: the run ended with {code}, not {expected}")
    return told


def _told(process: int, told_to: TextIO, end: Moment | None) -> list[str]:
    told = [told_to.readline().strip()]
    if told[0] != "ready":
        return [f"wrong: the server did not start ({told[0]!r})"]
    if end is not None:
        told += [told_to.readline().strip() for _ in range(end.lines)]
        time.sleep(end.seconds)
        os.kill(process, signal.SIGKILL)
    return told + told_to.read().splitlines()


# --- the process that is killed ------------------------------------------------------------------------------------


def _serve_and_exit(path: Path, draw: random.Random, *, last: bool) -> NoReturn:
    try:
        asyncio.run(_serve(path, draw, last=last))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


async def _serve(path: Path, draw: random.Random, *, last: bool) -> None:
    engine, _ = make_engine(SETUP)
    await engine.open_files(Shelf(path / "estates"), 5.0)
    print("ready", flush=True)
    promised = [json.loads(line) for line in (path / "promised").read_text().splitlines()]
    known, gone = {one["id"]: one for one in promised}, _gone(path)
    earlier = [one for one in promised if one["id"] not in gone]
    some = earlier if last else draw.sample(earlier, min(_CHECKED, len(earlier)))
    for one in some:
        await _continue(engine, one, draw)
    others = [e.id for e in engine.records("t") if e.grade == "stored" and e.id not in known]
    for name in others if last else draw.sample(others, min(_CHECKED_UNPROMISED, len(others))):
        kept = engine.retention.find("t", name).kept[0]
        await _continue(engine, {"id": name, "tokens": kept.tokens.to_list(), "extra": True}, draw)
    # What nobody knows of, or was deleted when the kill came, would fill the files in the end.
    for name in [*others, *(e.id for e in engine.records("t") if e.id in gone)]:
        engine.forget("t", name)
    if last:
        return
    await asyncio.gather(*(_load(engine, draw, path, earlier) for _ in range(_CLIENTS)))


async def _continue(engine: AsyncEngine, one: dict[str, object], draw: random.Random) -> None:
    """A child of a lease; it may be durable itself."""
    assert isinstance(one["tokens"], list)
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
    """What a kill leaves is a line, or the beginning of one: a write may end between two pages of a file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode() + b"\n")
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
