"""What a stream's step does outside its layers on a GPU: a time line from its last layer to the next step's first one.

    python -m benchmarks.gpu_edges [--shape qwen3-0.6b] [--weights auto|int4] [--replays 200]

Means over the steps of one stream with the same kernels, of an engine with random weights: when each kernel begins and
ends, behind the end of the product over the vocabulary, and what passed since anything ran. A profiler makes steps
longer, so what stands around a graph is timed without it, too: replays of the graph of one row over padding, with and
without copies and events.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_engine import run_requests
from benchmarks.gpu_step import PROMPT, STEPS, engine_config
from benchmarks.model_shapes import SHAPES
from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.kernels.streams import copy_bytes, record

_CHAIN, _STACK = "skinny_chain_kernel", "row_stack_kernel"
_SHOWN = 34  # characters of a kernel's name

Kernel = tuple[str, float, float, int]  # name, begin and end in µs, correlation


def short_name(name: str) -> str:
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return bare.split("<")[0].split("(")[0].split("::")[-1][:_SHOWN]


def recorded(profile: Any) -> tuple[list[Kernel], dict[int, tuple[str, float, float]]]:
    """Kernels in the order of their ends, and calls of the runtime by correlation."""
    kernels, calls = [], {}
    for event in profile.profiler.kineto_results.events():
        begin, end = event.start_ns() / 1e3, event.end_ns() / 1e3
        if event.device_type().name == "CUDA":
            kernels.append((event.name(), begin, end, event.correlation_id()))
        elif event.name().startswith(("cuda", "cu")):
            calls[event.correlation_id()] = event.name(), begin, end
    return sorted(kernels, key=lambda kernel: kernel[2]), calls


def _has_layers(kernel: Kernel) -> bool:
    return _CHAIN in kernel[0] or _STACK in kernel[0]


def windows(kernels: list[Kernel]) -> list[list[Kernel]]:
    """From the last layer before a product over the vocabulary to the second one behind it; where one kernel has all
    layers, to that one."""
    heads = [i for i, kernel in enumerate(kernels) if "skinny_stream_kernel" in kernel[0]]
    longest = max(kernels[i][2] - kernels[i][1] for i in heads)
    found = []
    for i in (i for i in heads if kernels[i][2] - kernels[i][1] > longest / 2):
        first = next((j for j in range(i, -1, -1) if _has_layers(kernels[j])), None)
        layers = [j for j in range(i, min(i + 40, len(kernels))) if _has_layers(kernels[j])]
        last = 0 if first is not None and _STACK in kernels[first][0] else 1
        if first is not None and len(layers) > last:
            found.append(kernels[first : layers[last] + 1])
    names = Counter(tuple(short_name(kernel[0]) for kernel in window) for window in found)
    usual = names.most_common(1)[0][0]
    return [window for window in found if tuple(short_name(kernel[0]) for kernel in window) == usual]


def show_windows(found: list[list[Kernel]], calls: dict[int, tuple[str, float, float]]) -> None:
    print(f"  {len(found)} steps; µs behind the end of the product over the vocabulary, means")
    print(f"  {'begin':>9} {'end':>9} {'idle':>7} {'to end':>7} {'ahead':>8}  kernel")
    heads = [next(k[2] for k in window if "skinny_stream_kernel" in k[0]) for window in found]
    last: list[float] | None = None
    for rows in zip(*found, strict=True):
        begins = [row[1] - head for row, head in zip(rows, heads, strict=True)]
        ends = [row[2] - head for row, head in zip(rows, heads, strict=True)]
        idle = None if last is None else statistics.mean(b - e for b, e in zip(begins, last, strict=True))
        took = None if last is None else statistics.mean(b - e for b, e in zip(ends, last, strict=True))
        ahead = [row[1] - calls[row[3]][1] for row in rows if row[3] in calls]  # behind the begin of its call
        last = [max(e, b) for e, b in zip(ends, last or ends, strict=True)]
        print(
            f"  {statistics.mean(begins):9.2f} {statistics.mean(ends):9.2f} {_figure(idle, 7)} {_figure(took, 7)} "
            f"{_figure(statistics.mean(ahead) if ahead else None, 8)}  {short_name(rows[0][0])}"
        )


def _figure(value: float | None, width: int) -> str:
    return " " * width if value is None else f"{value:{width}.2f}"


def show_calls(calls: dict[int, tuple[str, float, float]], steps: int) -> None:
    took: dict[str, list[float]] = {}
    for name, begin, end in calls.values():
        took.setdefault(name, []).append(end - begin)
    for name, each in sorted(took.items(), key=lambda item: -sum(item[1]))[:10]:
        print(f"  host: {len(each) / steps:7.2f} {name} a step, {statistics.median(each):7.2f} µs each")


def queue_times(built: Built, replays: int) -> None:
    """µs of what a step queues, in turns, without a profiler."""
    runner: Any = built.engine._device._runner._runner  # type: ignore[attr-defined] # of the one that can sleep
    size, captured = next(
        (size, graph) for size, graph in runner._graphs.items() if size.num_tokens == 1 and size.merges
    )
    staging, results = runner._buffers.of(size).staging, runner._results
    inputs = staging.used_bytes("block_tables", 1)
    events = [torch.cuda.Event(enable_timing=timed) for timed in (True, False, True)]
    print(f"  inputs of one row: {inputs} bytes")

    def copy_in() -> None:
        copy_bytes(staging._device_address, staging._addresses[0], inputs)

    def copy_out() -> None:
        copy_bytes(results._addresses[0], results._device_address, 5 * 1024)

    marks: list[Callable[[], None]] = [lambda event=event: record(event) for event in events]  # type: ignore[misc]
    replay = captured.graph.replay
    ways: dict[str, list[Callable[[], None]]] = {
        "graph": [replay],
        "graph, event": [replay, marks[2]],
        "graph, two events": [replay, marks[2], marks[0]],
        "copy in, graph": [copy_in, replay],
        "graph, copy out": [replay, copy_out],
        "copy in, graph, copy out": [copy_in, replay, copy_out],
        "copy in, event, graph, copy out": [copy_in, marks[1], replay, copy_out],
        "and events before and behind": [marks[0], copy_in, marks[1], replay, copy_out, marks[2]],
        "copy in, event, graph, event": [copy_in, marks[1], replay, marks[2]],
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with runner._scope:
        for _ in staging._addresses:  # all are of a step of padding
            runner._stage_padding(size)
        for _ in range(4):
            for name, calls in ways.items():
                begin.record()
                for _ in range(replays):
                    for call in calls:
                        call()
                end.record()
                end.synchronize()
                took[name].append(1e3 * begin.elapsed_time(end) / replays)
    for name, each in took.items():
        print(f"  {name:36} {statistics.median(each):9.2f} µs   {' '.join(f'{one:.1f}' for one in each)}")


async def show_launches(built: Built) -> None:
    """How often the device had nothing to do when a step was launched, and what passed between two launches."""
    results: Any = built.engine._device._runner._runner._results  # type: ignore[attr-defined]
    begin, launched, late = results.begin, [], []

    def watched() -> None:
        late.append(results._copied[results._turn - 1].query())
        launched.append(time.perf_counter())
        begin()

    results.begin = watched
    await run_requests(built, [(PROMPT, STEPS)], "profiled")
    results.begin = begin
    passed = sorted(1e6 * (b - a) for a, b in pairwise(launched[4:]))
    parts = " ".join(f"{passed[int(part * (len(passed) - 1))]:.0f}" for part in (0.05, 0.5, 0.95, 0.99, 1.0))
    print(f"  late: {sum(late[4:])} of {len(late) - 4}; us between launches, 5, 50, 95, 99 and 100 %: {parts}")


async def measure(config: EngineConfig, replays: int) -> None:
    built = await build_engine(config)
    await run_requests(built, [(PROMPT, 64)] * 2, "warm")
    await show_launches(built)
    rates = []
    for _ in range(5):
        seconds = await run_requests(built, [(PROMPT, STEPS)], "profiled")
        rates.append(STEPS / seconds)
    print(f"  tokens/s: {' '.join(f'{rate:,.1f}' for rate in rates)}; µs a step {1e6 / max(rates[1:]):.1f}")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        await run_requests(built, [(PROMPT, STEPS)], "profiled")
        torch.cuda.synchronize()
    kernels, calls = recorded(profile)
    found = windows(kernels)[20:]
    show_windows(found, calls)
    ends = [window[0][2] for window in found]
    periods = [b - a for a, b in pairwise(ends)]
    print(f"  from step to step, profiled: median {statistics.median(periods):.2f} µs, least {min(periods):.2f}")
    show_calls(calls, STEPS)
    if replays:
        queue_times(built, replays)
    await built.engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--weights", default="auto", choices=["auto", "int4"])
    parser.add_argument("--replays", type=int, default=200, help="of each way, four times; 0: none")
    options = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(Path(folder), options.shape, options.weights)
        print(f"{options.shape}, weights {options.weights}")
        asyncio.run(measure(config, options.replays))


if __name__ == "__main__":
    main()
