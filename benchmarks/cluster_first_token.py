"""What the router adds to the first token, over a model that costs nothing.

    python -m benchmarks.cluster_first_token [--count 400] [--json FILE]

Three servers of benchmarks/server_overhead.py stand behind the router. Direct and routed calls take turns in one run,
so that both meet the same machine, and go to the same server. Three kinds of calls:

- kept: on a connection that is kept open, as the clients of SDKs do;
- fresh: on a connection of its own; the clock runs while it is made;
- long: a chat of 60 KB on a kept connection, nearly all that the router reads of a body.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.server_overhead import run_server
from bequest.cluster.haproxy import Backend
from bequest.cluster.router import Router, RouterPlace

_PATIENCE = 60.0  # seconds until servers take work
_WARM_UP = 20  # calls of each kind
_LONG_BYTES, _WORD = 60_000, "international "
_END = b"\r\n0\r\n\r\n"  # of a body in chunks


def request(path: str, fields: dict[str, Any]) -> bytes:
    body = json.dumps({"model": "null", "max_tokens": 1, "stream": True, **fields}).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Bequest-Replica: r1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def first_event(connection: socket.socket, asked: bytes) -> float:
    """When it came (time.perf_counter). Reads the answer to its end."""
    connection.sendall(asked)
    data, came = b"", 0.0
    while not data.endswith(_END):
        piece = connection.recv(1 << 16)
        data += piece
        assert piece and data.startswith(b"HTTP/1.1 200"), f"no stream: {data[:1000]!r}"
        if not came and b"data: " in data:
            came = time.perf_counter()
    return came


def milliseconds(connection: socket.socket | int, asked: bytes) -> float:
    """On a connection, or on a new one to a port."""
    began = time.perf_counter()
    if isinstance(connection, socket.socket):
        return 1000 * (first_event(connection, asked) - began)
    with connect(connection) as made:
        return 1000 * (first_event(made, asked) - began)


def measure(ports: dict[str, int], count: int) -> dict[str, dict[str, float]]:
    """Medians by kind and way."""
    short = request("/v1/completions", {"prompt": "Tell me a story."})
    talk = [
        {"role": "system", "content": "Tell stories."},
        {"role": "user", "content": _WORD * (_LONG_BYTES // len(_WORD))},
    ]
    long = request("/v1/chat/completions", {"messages": talk})
    kept = {way: connect(port) for way, port in ports.items()}
    kinds = {"kept": (short, kept), "fresh": (short, ports), "long": (long, kept)}
    times: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in ports} for kind in kinds}
    for number in range(count + _WARM_UP):
        for kind, (asked, places) in kinds.items():
            for way, place in places.items():
                took = milliseconds(place, asked)
                if number >= _WARM_UP:
                    times[kind][way].append(took)
    for connection in kept.values():
        connection.close()
    return {kind: {way: statistics.median(took) for way, took in ways.items()} for kind, ways in times.items()}


def run(count: int, port: int) -> dict[str, dict[str, float]]:
    cores = sorted(os.sched_getaffinity(0))
    servers = [run_server(None, cores[number % len(cores)]) for number in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        peers = {"router1": f"127.0.0.1:{port + 50}"}
        router = Router(RouterPlace(host="127.0.0.1", port=port, folder=Path(folder), peers=peers), {})
        try:
            for _, at in servers:
                wait_for(at)
            router.start([Backend(f"r{number}", "127.0.0.1", at) for number, (_, at) in enumerate(servers, 1)])
            return measure({"direct": servers[0][1], "routed": port}, count)
        finally:
            router.stop()
            for process, _ in servers:
                process.terminate()
                process.wait()


def wait_for(port: int) -> None:
    """Until a server takes work."""
    end = time.monotonic() + _PATIENCE
    while True:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return
        assert time.monotonic() < end, "a server does not start"
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="calls of each kind and way")
    parser.add_argument("--port", type=int, default=18600)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    before = os.getloadavg()[0]
    medians = run(given.count, given.port)
    load = f"load {before:.1f} to {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"first token, medians of {given.count} calls in ms; {load}")
    for kind, ways in medians.items():
        added = ways["routed"] - ways["direct"]
        print(f"{kind:<6} direct {ways['direct']:6.2f}   routed {ways['routed']:6.2f}   added {added:+.2f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"medians": medians, "load": [before, os.getloadavg()[0]]}))


if __name__ == "__main__":
    main()
