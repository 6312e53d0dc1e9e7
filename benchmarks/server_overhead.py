"""How many tokens per second the server streams when the model costs nothing, and where the time goes.

    python -m benchmarks.server_overhead [--streams 64] [--tokens 400] [--json FILE]
    python -m benchmarks.server_overhead --beside TREE [--streams 256] [--tokens 256]

The server runs on one core (the real app, engine and tokenizer over a null runner), the client in a second process
on another: raw sockets that count events, so that the client is not what is measured. A second round runs under a
profiler and prints each part's share of the server's time. With another tree, mostly the one before a change, the
servers of both are up and loaded by turns: on a machine that others use, only their ratios mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent.parent
# The parts of the server's time, by the file a function lives in; the first match counts.
PARTS = [
    ("engine: apply", ("engine/scheduling/results.py", "take_sample", "accept")),
    (
        "engine: plan",
        ("engine/scheduling/", "engine/state/", "engine/work/", "prepare_batch", "BlockTable", "TokenList"),
    ),
    ("engine: text", ("engine/outputs.py", "engine/text/", "DecodeStream", "decoders.")),
    ("engine: loop", ("engine/engine.py", "engine/device.py")),
    (
        "server: format",
        (
            "server/answers/chunks.py",
            "server/generation/chat.py",
            "server/generation/completions.py",
            "orjson",
        ),
    ),
    ("server: stream", ("server/transport/sse.py", "pass_on")),
    ("server: metrics", ("server/operation/metrics.py",)),
    ("socket writes", ("method 'write'", "transport", "uvloop")),
    ("null runner", ("null_runner",)),
]


def serve(port: int, profile: str | None) -> None:
    """The server process: everything is real but the model."""
    from benchmarks.null_runner import NullRunner
    from bequest.engine.build import CacheSizes, make_scheduler
    from bequest.engine.engine import AsyncEngine
    from bequest.engine.models.embedded import embedded_model_path
    from bequest.engine.scheduling.limits import SchedulerLimits
    from bequest.engine.text import load_text
    from bequest.engine.types import ModelInfo
    from bequest.server.__main__ import _loop_factory
    from bequest.server.operation.metrics import Metrics
    from bequest.server.process.options import parse
    from bequest.server.process.serve import serve as run_server
    from bequest.server.stores.leases import LeaseTimes

    text = load_text(embedded_model_path())
    words = np.asarray(text.tokenizer.encode(Path(__file__).read_text() * 2, add_special_tokens=False))
    info = ModelInfo("null", "null", 8192, text.tokenizer.vocab_size, (), "none", 0)

    async def load(metrics: Metrics) -> tuple[AsyncEngine, object]:
        sys.setswitchinterval(0.0005)
        scheduler = make_scheduler(
            SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=2048, prefix_caching=True),
            CacheSizes(16, 20_000),
            (),
        )
        return AsyncEngine(info, scheduler, NullRunner(words), text.tokenizer, observer=metrics), text

    engine_config, config = parse(["serve", "--port", str(port), "--log-level", "warning"])
    leases = LeaseTimes(engine_config.default_ttl, engine_config.max_ttl)
    profiler = cProfile.Profile(time.thread_time) if profile else None  # others share the machine

    async def main() -> int:
        if profiler:
            profiler.enable()
        try:
            return await run_server(config, leases, load)  # type: ignore[arg-type]
        finally:
            if profiler and profile:
                profiler.disable()
                profiler.dump_stats(profile)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        sys.exit(runner.run(main()))


async def one_stream(port: int, tokens: int) -> int:
    """Opens a stream and counts its events."""
    body = json.dumps(
        {
            "model": "null",
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": tokens,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    events, tail = 0, b""
    while data := await reader.read(1 << 18):
        events += (tail + data).count(b"data: ") - tail.count(b"data: ")
        tail = data[-5:]
    writer.close()
    return events


async def load_server(port: int, streams: int, tokens: int) -> tuple[float, int]:
    started = time.perf_counter()
    events = await asyncio.gather(*(one_stream(port, tokens) for _ in range(streams)))
    return time.perf_counter() - started, sum(events)


def run_server(profile: str | None, core: int, tree: Path = HERE) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.server_overhead", "--serve", str(port)]
    command += ["--profile", profile] if profile else []
    process = subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, port
        time.sleep(0.1)
    process.kill()
    raise SystemExit("the server did not start")


def shares(profile: str) -> dict[str, float]:
    """Own time of each part, as a share of all but waiting."""
    own: dict[str, float] = defaultdict(float)
    for (file, _, name), (_, _, seconds, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        where = f"{file} {name}"
        if "'run_until_complete'" in where or "poll" in where or "threading" in where:
            continue
        own[next((part for part, keys in PARTS if any(k in where for k in keys)), "other")] += seconds
    total = sum(own.values())
    return {part: seconds / total for part, seconds in sorted(own.items(), key=lambda item: -item[1])}


def measure(streams: int, tokens: int, rounds: int) -> dict[str, object]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    process, port = run_server(None, cores[0])
    try:
        asyncio.run(load_server(port, streams, 32))  # warm up
        rates, cpu = [], []
        for _ in range(rounds):
            rate, spent = measure_once(process, port, streams, tokens)
            rates.append(rate)
            cpu.append(spent)
    finally:
        process.terminate()
        process.wait()
    profile = f"/tmp/bequest-overhead-{os.getpid()}.prof"
    process, port = run_server(profile, cores[0])
    try:
        asyncio.run(load_server(port, streams, tokens))
    finally:
        process.terminate()
        process.wait()
    parts = shares(profile)
    os.unlink(profile)
    return {
        "streams": streams,
        "tokens_per_stream": tokens,
        "tokens_per_second": float(np.median(rates)),
        "cpu_us_per_token": float(np.median(cpu)),
        "shares": parts,
    }


def measure_once(process: subprocess.Popen[bytes], port: int, streams: int, tokens: int) -> tuple[float, float]:
    """Tokens per second, and µs of the server's CPU for a token."""
    before = cpu_seconds(process.pid)
    seconds, _ = asyncio.run(load_server(port, streams, tokens))
    return streams * tokens / seconds, (cpu_seconds(process.pid) - before) / (streams * tokens) * 1e6


def compare(other: Path, streams: int, tokens: int, rounds: int) -> None:
    """By turns; prints what each took, and the ratios of this tree's by the other's."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    servers = [run_server(None, cores[0], tree) for tree in (other, HERE)]
    try:
        spent: list[list[float]] = [[], []]
        for turn in range(rounds + 1):  # the first warms up
            for i in (0, 1) if turn % 2 else (1, 0):
                spent[i].append(measure_once(*servers[i], streams, tokens if turn else 32)[1])
    finally:
        for process, _ in servers:
            process.terminate()
            process.wait()
    ratios = [now / before for before, now in zip(spent[0][1:], spent[1][1:], strict=True)]
    for name, figures in (("before", spent[0][1:]), ("now", spent[1][1:])):
        print(f"  {name:8}", " ".join(f"{figure:.1f}" for figure in figures), "µs of CPU per token")
    print("  ratios  ", " ".join(f"{ratio:.2f}" for ratio in ratios), f"median {np.median(ratios):.3f}")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="another tree, whose server takes turns with this one's")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--profile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.profile)
    if options.beside is not None:
        compare(options.beside, options.streams, options.tokens, options.rounds)
        return
    figures = measure(options.streams, options.tokens, options.rounds)
    print(f"{options.streams} streams × {options.tokens} tokens, server on one core")
    print(f"  {figures['tokens_per_second']:,.0f} tokens/s, {figures['cpu_us_per_token']:.1f} µs of CPU per token")
    print("  where the time goes (under a profiler, which inflates Python against C):")
    for part, share in figures["shares"].items():  # type: ignore[attr-defined]
        print(f"    {part:18} {share:6.1%}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
