"""How many tokens one, two and three replicas stream through the router when the model costs nothing.

    python -m benchmarks.cluster_throughput [--replicas 1,2,3] [--streams 48] [--tokens 200] [--json FILE]

The servers are those of benchmarks/server_overhead.py, everything real but the model. The clients count events on raw
sockets. Tokens per second depend on the cores that there are for servers, router and clients together; the processor
time of each token and each request, in the router and in the servers, does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.server_overhead import cpu_seconds, load_server, run_server
from bequest.cluster.haproxy import Backend
from bequest.cluster.router import Router, RouterPlace

_SETTLE = 1.5  # seconds until the router has found its servers


def measure(replicas: int, streams: int, tokens: int, requests: int, port: int) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))
    servers = [run_server(None, cores[number % len(cores)]) for number in range(replicas)]
    with tempfile.TemporaryDirectory() as folder:
        place = RouterPlace(
            host="127.0.0.1", port=port, folder=Path(folder), peers={"router1": f"127.0.0.1:{port + 50}"}
        )
        router = Router(place, {})
        try:
            router.start([Backend(f"r{number}", "127.0.0.1", at) for number, (_, at) in enumerate(servers, 1)])
            time.sleep(_SETTLE)
            pids = [process.pid for process, _ in servers]
            asyncio.run(load_server(port, streams, 16))  # warm up
            long = _counted(port, streams, tokens, router.worker_pid, pids)
            short = _counted(port, requests, 1, router.worker_pid, pids)
        finally:
            router.stop()
            for process, _ in servers:
                process.terminate()
                process.wait()
    per_token, per_request = 1e6 / (streams * tokens), 1e6 / requests
    return {
        "replicas": replicas,
        "tokens per second": streams * tokens / long[0],
        "router µs per token": long[1] * per_token,
        "server µs per token": long[2] * per_token,
        "requests per second": requests / short[0],
        "router µs per request": short[1] * per_request,
        "server µs per request": short[2] * per_request,
    }


def _counted(port: int, streams: int, tokens: int, router: int, servers: Sequence[int]) -> tuple[float, float, float]:
    """Seconds of the clock, and of the processor in the router and in all servers."""
    before = cpu_seconds(router), sum(map(cpu_seconds, servers))
    seconds, events = asyncio.run(load_server(port, streams, tokens))
    assert events >= streams, "every stream was answered; what a client lags behind comes as one event"
    return seconds, cpu_seconds(router) - before[0], sum(map(cpu_seconds, servers)) - before[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,2,3")
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400, help="of one token")
    parser.add_argument("--port", type=int, default=18500)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    columns = [
        measure(int(count), given.streams, given.tokens, given.requests, given.port)
        for count in given.replicas.split(",")
    ]
    print(f"{given.streams} streams of {given.tokens} tokens; {given.requests} requests of one; {os.cpu_count()} cores")
    for name in columns[0]:
        print(f"{name:<24}" + "".join(f"{column[name]:>12,.1f}" for column in columns))
    if given.json is not None:
        given.json.write_text(json.dumps(columns))


if __name__ == "__main__":
    main()
