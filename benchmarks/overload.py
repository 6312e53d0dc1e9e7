"""What overload does to those who were let in, and to a light tenant beside a heavy one.

    python -m benchmarks.overload [--seconds 30] [--timed] [--without MECHANISM] [--json FILE]

First the capacity is measured (as many clients as slots, each asking again when it is answered). Then requests arrive
at random times, at half of the capacity and at twice: between the two the p99 time between tokens should stay within
1.5, and whoever is not let in gets a 429 with Retry-After. Then a light tenant sends a request now and then, a tenth of
the capacity: alone, and beside a heavy one with hundreds waiting, who comes all at once: between the two its p99 time
to the first token should stay within 2. A second table tells where the light tenant's first tokens spend their time.

The model is the embedded one; with --timed a device that only waits, so that the figures are those of scheduling and
HTTP. The light tenant's client is a process of its own: it should not wait for the heavy one's. Times during which the
machine itself stood still are left out (benchmarks/stalls.py). For quiet figures run all of it under `chrt -f 10`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.policy import WITHOUT
from benchmarks.stalls import Stalls

KEYS = 'keys = [{name = "heavy", key = "heavy"}, {name = "light", key = "light"}]'
LIGHT_PART = 3  # times as long as the others: its requests are few
# What lies between: sent, STAGES of staged_server.py, and here.
SPANS = ("to the handler", "parsed, submitted", "queued", "computed", "to its sink", "to the client")


@dataclass(frozen=True)
class Shape:
    """Of the server and of what it is asked for."""

    slots: int
    queue: int
    prompt: int  # tokens
    answer: tuple[int, int]  # tokens; from, to


TIMED = Shape(slots=32, queue=256, prompt=64, answer=(16, 80))
REAL = Shape(slots=8, queue=32, prompt=32, answer=(8, 24))


@dataclass(frozen=True)
class Answer:
    id: str
    sent: float
    events: tuple[float, ...]


@dataclass
class Seen:
    """What became of the requests of a load."""

    answers: list[Answer] = field(default_factory=list)
    sent: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)

    def first(self, stalls: Stalls) -> list[float]:
        return [a.events[0] - a.sent for a in self.answers if not stalls.hit(a.sent, a.events[0])]

    def gaps(self, stalls: Stalls) -> list[float]:
        pairs = itertools.chain.from_iterable(itertools.pairwise(a.events) for a in self.answers)
        return [end - begin for begin, end in pairs if not stalls.hit(begin, end)]

    def row(self, name: str, stalls: Stalls) -> dict[str, object]:
        gaps, first = self.gaps(stalls), self.first(stalls)
        return {
            "load": name,
            "sent": self.sent,
            "answered": len(self.answers),
            "429": self.refused,
            "faults": len(self.faults),
            "left out": len(self.answers) - len(first),
            "itl p50 ms": percentile(gaps, 50),
            "itl p99 ms": percentile(gaps, 99),
            "ttft p50 ms": percentile(first, 50),
            "ttft p99 ms": percentile(first, 99),
        }


def percentile(values: Sequence[float], q: float) -> float:
    return float(np.percentile(values, q)) * 1e3 if values else float("nan")


class Load:
    def __init__(self, session: aiohttp.ClientSession, url: str, shape: Shape, key: str, seed: str) -> None:
        self._session = session
        self._url = url
        self._shape = shape
        self._key = key
        self._draw = random.Random(key)  # times and lengths are the same whatever the load
        self._draw_prompts = random.Random(seed)  # while no prompt is sent twice
        self.seen = Seen()

    async def ask(self) -> bool:
        """Whether it was answered."""
        seen = self.seen
        seen.sent += 1
        prompt = [self._draw_prompts.randrange(1000, 30000) for _ in range(self._shape.prompt)]
        count = self._draw.randint(*self._shape.answer)
        body = {
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent, events, lines = time.monotonic(), [], []
        try:
            async with self._session.post(
                f"{self._url}/v1/completions", json=body, headers={"Authorization": f"Bearer {self._key}"}
            ) as answer:
                if answer.status == 429 and 1 <= int(answer.headers.get("Retry-After", "0")) <= 60:
                    seen.refused += 1
                    return False
                if answer.status != 200:
                    seen.faults.append(f"{answer.status} {await answer.text()}")
                    return False
                async for line in answer.content:
                    if line.startswith(b'data: {"id"'):
                        events.append(time.monotonic())
                        lines.append(line)
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.faults.append(repr(error))
            return False
        # An event may hold several tokens: those of a client that lags, and bytes that make a character together.
        chunks = [json.loads(line[6:]) for line in lines]
        if not chunks or (chunks[-1]["usage"] or {}).get("completion_tokens") != count:
            seen.faults.append(f"{len(chunks)} events for {count} tokens")
            return False
        seen.answers.append(Answer(chunks[0]["id"], sent, tuple(events[:-1])))
        return True

    async def closed(self, clients: int, seconds: float) -> None:
        """Each client asks again when it is answered; one that is refused waits a second, as it was told."""
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                if not await self.ask():
                    await asyncio.sleep(1)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def arriving(self, rate: float, seconds: float) -> None:
        """Requests come at random times, whatever became of those before."""
        end = time.monotonic() + seconds
        tasks = []
        while time.monotonic() < end:
            tasks.append(asyncio.ensure_future(self.ask()))
            await asyncio.sleep(self._draw.expovariate(rate))
        await asyncio.gather(*tasks)


def run_load(
    url: str, shape: Shape, key: str, seed: str, seconds: float, rate: float | None, clients: int | None
) -> Seen:
    """In a process of its own: a rate of arrivals, or clients that ask again."""

    async def run() -> Seen:
        timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            load = Load(session, url, shape, key, seed)
            if clients is not None:
                await load.closed(clients, seconds)
            elif rate is not None:
                await load.arriving(rate, seconds)
            return load.seen

    return asyncio.run(run())


def measure(url: str, seconds: float, shape: Shape) -> tuple[float, dict[str, Seen]]:
    """The capacity in requests per second, and what each load saw."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as clients:
        seeds = map(str, itertools.count())

        def start(key: str, part: float, rate: float | None = None, num_clients: int | None = None) -> Future[Seen]:
            return clients.submit(run_load, url, shape, key, next(seeds), seconds * part, rate, num_clients)

        start("heavy", 1 / 6, num_clients=shape.slots).result()  # warm up
        full = start("heavy", 1 / 2, num_clients=shape.slots).result()
        begin, end = min(a.sent for a in full.answers), max(a.events[-1] for a in full.answers)
        capacity = len(full.answers) / (end - begin)
        seen = {"all slots busy": full}
        seen["half of capacity"] = start("heavy", 1, capacity / 2).result()
        seen["twice the capacity"] = start("heavy", 1, capacity * 2).result()
        seen["light alone"] = start("light", LIGHT_PART, capacity / 10).result()
        light = start("light", LIGHT_PART, capacity / 10)
        heavy = start("heavy", LIGHT_PART, num_clients=10 * shape.slots)
        seen["light, overloaded"], seen["  the heavy one then"] = light.result(), heavy.result()
    return capacity, seen


def spans_of(answers: Sequence[Answer], stages: dict[str, list[float]], stalls: Stalls) -> dict[str, list[float]]:
    """What each first token's time was spent on."""
    spans: dict[str, list[float]] = {name: [] for name in (*SPANS, "in all")}
    for answer in answers:
        if answer.id in stages and not stalls.hit(answer.sent, answer.events[0]):
            times = [answer.sent, *stages[answer.id], answer.events[0]]
            for name, (begin, end) in zip(SPANS, itertools.pairwise(times), strict=True):
                spans[name].append(end - begin)
            spans["in all"].append(times[-1] - times[0])
    return spans


def start_server(folder: Path, timed: bool, shape: Shape, without: str) -> tuple[subprocess.Popen[str], str]:
    (folder / "keys.toml").write_text(KEYS)
    flags = ["serve", "--port", "0", "--api-key-file", str(folder / "keys.toml"), "--max-num-seqs", str(shape.slots)]
    flags += ["--max-queued", str(shape.queue), "--max-model-len", "1024", "--log-level", "info"]
    module = ["benchmarks.staged_server", str(int(timed)), str(folder / "stages"), without]
    process = subprocess.Popen([sys.executable, "-m", *module, *flags], stderr=(folder / "log").open("w"), text=True)
    while process.poll() is None:
        if match := re.search(r"ready on (http://\S+)", (folder / "log").read_text()):
            return process, match[1]
        time.sleep(0.1)
    raise SystemExit((folder / "log").read_text())


def show(rows: Sequence[dict[str, object]]) -> None:
    print("  ".join(f"{name:>20}" if i == 0 else f"{name:>11}" for i, name in enumerate(rows[0])))
    for row in rows:
        print("  ".join(f"{value:>20}" if i == 0 else f"{value:>11.5g}" for i, value in enumerate(row.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="of each load; thrice of the light tenant's")
    parser.add_argument("--timed", action="store_true", help="a device that only waits")
    parser.add_argument("--without", choices=sorted(WITHOUT), default="", help="switches a part of the policy off")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    shape = TIMED if options.timed else REAL
    with tempfile.TemporaryDirectory() as folder:
        process, url = start_server(Path(folder), options.timed, shape, options.without)
        stalls = Stalls()
        try:
            with stalls:
                capacity, seen = measure(url, options.seconds, shape)
        finally:
            process.terminate()
            process.wait(60)
        stages = json.loads((Path(folder) / "stages").read_text())
    rows = [one.row(name, stalls) for name, one in seen.items()]
    show(rows)
    loads = {kind: seen[name].answers for kind, name in (("alone", "light alone"), ("loaded", "light, overloaded"))}
    spans = {kind: spans_of(answers, stages, stalls) for kind, answers in loads.items()}
    table: list[dict[str, object]] = []
    for name in (*SPANS, "in all"):
        times = {f"{kind} p{q}": percentile(spans[kind][name], q) for kind in spans for q in (50, 99)}
        table.append({"first tokens, ms": name, **times})
    show(table)
    half, twice = seen["half of capacity"].gaps(stalls), seen["twice the capacity"].gaps(stalls)
    alone, crowded = seen["light alone"].first(stalls), seen["light, overloaded"].first(stalls)
    ratios = {
        "capacity, requests/s": capacity,
        "p99 inter-token, twice / half": percentile(twice, 99) / percentile(half, 99),
        "light's p99 first token, overloaded / alone": percentile(crowded, 99) / percentile(alone, 99),
        "light's p50 first token, overloaded / alone": percentile(crowded, 50) / percentile(alone, 50),
        "machine stood still, seconds": sum(end - begin for begin, end in stalls.seen),
    }
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    for fault in itertools.chain.from_iterable(one.faults[:3] for one in seen.values()):
        print("FAULT", fault)
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows, "stages": table, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
