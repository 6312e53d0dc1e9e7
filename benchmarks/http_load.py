"""Streaming load over HTTP, from client processes of its own: tokens per second, first-token and inter-token times.

    python -m benchmarks.http_load --shape qwen3-0.6b [--concurrency 1,16,64,256] [--json FILE]   # starts a server
    python -m benchmarks.http_load --shape llama-3.1-8b --quantization fp8 --kv-cache-dtype fp8   # the same, in codes
    python -m benchmarks.http_load --url http://127.0.0.1:8000 [--concurrency 1,4]                # uses a running one

Each client keeps its share of the connections busy with requests of random tokens, 512 in and 256 out by default, one
after another on each connection: three, of 256 connections or more two, or as many as `--rounds` says. The clients read
raw bytes, so that parsing JSON is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.model_shapes import SHAPES, write_model

WARM_TOKENS = 256  # of answers before anything is timed


@dataclass(frozen=True)
class Load:
    url: str
    connections: int
    requests: int
    prompt_len: int
    output_len: int
    seed: int


async def one_request(load: Load, number: int) -> tuple[float, list[float]]:
    """Seconds to the first event, and the times of all events."""
    draw = random.Random(load.seed * 100_003 + number)
    body = json.dumps(
        {
            "prompt": [draw.randrange(1000, 30000) for _ in range(load.prompt_len)],
            "max_tokens": load.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    where = urlsplit(load.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    began = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    times: list[float] = []
    tail = b""
    while data := await reader.read(1 << 16):
        events = (tail + data).count(b'data: {"id"') - tail.count(b'data: {"id"')
        times.extend([time.perf_counter()] * events)
        tail = data[-10:]
    writer.close()
    if len(times) < load.output_len // 2:
        raise RuntimeError(f"a stream ended after {len(times)} events: {tail!r}")
    return times[0] - began, times


async def run_client(load: Load) -> tuple[list[float], list[float]]:
    numbers = iter(range(load.requests))
    first: list[float] = []
    gaps: list[float] = []

    async def connection() -> None:
        for number in numbers:
            seconds, times = await one_request(load, number)
            first.append(seconds)
            gaps.extend(np.diff(times).tolist())

    await asyncio.gather(*(connection() for _ in range(load.connections)))
    return first, gaps


def client_process(load: Load) -> tuple[list[float], list[float]]:
    return asyncio.run(run_client(load))


def measure(
    url: str,
    concurrency: int,
    prompt_len: int,
    output_len: int,
    processes: int,
    round_number: int,
    rounds: int | None = None,
) -> dict[str, float]:
    clients = min(processes, concurrency)
    per_client = concurrency // clients
    requests = (rounds or (3 if concurrency < 256 else 2)) * per_client
    loads = [
        Load(url, per_client, requests, prompt_len, output_len, seed=round_number * 1000 + i) for i in range(clients)
    ]
    with multiprocessing.get_context("spawn").Pool(clients) as pool:
        pool.map(abs, range(clients))  # the processes are up
        began = time.perf_counter()
        results = pool.map(client_process, loads, chunksize=1)
        seconds = time.perf_counter() - began
    first = np.concatenate([f for f, _ in results]) * 1e3
    gaps = np.concatenate([g for _, g in results]) * 1e3
    return {
        "concurrency": concurrency,
        "tokens_per_second": clients * requests * output_len / seconds,
        "ttft_p50_ms": float(np.percentile(first, 50)),
        "ttft_p99_ms": float(np.percentile(first, 99)),
        "itl_p50_ms": float(np.percentile(gaps, 50)),
        "itl_p99_ms": float(np.percentile(gaps, 99)),
    }


def start_server(
    directory: Path, max_model_len: int = 2560, flags: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str, float]:
    """The process, its address, and how long it took to be ready."""
    command = [sys.executable, "-m", "bequest", "serve", str(directory), "--port", "0", "--load-format", "dummy"]
    command += flags
    began = time.perf_counter()
    process = subprocess.Popen([*command, "--max-model-len", str(max_model_len)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"ready on (http://\S+)", line):
            return process, match[1], time.perf_counter() - began
        print("   ", line.rstrip())
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--concurrency", default="1,16,64,256")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--rounds", type=int, help="requests of each connection")
    parser.add_argument("--quantization", choices=["auto", "fp8"], default="auto", help="of the server's weights")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="of the server's cache")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = None, options.url
        if url is None:
            flags = ["--quantization", options.quantization, "--kv-cache-dtype", options.kv_cache_dtype]
            process, url, ready = start_server(write_model(options.shape, Path(folder) / options.shape), flags=flags)
            print(f"{options.shape}: ready in {ready:.1f} s")
        try:
            lengths = (options.prompt_len, options.output_len)
            measure(url, 4, options.prompt_len, min(options.output_len, WARM_TOKENS), options.processes, 0)
            rows = [
                measure(url, int(c), *lengths, options.processes, i + 1, options.rounds)
                for i, c in enumerate(options.concurrency.split(","))
            ]
        finally:
            if process is not None:
                process.terminate()
                process.wait()
    names = list(rows[0])
    print("  ".join(f"{name:>18}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]:18,.1f}" for name in names))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
