"""Clients that all come at once, on a clock that is only counted: what the pieces of prompts do to waiting times.

    python -m benchmarks.bursts [--shape llama-3.1-8b] [--json FILE]

The load of benchmarks/http_load.py: so many connections, 512 tokens in, 256 out, each with the next request when it has
its answer. The scheduler is the real one. The device takes what an H200 took for steps of the shape
(docs/benchmarks.md): the products of its tokens, padded to the size of a graph, and keys and values at 4.2 TB/s. The
host takes time for each step, token and request. Each load runs with and without pieces: `off` is a step of up to 2,048
tokens whoever waits for it.
"""

from __future__ import annotations

import argparse
import heapq
import json
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.simulated_load import Device, Figures, Host, Simulation
from bequest.engine.runner.cuda_sizes import decode_ladder
from bequest.engine.scheduling.policy.tuning import DEFAULT, OFF
from bequest.engine.types import StepPlan
from bequest.engine.types.plan import MIXED_SIZES

_DECODE_SIZES = decode_ladder(256)
PROMPT, ANSWER = 512, 256  # tokens


@dataclass(frozen=True)
class Gpu(Device):
    """A step takes the time of reading all weights, or that of its products."""

    row_seconds: float = 0.0  # for each row of a step that reads weights
    product_seconds: float = 0.0  # of a step that multiplies, beside token_seconds
    kv_seconds: float = 0.0  # for the keys and values of a token of context

    def seconds(self, plan: StepPlan) -> float:
        num_tokens, num_sequences = plan.num_tokens, len(plan.batch.seq_lens)
        sizes = _DECODE_SIZES if num_tokens == num_sequences else MIXED_SIZES
        padded = sizes[min(bisect_left(sizes, num_tokens), len(sizes) - 1)]
        reading = self.step_seconds + self.row_seconds * padded
        multiplying = self.product_seconds + self.token_seconds * padded
        return max(reading, multiplying) + self.kv_seconds * int(plan.batch.seq_lens.sum())


_SLOTS = {"slots": 256, "queue": 1024, "budget": 2048, "prompt_pace": 2.0, "blocks": 20_000}
SHAPES = {
    "llama-3.1-8b": Gpu(
        **_SLOTS,  # type: ignore[arg-type]
        step_seconds=3.65e-3,
        row_seconds=18e-6,
        product_seconds=2.5e-3,
        token_seconds=23.3e-6,
        kv_seconds=131_072 / 4.2e12,
    ),
    "qwen3-0.6b": Gpu(
        **_SLOTS,  # type: ignore[arg-type]
        step_seconds=0.9e-3,
        row_seconds=2e-6,
        product_seconds=0.45e-3,
        token_seconds=2.5e-6,
        kv_seconds=114_688 / 4.2e12,
    ),
}


HOST = Host(step=0.2e-3, token=18e-6, request=0.6e-3)


class Burst(Simulation):
    """Connections that are there at once, each with some requests one after another."""

    def __init__(self, device: Device, connections: int, rounds: int, answer: int) -> None:
        super().__init__(device, seed=3, host=HOST)
        self._answer = answer
        self.last_at = 0.0
        self._left = 0
        self._draw = np.random.default_rng(connections)
        self._send()  # alone, to warm up
        self._run_all()
        self.figures.clear()
        self.began, self._left = self.now, connections * (rounds - 1)
        for _ in range(connections):
            self._send()
        self._run_all()

    def _run_all(self) -> None:
        while self._arrivals or self._scheduler.num_waiting or self._scheduler.num_running:
            self.run(1.0)

    def _send(self) -> None:
        prompt = tuple(self._draw.integers(1000, 30000, PROMPT).tolist())
        heapq.heappush(self._arrivals, (self.now, next(self._numbers), "all", prompt, self._answer))

    def _answered(self) -> None:
        self.last_at = self.now
        if self._left:
            self._left -= 1
            self._send()


def measure(device: Device, connections: int, rounds: int = 3, answer: int = ANSWER) -> dict[str, float]:
    """As benchmarks/http_load.py tells them."""
    burst = Burst(device, connections, rounds, answer)
    figures: Figures = burst.figures["all"]
    first, between = np.asarray(figures.first) * 1e3, np.asarray(figures.between) * 1e3
    return {
        "connections": connections,
        "tokens_per_second": figures.answered * answer / (burst.last_at - burst.began),
        "ttft_p50_ms": float(np.percentile(first, 50)),
        "ttft_p99_ms": float(np.percentile(first, 99)),
        "itl_p50_ms": float(np.percentile(between, 50)),
        "itl_p99_ms": float(np.percentile(between, 99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    parser.add_argument("--connections", default="16,64,256")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, float | str]] = []
    for shape in options.shape or list(SHAPES):
        for connections in map(int, options.connections.split(",")):
            for name, tuning in (("off", replace(DEFAULT, piece_cost=OFF)), ("on", DEFAULT)):
                device = replace(SHAPES[shape], tuning=tuning)
                figures = measure(device, connections, 2 if connections >= 256 else 3)
                rows.append({"shape": shape, "pieces": name, **figures})
                print("  ".join(f"{v:>12}" if isinstance(v, str) else f"{v:12,.1f}" for v in rows[-1].values()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
