"""Bandwidth of the matrix products of a decode step: ours, with what is fused around them, beside cuBLAS.

A graph holds the products of every layer, each with weights of its own, and of the logits; a decode step has attention
between them. `all` are those of a step as a model calls them, chained where that is possible; the others are alone.
Bytes are those of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_shapes import SHAPES
from bequest.engine.backends.cuda.ops import CudaOps
from bequest.engine.backends.cuda.weights import DenseWeight, row_norm
from bequest.engine.kernels import cuda_chain
from bequest.engine.kernels import cuda_linear as products
from bequest.engine.layers.parts import Norm
from bequest.engine.layers.stream import Stream

BF16 = torch.bfloat16
ROWS = (1, 4, 8, 16, 32, 64)
REPLAYS = 10


@dataclass(frozen=True)
class ProductRow:
    shape: str
    rows: int
    product: str
    microseconds: float
    terabytes_per_second: float
    cublas_terabytes_per_second: float


@dataclass(frozen=True)
class Layer:
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class Weights:
    def __init__(self, shape: str) -> None:
        config = SHAPES[shape].config
        hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.attended = heads * head_dim

        def matrix(outputs: int, depth: int) -> Tensor:
            return torch.empty(outputs, depth, dtype=BF16, device="cuda").normal_(std=depth**-0.5)

        self.layers = [
            Layer(
                matrix((heads + 2 * kv_heads) * head_dim, hidden),
                matrix(hidden, heads * head_dim),
                matrix(2 * inner, hidden),
                matrix(hidden, inner),
            )
            for _ in range(config["num_hidden_layers"])
        ]
        self.logits = matrix(config["vocab_size"], hidden)
        self.gain = torch.ones(hidden, dtype=BF16, device="cuda")


Call = Callable[[], object]


class Step:
    """The products of a step of some rows, by name: ours and cuBLAS's."""

    def __init__(self, weights: Weights, rows: int) -> None:
        self.weights = weights
        self.ops, self.norm = CudaOps(), Norm(weights.gain, 1e-6)
        self.scratch = cuda_chain.make_scratch(weights.gain.device)
        hidden, inner = weights.gain.shape[0], weights.layers[0].down.shape[1]
        self.residual, self.attended, self.inner = (
            torch.randn(rows, width, dtype=BF16, device="cuda") for width in (hidden, weights.attended, inner)
        )
        self.stream = Stream(self.ops, self.residual)
        self.stream.ahead = self.norm
        self._ours("output", weights.layers[0].output)()

    def calls(self, name: str, ours: bool) -> Iterator[tuple[Call, int]]:
        """With the bytes of their weights."""
        tails = [self._tail(layer) for layer in self.weights.layers]
        if name == "all" and ours and cuda_chain.can_chain(self.attended, self.weights.layers[0].down):
            yield from self._chained(tails)
            return
        for layer in self.weights.layers:
            for kind in ("qkv", "output", "gate_up", "down"):
                if name in (kind, "all"):
                    weight = getattr(layer, kind)
                    yield (self._ours(kind, weight) if ours else self._cublas(kind, weight)), weight.nbytes
        if name in ("logits", "all"):
            yield self._logits(products.linear if ours else F.linear)

    def _logits(self, call: Callable[[Tensor, Tensor], Tensor]) -> tuple[Call, int]:
        weight = self.weights.logits
        return (lambda: call(self.residual, weight)), weight.nbytes

    def _chained(self, tails: list[cuda_chain.Tail]) -> Iterator[tuple[Call, int]]:
        layers = self.weights.layers
        yield self._ours("qkv", layers[0].qkv), layers[0].qkv.nbytes
        for tail, layer, following in zip(tails, layers, [*layers[1:], None], strict=True):
            head = (
                None if following is None else cuda_chain.Head(row_norm(self.norm), cuda_chain.Product(following.qkv))
            )
            size = layer.output.nbytes + layer.gate_up.nbytes + layer.down.nbytes
            yield (
                partial(cuda_chain.run, self.attended, self.residual, tail, head, self.scratch),
                size + (0 if following is None else following.qkv.nbytes),
            )
        yield self._logits(products.linear)

    def _tail(self, layer: Layer) -> cuda_chain.Tail:
        output, gate_up, down = (cuda_chain.Product(weight) for weight in (layer.output, layer.gate_up, layer.down))
        return cuda_chain.Tail(output, row_norm(self.norm), gate_up, "silu", down)

    def _cublas(self, kind: str, weight: Tensor) -> Call:
        x = {"qkv": self.residual, "output": self.attended, "gate_up": self.residual, "down": self.inner}[kind]
        return lambda: F.linear(x, weight)

    def _ours(self, kind: str, weight: Tensor) -> Call:
        """As a model calls them: fused where that is possible, with what a product leaves for the norm behind it."""
        dense, norm, stream = DenseWeight(weight, None, self.ops), self.norm, self.stream
        if kind in ("output", "down"):
            x = self.attended if kind == "output" else self.inner
            return lambda: dense.add_to(stream, x)
        if kind == "qkv":
            return lambda: dense.normed(stream, norm)
        return lambda: dense.normed_gated(stream, norm, "silu")


def _time(calls: list[Call]) -> float:
    """Seconds of one replay of a graph of these calls, the median of some."""
    for call in calls:  # what is made at a first call cannot be made in a graph
        call()
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
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times[2:])[len(times[2:]) // 2]


def measure(shapes: list[str]) -> list[ProductRow]:
    results = []
    print(f"{'products of a decode step':28}{'rows':>5}  {'product':10}{'us':>9}{'TB/s':>7}{'cuBLAS':>8}")
    for shape in shapes:
        weights = Weights(shape)
        for rows in ROWS:
            step = Step(weights, rows)
            for name in ("qkv", "output", "gate_up", "down", "logits", "all"):
                calls, sizes = zip(*step.calls(name, ours=True), strict=True)
                theirs, _ = zip(*step.calls(name, ours=False), strict=True)
                seconds, rate = _time(list(calls)), sum(sizes) / 1e12
                row = ProductRow(
                    shape, rows, name, seconds * 1e6 / len(calls), rate / seconds, rate / _time(list(theirs))
                )
                results.append(row)
                print(
                    f"{shape:28}{rows:5}  {name:10}{row.microseconds:9.2f}{row.terabytes_per_second:7.2f}"
                    f"{row.cublas_terabytes_per_second:8.2f}",
                    flush=True,
                )
        del weights
        torch.cuda.empty_cache()
    return results
