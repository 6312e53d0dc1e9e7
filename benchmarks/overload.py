"""What overload does to those who were let in, and to a light tenant beside a heavy one.

    python -m benchmarks.overload [--seconds 30] [--timed] [--json FILE]

First the capacity is measured (as many clients as slots, each asking again when it is answered). Then requests arrive
at random times, at half of the capacity and at twice: between the two the p99 time between tokens should stay within
1.5, and whoever is not let in gets a 429 with Retry-After. Then a light tenant sends a request now and then: alone,
beside a heavy one that asks for half of the capacity, and beside the same with hundreds waiting: between the last two
its p99 time to the first token should stay within 2.

The model is the embedded one; with --timed a device that only waits, 8 ms per step and 40 µs per token, so that the
figures are those of the scheduling and not of a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from engine.types import StepPlan, StepResult

PROMPT, OUTPUT = 64, (16, 80)  # tokens; from, to
SLOTS, QUEUE = {False: 4, True: 32}, {False: 16, True: 256}
KEYS = 'keys = [{name = "heavy", key = "heavy"}, {name = "light", key = "light"}]'


class TimedRunner:
    """Takes the time that a device would, and samples a word."""

    def __init__(self, words: list[int]) -> None:
        self._words = np.asarray(words, np.int32)

    def is_quick(self, plan: StepPlan) -> bool:
        return False

    def launch(self, plan: StepPlan) -> StepResult:
        time.sleep(0.008 + 40e-6 * plan.num_tokens)
        chosen = self._words[plan.sample_positions % len(self._words)]
        return StepResult(plan.step, chosen, np.zeros(len(chosen), np.bool_), None)

    def close(self) -> None:
        pass


def serve_timed(arguments: list[str]) -> None:
    """The server's process: all is real but the device."""
    from engine.build import CacheSizes, make_scheduler
    from engine.draft import SchedulerLimits
    from engine.engine import AsyncEngine
    from engine.models.embedded import embedded_model_path
    from engine.text import load_text
    from engine.types import ModelInfo
    from server.continuation.leases import LeaseTimes
    from server.operation.logs import configure_logging
    from server.operation.metrics import Metrics
    from server.options import parse
    from server.serve import serve

    engine_config, config = parse(arguments)
    configure_logging("info")
    text = load_text(embedded_model_path())
    info = ModelInfo("timed", "timed", 2048, text.tokenizer.vocab_size, (), "none", 0)

    async def load(metrics: Metrics) -> tuple[AsyncEngine, object]:
        sys.setswitchinterval(0.0005)
        limits = SchedulerLimits(engine_config.max_num_seqs, 256, prefix_caching=True)
        runner = TimedRunner(text.tokenizer.encode("one two three four five"))
        scheduler = make_scheduler(limits, CacheSizes(16, 20_000), ())
        engine = AsyncEngine(
            info, scheduler, runner, text.tokenizer, max_queued=engine_config.max_queued, observer=metrics
        )
        return engine, text

    sys.exit(asyncio.run(serve(config, LeaseTimes(300, 600), load)))  # type: ignore[arg-type]


@dataclass
class Figures:
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    sent: int = 0
    answered: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)

    def p99(self, values: list[float]) -> float:
        return float(np.percentile(values, 99)) * 1e3 if values else float("nan")

    def row(self, name: str) -> dict[str, object]:
        return {
            "load": name,
            "sent": self.sent,
            "answered": self.answered,
            "429": self.refused,
            "faults": len(self.faults),
            "itl p50 ms": float(np.percentile(self.gaps, 50)) * 1e3 if self.gaps else float("nan"),
            "itl p99 ms": self.p99(self.gaps),
            "ttft p50 ms": float(np.percentile(self.first, 50)) * 1e3 if self.first else float("nan"),
            "ttft p99 ms": self.p99(self.first),
        }


class Load:
    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = url
        self._draw = random.Random(seed)

    async def ask(self, key: str, figures: Figures) -> bool:
        """Whether it was answered."""
        figures.sent += 1
        prompt = [self._draw.randrange(1000, 30000) for _ in range(PROMPT)]
        count = self._draw.randint(*OUTPUT)
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
        began = time.perf_counter()
        try:
            async with self._session.post(
                f"{self._url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            ) as answer:
                if answer.status == 429 and 1 <= int(answer.headers.get("Retry-After", "0")) <= 60:
                    figures.refused += 1
                    return False
                if answer.status != 200:
                    figures.faults.append(f"{answer.status} {await answer.text()}")
                    return False
                times = [time.perf_counter() async for line in answer.content if line.startswith(b'data: {"id"')]
        except (aiohttp.ClientError, TimeoutError) as error:
            figures.faults.append(repr(error))
            return False
        if len(times) < count // 2:  # a client that lags gets several tokens in one event
            figures.faults.append(f"{len(times)} events")
            return False
        figures.answered += 1
        figures.first.append(times[0] - began)
        figures.gaps.extend(np.diff(times).tolist())
        return True

    async def closed(self, clients: int, seconds: float, key: str = "heavy") -> Figures:
        """Each client asks again when it is answered; one that is refused waits a second, as it was told."""
        figures = Figures()
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                if not await self.ask(key, figures):
                    await asyncio.sleep(1)

        await asyncio.gather(*(client() for _ in range(clients)))
        return figures

    async def arriving(self, rate: float, seconds: float, key: str = "heavy") -> Figures:
        """Requests come at random times, whatever became of those before."""
        figures = Figures()
        end = time.monotonic() + seconds
        tasks = []
        while time.monotonic() < end:
            tasks.append(asyncio.ensure_future(self.ask(key, figures)))
            await asyncio.sleep(self._draw.expovariate(rate))
        await asyncio.gather(*tasks)
        return figures


async def measure(url: str, seconds: float, slots: int) -> tuple[list[dict[str, object]], dict[str, float]]:
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        load = Load(session, url, 1)
        await load.closed(slots, seconds / 6)  # warm up
        began = time.perf_counter()
        full = await load.closed(slots, seconds / 2)
        capacity = full.answered / (time.perf_counter() - began)
        half = await load.arriving(capacity / 2, seconds)
        twice = await load.arriving(capacity * 2, seconds)
        light_rate = capacity / 10
        alone = await load.arriving(light_rate, seconds, "light")
        beside, _ = await asyncio.gather(
            load.arriving(light_rate, seconds, "light"), load.arriving(capacity * 0.4, seconds)
        )
        crowded, crowd = await asyncio.gather(
            load.arriving(light_rate, seconds, "light"), load.closed(10 * slots, seconds)
        )
    rows = [
        full.row("all slots busy"), half.row("half of capacity"), twice.row("twice the capacity"),
        alone.row("light alone"), beside.row("light, half loaded"), crowded.row("light, overloaded"),
        crowd.row("  the heavy one then"),
    ]  # fmt: skip
    ratios = {
        "capacity, requests/s": capacity,
        "p99 inter-token, twice / half": twice.p99(twice.gaps) / half.p99(half.gaps),
        "light's p99 first token, overloaded / half loaded": crowded.p99(crowded.first) / beside.p99(beside.first),
        "light's p99 first token, overloaded / alone": crowded.p99(crowded.first) / alone.p99(alone.first),
    }
    for figures in (full, half, twice, alone, beside, crowded, crowd):
        for fault in figures.faults[:3]:
            print("FAULT", fault)
    return rows, ratios


def start_server(folder: Path, timed: bool) -> tuple[subprocess.Popen[str], str]:
    (folder / "keys.toml").write_text(KEYS)
    flags = ["serve", "--port", "0", "--api-key-file", str(folder / "keys.toml"), "--max-num-seqs", str(SLOTS[timed])]
    flags += ["--max-queued", str(QUEUE[timed]), "--max-model-len", "1024", "--log-level", "info"]
    module = ["benchmarks.overload", "--serve-timed"] if timed else ["server"]
    process = subprocess.Popen([sys.executable, "-m", *module, *flags], stderr=(folder / "log").open("w"), text=True)
    while process.poll() is None:
        if match := re.search(r"ready on (http://\S+)", (folder / "log").read_text()):
            return process, match[1]
        time.sleep(0.1)
    raise SystemExit((folder / "log").read_text())


def main() -> None:
    if sys.argv[1:2] == ["--serve-timed"]:
        serve_timed(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="of each load")
    parser.add_argument("--timed", action="store_true", help="a device that only waits")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = start_server(Path(folder), options.timed)
        try:
            rows, ratios = asyncio.run(measure(url, options.seconds, SLOTS[options.timed]))
        finally:
            process.terminate()
            process.wait(60)
    print("  ".join(f"{name:>20}" if name == "load" else f"{name:>11}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{v:>20}" if k == "load" else f"{v:>11.5g}" for k, v in row.items()))
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
