"""Experts on a GPU: the choice and the two products of a layer beside their floors, and engines of such models.

    python -m benchmarks.gpu_experts [--only qwen3-30b-a3b …] [--tokens 1 4 16 …] [--engine] [--json FILE]

A graph holds several layers, each with weights of its own, so that the L2 holds none of them. The floor of a product is
the larger of two times: the weights of the experts that are used over the read bandwidth, and the operations over the
matrix rate. Both are measured here first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_engine import Trial, in_own_process, read_bandwidth
from bequest.engine.kernels import cuda_experts as experts
from bequest.engine.kernels.cuda_experts import ExpertChoice, ExpertMatrices, RoutingRule

BF16 = torch.bfloat16
TOKENS = (1, 4, 16, 64, 256, 2048)
WEIGHT_BYTES = 6 << 30  # of all layers of a graph
REPLAYS = 12
ENGINES = ("qwen3-30b-a3b", "mixtral-8x7b")


@dataclass(frozen=True)
class ExpertShape:
    hidden: int
    inner: int
    num_experts: int
    top_k: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inner * 2

    def rule(self) -> RoutingRule:
        return RoutingRule(
            top_k=self.top_k,
            scoring="softmax",
            bias=None,
            num_groups=1,
            top_groups=1,
            group_best=1,
            renormalises=True,
            factor=1.0,
        )


SHAPES = {
    "qwen3-30b-a3b": ExpertShape(2048, 768, 128, 8),
    "qwen3.6-35b-a3b": ExpertShape(2048, 512, 256, 8),
    "mixtral-8x7b": ExpertShape(4096, 14336, 8, 2),
}


@dataclass(frozen=True)
class Row:
    shape: str
    tokens: int
    experts_used: float  # of a layer, on average
    route_us: float
    gated_us: float
    summed_us: float
    layer_us: float  # all three after one another
    floor_us: float
    over_floor: float = field(init=False)
    weight_terabytes_per_second: float
    teraflops: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "over_floor", self.layer_us / self.floor_us)


@dataclass(frozen=True)
class Layer:
    up: ExpertMatrices
    down: ExpertMatrices
    logits: Tensor
    choice: ExpertChoice


def matrix_rate() -> float:
    """Operations per second of a large product, the best of five."""
    a, b = (torch.randn(8192, 8192, dtype=BF16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / min(_time([lambda: a @ b]) for _ in range(5))


def _time(calls: list[Callable[[], object]]) -> float:
    """Seconds of one call in a graph of all, the median of some replays."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


class Bench:
    """Layers of a shape; their weights stay for all counts of tokens."""

    def __init__(self, name: str) -> None:
        self.name, self.shape = name, SHAPES[name]
        count = max(2, min(16, WEIGHT_BYTES // (self.shape.num_experts * self.shape.expert_bytes)))
        self.weights = [(self._matrices(gated=True), self._matrices(gated=False)) for _ in range(count)]

    def _matrices(self, *, gated: bool) -> ExpertMatrices:
        hidden, inner = self.shape.hidden, self.shape.inner
        outputs, depth = (2 * inner, hidden) if gated else (hidden, inner)
        weight = torch.empty(self.shape.num_experts, outputs, depth, dtype=BF16, device="cuda")
        return ExpertMatrices(weight.normal_(std=depth**-0.5))

    def measure(self, num_tokens: int, bandwidth: float, rate: float) -> Row:
        shape, rule = self.shape, self.shape.rule()
        x = torch.randn(num_tokens, shape.hidden, dtype=BF16, device="cuda")
        inner = torch.randn(num_tokens * shape.top_k, shape.inner, dtype=BF16, device="cuda")
        layers = []
        for up, down in self.weights:
            logits = torch.randn(num_tokens, shape.num_experts, dtype=BF16, device="cuda")
            layers.append(Layer(up, down, logits, experts.route(logits, rule)))

        def whole(layer: Layer) -> Tensor:
            choice = experts.route(layer.logits, rule)
            return experts.summed(experts.gated(x, layer.up, choice, "silu"), layer.down, choice)

        route = _time([lambda layer=layer: experts.route(layer.logits, rule) for layer in layers])
        gated = _time([lambda layer=layer: experts.gated(x, layer.up, layer.choice, "silu") for layer in layers])
        summed = _time([lambda layer=layer: experts.summed(inner, layer.down, layer.choice) for layer in layers])
        seconds = _time([lambda layer=layer: whole(layer) for layer in layers])
        used = sum(len(layer.choice.ids.unique()) for layer in layers) / len(layers)
        operations = num_tokens * shape.top_k * shape.expert_bytes  # two for each weight of two bytes
        floor = max(used * shape.expert_bytes / bandwidth, operations / rate)
        return Row(
            shape=self.name,
            tokens=num_tokens,
            experts_used=used,
            route_us=route * 1e6,
            gated_us=gated * 1e6,
            summed_us=summed * 1e6,
            layer_us=seconds * 1e6,
            floor_us=floor * 1e6,
            weight_terabytes_per_second=used * shape.expert_bytes / seconds / 1e12,
            teraflops=operations / seconds / 1e12,
        )


def show(row: Row) -> None:
    print(
        f"{row.shape:16} {row.tokens:6} {row.experts_used:8.1f} {row.route_us:8.1f} {row.gated_us:8.1f} "
        f"{row.summed_us:8.1f} {row.layer_us:8.1f} {row.floor_us:8.1f} {row.over_floor:6.2f} "
        f"{row.weight_terabytes_per_second:6.2f} {row.teraflops:7.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--engine", action="store_true", help="whole engines too: single streams and offline load")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    bandwidth, rate = read_bandwidth(), matrix_rate()
    torch.cuda.empty_cache()
    print(f"reads {bandwidth / 1e12:.2f} TB/s, products {rate / 1e12:.0f} TFLOP/s")
    print("shape            tokens  experts    route    gated   summed    layer    floor  ratio   TB/s TFLOP/s")
    rows, engines = [], []
    for name in options.only:
        bench = Bench(name)
        for num_tokens in options.tokens:
            rows.append(bench.measure(num_tokens, bandwidth, rate))
            show(rows[-1])
        del bench
        torch.cuda.empty_cache()
    for name in ENGINES if options.engine else ():
        trial = Trial(name, "auto", "auto", quick=True, bandwidth=bandwidth, process_began=time.time())
        engines.append(in_own_process(trial))
        print(json.dumps(engines[-1], indent=2), flush=True)
    if options.json:
        figures = {"bandwidth": bandwidth, "rate": rate, "rows": [asdict(row) for row in rows], "engines": engines}
        Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
