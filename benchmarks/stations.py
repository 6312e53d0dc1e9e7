"""Time stamps at the stations of a request's way through the server, and their medians.

    python -O -m benchmarks.stations --fake [--graph-ms 1.1]          # the CUDA runner over a device that is not there
    python -m benchmarks.stations --shape qwen3-0.6b                  # on a GPU

Searches of 32 beams × 3 tokens after a resident parent (benchmarks/beams_http.py) are asked for over HTTP, one at a
time, by a client in another process. What is printed is the commonest order of stations, with the median µs since the
one before and since the first. Stamps are taken by wrapped functions, of all threads, and cost half a microsecond each.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

STAMPS: list[tuple[str, int]] = []


def stamp(name: str) -> None:
    STAMPS.append((name, time.perf_counter_ns()))


def wrap(owner: Any, name: str, begins: str | None, ends: str | None) -> None:
    """`owner`: a class, or the module that calls the function."""
    function = getattr(owner, name)

    @functools.wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        if begins is not None:
            stamp(begins)
        result = await function(*args, **kwargs)
        if ends is not None:
            stamp(ends)
        return result

    @functools.wraps(function)
    def stamped(*args: Any, **kwargs: Any) -> Any:
        if begins is not None:
            stamp(begins)
        result = function(*args, **kwargs)
        if ends is not None:
            stamp(ends)
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(function) else stamped)


def wrap_all() -> None:
    """The stations: of the event loop, of the runner, of whoever waits for results."""
    from aiohttp import http_writer, web_protocol

    from bequest.engine.device import DeviceThread
    from bequest.engine.engine import AsyncEngine
    from bequest.engine.runner.cuda import CudaRunner
    from bequest.engine.runner.cuda_buffers import StepBuffers
    from bequest.engine.runner.cuda_results import PendingResults
    from bequest.engine.scheduling.scheduler import Scheduler

    wrap(web_protocol.RequestHandler, "data_received", "bytes in", None)
    for method in ("_write", "_writelines"):
        wrap(http_writer.StreamWriter, method, "write", "bytes out")
    wrap(AsyncEngine, "submit", "submit", "submitted")
    wrap(AsyncEngine, "_on_result", "on the loop", None)
    wrap(Scheduler, "apply", "apply", "applied")
    wrap(Scheduler, "plan", "plan", "planned")
    wrap(AsyncEngine, "_deliver", "deliver", "delivered")
    wrap(DeviceThread, "launch", None, "handed over")
    wrap(CudaRunner, "launch", "launch", "launched")
    wrap(CudaRunner, "_stage", "lists written", None)
    wrap(StepBuffers, "send", "staged", "sent")
    wrap(CudaRunner, "_collect", "graph launched", None)
    wait = PendingResults.wait

    def stamped_wait(self: PendingResults) -> Any:
        self._copied.synchronize()
        stamp("computed")
        result = wait(self)
        stamp("read")
        return result

    PendingResults.wait = stamped_wait  # type: ignore[method-assign]


def report(requests: int) -> str:
    """Medians over the last requests that took the commonest way."""
    ways: list[list[tuple[str, int]]] = []
    for name, at in sorted(STAMPS, key=lambda s: s[1]):
        if name == "bytes in":
            ways.append([])
        if ways:
            ways[-1].append((name, at))
    ways = [way for way in ways if sum(n == "launched" for n, _ in way) >= 3][-requests:]
    if not ways:
        return "no requests"
    names, count = Counter(tuple(n for n, _ in way) for way in ways).most_common(1)[0]
    alike = np.asarray([[at for _, at in way] for way in ways if tuple(n for n, _ in way) == names]) / 1e3
    since = np.median(np.diff(alike, axis=1, prepend=alike[:, :1]), axis=0)
    total = np.median(alike - alike[:, :1], axis=0)
    lines = [f"{count} of {len(ways)} requests took this way (µs)"]
    lines += [f"{name:18}{a:9.0f}{b:9.0f}" for name, a, b in zip(names, since, total, strict=True)]
    return "\n".join(lines)


def fake_loader(graph_seconds: float, token_seconds: float = 0.0) -> Callable[..., Any]:
    """An engine over the CUDA runner of a 0.6B shape without layers' work; each token of a graph may take longer."""
    from benchmarks import fake_cuda

    fake_cuda.install()
    import torch

    from bequest.engine.build import CacheSizes, make_scheduler
    from bequest.engine.engine import AsyncEngine
    from bequest.engine.models.embedded import embedded_model_path
    from bequest.engine.models.strips import KvHeads, divide
    from bequest.engine.runner.cuda import CudaRunner, RunnerLimits, _Graph, _Outputs
    from bequest.engine.runner.cuda_adapters import CudaAdapters
    from bequest.engine.scheduling.limits import SchedulerLimits
    from bequest.engine.text import load_text
    from bequest.engine.types import ModelInfo

    text = load_text(embedded_model_path())
    vocab = text.tokenizer.vocab_size
    strips = divide((0,), (KvHeads(8, 8),))
    config = SimpleNamespace(vocab_size=vocab, hidden_size=64, strips=strips, num_heads=16, num_layers=28)
    model = SimpleNamespace(config=config)
    kv_cache = torch.zeros(4000, 1, 2, 8, 16, 8, dtype=torch.bfloat16)
    limits, adapters = (
        RunnerLimits(256, 8192, 2560 // 16, 1024),
        CudaAdapters({}, 0, 16, kv_cache.device, torch.bfloat16),
    )
    runner = CudaRunner(model, kv_cache, torch.bfloat16, 16, limits, adapters)  # type: ignore[arg-type]
    logits = torch.zeros(2048, vocab, dtype=torch.bfloat16)
    for size in runner._ladder.sizes():
        outputs = _Outputs(logits[:, :64], logits[: size.num_samples])
        graph = fake_cuda.Graph(graph_seconds + token_seconds * size.num_tokens)
        runner._graphs[size] = _Graph(graph, outputs)  # type: ignore[arg-type]
    info = ModelInfo("fake", "fake", 2560, vocab, (), "none", 0)

    async def load(metrics: Any) -> tuple[AsyncEngine, object]:
        sys.setswitchinterval(0.0001)
        scheduler = make_scheduler(
            SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=8192, prefix_caching=True, follows_beams=True),
            CacheSizes(16, 4000),
            (),
        )
        return AsyncEngine(info, scheduler, runner, text.tokenizer, observer=metrics), text

    return load


def serve(port: int, options: argparse.Namespace, folder: str) -> None:
    """Until it is asked to stop; then prints the report."""
    if options.fake:
        run_stamped(["--port", str(port)], lambda config: fake_loader(options.graph_ms / 1e3))
    else:
        from benchmarks.model_shapes import write_model

        directory = write_model(options.shape, Path(folder) / options.shape)
        run_stamped([str(directory), "--port", str(port), "--max-model-len", "2560"])
    print(report(options.rounds), flush=True)


def built_loader(config: Any) -> Callable[..., Any]:
    """An engine as the server has it, with random weights."""

    async def load(metrics: Any) -> Any:
        from bequest.engine.build import build_engine

        built = await build_engine(config, metrics)
        return built.engine, built.text

    return load


def run_stamped(arguments: list[str], loader: Callable[[Any], Callable[..., Any]] = built_loader) -> None:
    """A server with these arguments, until it is asked to stop."""
    from bequest.server.__main__ import _loop_factory
    from bequest.server.process.options import parse
    from bequest.server.process.serve import serve as run_server
    from bequest.server.stores.leases import LeaseTimes

    random_weights = ["--load-format", "dummy"] if loader is built_loader else []
    engine_config, config = parse(["serve", *arguments, "--log-level", "warning", *random_weights])
    load = loader(engine_config)
    wrap_all()
    leases = LeaseTimes(engine_config.default_ttl, engine_config.max_ttl)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_server(config, leases, load))


async def ask(port: int, rounds: int) -> dict[str, float]:
    from benchmarks.beams_http import Connection, make_parent

    url = f"http://127.0.0.1:{port}"
    parent = await make_parent(url)
    connection = await Connection.open(url)
    times = [await connection.timed_search(parent, None) for _ in range(rounds + 10)]
    connection.close()
    return {"one_ms": 1e3 * statistics.median(times[10:]), "p90_ms": 1e3 * statistics.quantiles(times[10:], n=10)[8]}


@contextmanager
def served(target: Callable[..., None], *args: Any) -> Iterator[int]:
    """The port of a process that serves: `target` of the port and `args`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=target, args=(port, *args))
    process.start()
    while process.is_alive() and not _is_up(port):
        time.sleep(0.1)
    try:
        yield port
    finally:
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--graph-ms", type=float, default=1.1)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(serve, options, folder) as port:
        figures = asyncio.run(ask(port, options.rounds))
    for name, value in figures.items():
        print(f"{name:18}{value:9.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def _is_up(port: int) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


if __name__ == "__main__":
    main()
