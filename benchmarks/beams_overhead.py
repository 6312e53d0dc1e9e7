"""What a beam search over HTTP costs the host when the model costs nothing: 32 beams of 3 tokens after a parent of 705.

    python -m benchmarks.beams_overhead [--crowd 64] [--rounds 20] [--profile] [--json FILE]
    python -m benchmarks.beams_overhead --beside TREE [--rounds 20]

The server runs on one core over a null runner (benchmarks/server_overhead.py), the client in another process on
another core. CPU time per request is the server's, all its threads; a crowd is timed to the last byte of its last
answer. --profile takes a second round under a profiler and prints where the time goes. With another tree, mostly the
one before a change, fresh servers of both are loaded by turns, by 1, 8 and 64 at once: only their ratios mean something
on a machine that others use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.beams_http import Connection, make_parent
from benchmarks.server_overhead import HERE, cpu_seconds, run_server


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


_CROWDS = {1: 48, 8: 12, 64: 3}  # in a turn: how many crowds of each size


async def load_by_turns(servers: list[tuple[int, int]], rounds: int) -> dict[int, list[list[float]]]:
    """CPU µs of each search by the size of its crowd: a pair for each round, of the servers (process, port)."""
    urls = [f"http://127.0.0.1:{port}" for _, port in servers]
    parents = [await make_parent(url) for url in urls]
    connections = [[await Connection.open(url) for _ in range(max(_CROWDS))] for url in urls]
    spent: dict[int, list[list[float]]] = {crowd: [] for crowd in _CROWDS}
    for turn in range(rounds + 1):  # the first warms up
        for crowd, times in _CROWDS.items():
            pair = [0.0, 0.0]
            for i in (0, 1) if turn % 2 else (1, 0):
                before = _cpu_ns(servers[i][0])
                for _ in range(times):
                    await asyncio.gather(*(c.timed_search(parents[i], None) for c in connections[i][:crowd]))
                pair[i] = (_cpu_ns(servers[i][0]) - before) / 1e3 / (times * crowd)
            if turn:
                spent[crowd].append(pair)
    for connection in connections[0] + connections[1]:
        connection.close()
    return spent


def _cpu_ns(pid: int) -> int:
    """Of all its threads, in finer steps than those of /proc/PID/stat."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def compare(other: Path, rounds: int) -> None:
    """By turns; prints what each took, and the ratios of this tree's by the other's."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    servers = [run_server(None, cores[0], tree) for tree in (other, HERE)]
    try:
        spent = asyncio.run(load_by_turns([(process.pid, port) for process, port in servers], rounds))
    finally:
        for process, _ in servers:
            process.terminate()
            process.wait()
    for crowd, pairs in spent.items():
        ratio = statistics.median(now / before for before, now in pairs)
        print(f"{crowd:3} at once: {_told(pairs, statistics.median)}; median ratio of {len(pairs)} pairs {ratio:.3f}")
        print(f"{'the best eighth:':>16} {_told(pairs, _best)}")


def _told(pairs: list[list[float]], middle: Callable[[list[float]], float]) -> str:
    before, now = (middle(list(figures)) for figures in zip(*pairs, strict=True))
    return f"{before:.0f} µs of CPU a search before, {now:.0f} now ({now / before:.3f})"


def _best(figures: list[float]) -> float:
    """Others take turns at the caches of a shared machine: what is least disturbed says most."""
    return statistics.mean(sorted(figures)[: max(1, len(figures) // 8)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crowd", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path, help="another tree, whose server takes turns with this one's")
    options = parser.parse_args()
    if options.beside is not None:
        compare(options.beside, options.rounds)
        return
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
