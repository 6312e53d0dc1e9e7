"""Where a crowd of beam searches spends its time: the event loop by phases, each step, and what the device did.

    python -m benchmarks.crowd_timeline --shape qwen3-0.6b [--crowds 8 64] [--rounds 12] [--kernels]     # on a GPU
    python -O -m benchmarks.crowd_timeline --fake                    # the CUDA runner over a device that is not there

Searches of 32 beams × 3 tokens after a resident parent (benchmarks/beams_http.py) come over HTTP, as many at once as
the crowd has, from a client in another process. Times of a phase are its own: what is called inside another phase does
not count for both. The median crowd of each size is printed. A phase costs a microsecond more than without.
--kernels sums what the device ran by torch's profiler, which makes everything else slower.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import statistics
import tempfile
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

from benchmarks.stations import built_loader, fake_loader, served

_PAUSE = 0.08  # seconds between crowds, by which they are told apart
_Span = tuple[str, str, float, float, float]
_spans: list[_Span] = []  # thread, phase, begin, end, and seconds of the processor meanwhile
_steps: dict[int, dict[str, float]] = defaultdict(dict)  # by the step's number
_stacks = threading.local()


def _enter(phase: str) -> None:
    now, spent, stack = time.perf_counter(), time.thread_time(), _stacks.__dict__.setdefault("stack", [])
    if stack:
        outer, began, before = stack[-1]
        _spans.append((threading.current_thread().name, outer, began, now, spent - before))
    stack.append([phase, now, spent])


def _leave() -> None:
    now, spent, stack = time.perf_counter(), time.thread_time(), _stacks.stack
    phase, began, before = stack.pop()
    _spans.append((threading.current_thread().name, phase, began, now, spent - before))
    if stack:
        stack[-1][1:] = now, spent


def measured(owner: Any, name: str, phase: str) -> None:
    """`owner`: a class, or the module that calls the function."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        _enter(phase)
        try:
            return function(*args, **kwargs)
        finally:
            _leave()

    @types.coroutine
    def by_steps(coroutine: Any) -> Generator[Any, Any, Any]:
        send, value = coroutine.send, None
        while True:
            _enter(phase)
            try:
                awaited = send(value)
            except StopIteration as end:
                return end.value
            finally:
                _leave()
            try:
                value, send = (yield awaited), coroutine.send
            except BaseException as error:
                value, send = error, coroutine.throw

    @functools.wraps(function)
    async def stepwise(*args: Any, **kwargs: Any) -> Any:
        return await by_steps(function(*args, **kwargs))

    setattr(owner, name, stepwise if inspect.iscoroutinefunction(function) else plain)


def measure_all() -> None:
    from aiohttp import web_protocol

    from bequest.engine.engine import AsyncEngine
    from bequest.engine.runner.cuda import CudaRunner
    from bequest.engine.runner.cuda_results import PendingResults
    from bequest.engine.scheduling.scheduler import Scheduler
    from bequest.engine.scheduling.step import StepMaker
    from bequest.server import middleware
    from bequest.server.answers import generated
    from bequest.server.asks import call
    from bequest.server.generation import completions
    from bequest.server.transport.protocol import JsonProtocol

    measured(JsonProtocol, "data_received", "HTTP: parse")
    measured(web_protocol.RequestHandler, "start", "HTTP: aiohttp's task")
    measured(middleware, "_answer", "HTTP: middleware")
    measured(middleware, "_note", "HTTP: log and metrics")
    measured(call, "read_body", "ask: body")
    measured(completions, "begin", "ask: call")
    measured(completions, "completion_ask", "ask: validate, parent")
    measured(AsyncEngine, "submit", "engine: submit")
    measured(AsyncEngine, "_on_result", "engine: result")
    measured(AsyncEngine, "_launch_steps", "engine: loop")
    measured(Scheduler, "apply", "engine: apply")
    measured(Scheduler, "plan", "engine: plan")
    measured(Scheduler, "_admit", "engine: admit")
    measured(StepMaker, "make", "engine: arrays of the plan")
    measured(AsyncEngine, "_deliver", "engine: deliver")
    measured(generated, "written", "answer: JSON")
    measured(JsonProtocol, "finish_response", "answer: write")
    _follow_steps(CudaRunner, PendingResults)
    measured(CudaRunner, "launch", "runner: launch")
    measured(PendingResults, "wait", "runner: read")


def _follow_steps(runner: Any, results: Any) -> None:
    launch, wait = runner.launch, results.wait

    def launched(self: Any, plan: Any) -> Any:
        step = _steps[plan.step]
        step["launch"], step["tokens"], step["samples"] = time.perf_counter(), plan.num_tokens, len(plan.samples)
        step["groups"], step["copies"] = len(plan.beams), len(plan.moves.copies)
        told = launch(self, plan)
        step["launched"] = time.perf_counter()
        return told

    def waited(self: Any) -> Any:
        self._copied.synchronize()
        done = time.perf_counter()
        result = wait(self)
        _steps[result.step].update(done=done, device=result.device_seconds)
        return result

    runner.launch, results.wait = launched, waited


def report() -> str:
    spans = sorted(_spans, key=lambda span: span[2])
    crowds: list[list[_Span]] = []
    for span in spans:
        if not crowds or span[2] - max(s[3] for s in crowds[-1][-8:]) > _PAUSE / 2:
            crowds.append([])
        crowds[-1].append(span)
    by_size: dict[int, list[list[_Span]]] = defaultdict(list)
    for crowd in crowds:
        num = sum(span[1] == "engine: submit" for span in crowd)
        by_size[num].append(crowd)
    shown = []
    for num, alike in sorted(by_size.items()):
        if num < 2 or len(alike) < 3:
            continue
        alike.sort(key=lambda crowd: crowd[-1][3] - crowd[0][2])
        shown.append(_told(num, alike[len(alike) // 2], alike))
    return "\n".join(shown)


def _told(num: int, crowd: list[_Span], alike: list[Any]) -> str:
    begin, end = crowd[0][2], max(span[3] for span in crowd)
    walls = [1e3 * (c[-1][3] - c[0][2]) for c in alike]
    lines = [
        f"{num} at once: {1e3 * (end - begin):.1f} ms, the median of {len(alike)} ({walls[0]:.1f} to {walls[-1]:.1f})"
    ]
    threads: dict[str, Counter[str]] = defaultdict(Counter)
    worked: dict[str, Counter[str]] = defaultdict(Counter)
    counts: Counter[str] = Counter()
    for thread, phase, began, ended, spent in crowd:
        threads[thread][phase] += ended - began  # type: ignore[assignment]
        worked[thread][phase] += spent  # type: ignore[assignment]
        counts[phase] += 1
    for thread, phases in threads.items():
        total, spent = sum(phases.values()), sum(worked[thread].values())
        idle = 1e3 * (end - begin - total)
        lines.append(f"  {thread}: {1e3 * total:.1f} ms, {1e3 * spent:.1f} of the processor; elsewhere {idle:.1f}")
        for phase, seconds in phases.most_common():
            processor = 1e3 * worked[thread][phase]
            lines.append(f"    {phase:28}{1e3 * seconds:8.2f} ms {processor:8.2f} {counts[phase]:6}")
    steps = [s for s in _steps.values() if "done" in s and begin <= s["launch"] <= end]
    steps.sort(key=lambda step: step["launch"])
    free, busy = begin, 0.0
    lines.append(
        "  step: tokens samples groups copies; launch launched done since the first byte, device, idle before (ms)"
    )
    for step in steps:
        started = max(free, step["done"] - step["device"])
        at = [1e3 * (step[name] - begin) for name in ("launch", "launched", "done")]
        counted = " ".join(f"{int(step[name]):5}" for name in ("tokens", "samples", "groups", "copies"))
        took, idle = step["done"] - started, started - free
        lines.append(f"    {counted}   {at[0]:7.2f} {at[1]:7.2f} {at[2]:7.2f}   {1e3 * took:6.2f} {1e3 * idle:6.2f}")
        free, busy = step["done"], busy + took
    lines.append(f"  device: {1e3 * busy:.1f} ms in {len(steps)} steps; behind the last {1e3 * (end - free):.2f} ms")
    submits = [span[3] for span in crowd if span[1] == "engine: submit"]
    writes = [span[3] for span in crowd if span[1] == "answer: write"]
    lines.append(_marks("submitted", submits, begin) + "; " + _marks("answered", writes, begin))
    return "\n".join(lines)


def _marks(what: str, at: list[float], begin: float) -> str:
    times = sorted(1e3 * (t - begin) for t in at)
    return f"  {what}: first {times[0]:.1f}, half {times[len(times) // 2]:.1f}, last {times[-1]:.1f} ms"


def serve(port: int, options: argparse.Namespace, folder: str) -> None:
    """Until it is asked to stop; then prints the report."""
    from bequest.server.__main__ import _loop_factory
    from bequest.server.process.options import parse
    from bequest.server.process.serve import serve as run_server
    from bequest.server.stores.leases import LeaseTimes

    arguments = ["--port", str(port)]
    if options.fake:
        load = fake_loader(options.graph_ms / 1e3, options.token_us / 1e6)
    else:
        from benchmarks.model_shapes import write_model

        directory = write_model(options.shape, Path(folder) / options.shape)
        arguments = [str(directory), *arguments, "--max-model-len", "2560", "--load-format", "dummy"]
    engine_config, config = parse(["serve", *arguments, "--log-level", "warning"])
    load = load if options.fake else built_loader(engine_config)
    if not options.kernels:
        measure_all()
    profiler: Any = None

    async def loading(metrics: Any) -> Any:
        nonlocal profiler
        built = await load(metrics)
        if options.kernels:
            import torch.profiler

            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profiler.start()
        return built

    leases = LeaseTimes(engine_config.default_ttl, engine_config.max_ttl)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_server(config, leases, loading))
    if profiler is not None:
        profiler.stop()
        print(_kernels(profiler), flush=True)
    else:
        print(report(), flush=True)


def _kernels(profiler: Any) -> str:
    """What the device ran, by kernel."""
    told = [(event.self_device_time_total / 1e3, event.count, event.key) for event in profiler.key_averages()]
    total = sum(ms for ms, _, _ in told)
    lines = [f"{ms:9.2f} ms {count:7}  {name[:110]}" for ms, count, name in sorted(told, reverse=True)[:40]]
    return "\n".join([f"{total:9.2f} ms in all", *lines])


async def ask(port: int, crowds: list[int], rounds: int) -> None:
    from benchmarks.beams_http import Connection, make_parent

    url = f"http://127.0.0.1:{port}"
    parent = await make_parent(url)
    connections = [await Connection.open(url) for _ in range(max(crowds))]
    await asyncio.gather(*(connection.timed_search(parent, None) for connection in connections))
    for num in crowds:
        times = []
        for _ in range(rounds):
            await asyncio.sleep(_PAUSE)
            began = time.perf_counter()
            await asyncio.gather(*(connection.timed_search(parent, None) for connection in connections[:num]))
            times.append(time.perf_counter() - began)
        print(
            f"{num} at once, for the client: {1e3 * statistics.median(times):.2f} ms (median of {rounds})", flush=True
        )
    for connection in connections:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--graph-ms", type=float, default=1.0)
    parser.add_argument("--token-us", type=float, default=3.0)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--crowds", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(serve, options, folder) as port:
        asyncio.run(ask(port, options.crowds, options.rounds))


if __name__ == "__main__":
    main()
