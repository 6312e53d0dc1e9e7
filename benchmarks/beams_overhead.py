"""What a beam search over HTTP costs the host when the model costs nothing: 32 beams of 3 tokens after a parent of 705.

    python -m benchmarks.beams_overhead [--crowd 64] [--rounds 20] [--profile] [--json FILE]

The server runs on one core over a null runner (benchmarks/server_overhead.py), the client in another process on
another core. CPU time per request is the server's, all its threads; a crowd is timed to the last byte of its last
answer. --profile takes a second round under a profiler and prints where the time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pstats
import statistics
import time
from pathlib import Path

from benchmarks.beams_http import Connection, make_parent
from benchmarks.server_overhead import cpu_seconds, run_server


async def load_server(port: int, pid: int, crowd: int, rounds: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}"
    parent = await make_parent(url)
    connections = [await Connection.open(url) for _ in range(crowd)]
    singles = [await connections[0].timed_search(parent, None) for _ in range(4 * rounds)]
    crowds = []
    before = cpu_seconds(pid)
    for _ in range(rounds):
        began = time.perf_counter()
        await asyncio.gather(*(connection.timed_search(parent, None) for connection in connections))
        crowds.append(time.perf_counter() - began)
    spent = cpu_seconds(pid) - before
    for connection in connections:
        connection.close()
    return {
        "one_ms": 1e3 * statistics.median(singles),
        f"crowd_of_{crowd}_ms": 1e3 * statistics.median(crowds),
        "cpu_us_per_request": 1e6 * spent / (rounds * crowd),
    }


def measure(crowd: int, rounds: int, profile: str | None) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    process, port = run_server(profile, cores[0])
    try:
        return asyncio.run(load_server(port, process.pid, crowd, rounds))
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crowd", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options.crowd, options.rounds, None)
    for name, value in figures.items():
        print(f"{name:24} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    if options.profile:
        profile = f"/tmp/bequest-beams-{os.getpid()}.prof"
        measure(options.crowd, options.rounds, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        pstats.Stats(profile).sort_stats("cumtime").print_stats(90)
        os.unlink(profile)


if __name__ == "__main__":
    main()
