"""All products between two attentions in one kernel, against float32 torch and the kernels one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda_chain
from bequest.engine.kernels.cuda_chain import Head, Product, Tail
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap
from tests.gpu.test_ops import DEVICE, guarded, int32, randn, reference_norm

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# (A, H, I, Q): fewer tiles than CTAs, tiles that CTAs have unequally, several rounds of tiles, k of part of a stage of
# 1024 and of many, outputs that do not fill a tile.
SIZES = [
    (256, 256, 256, 8),
    (512, 768, 1280, 1021),
    (2048, 1024, 3072, 4096),
    (768, 2304, 5632, 2307),
    (1024, 9216, 8960, 300),
    (4096, 4096, 14336, 6144),
]
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def product(outputs: int, depth: int, with_bias: bool, seed: int) -> Product:
    weight = randn(outputs, depth, dtype=BF16, seed=seed, scale=depth**-0.5)
    return Product(weight, randn(outputs, dtype=BF16, seed=seed + 1) if with_bias else None)


@dataclass(frozen=True)
class Layers:
    tail: Tail
    head: Head | None

    def run(self, attended: Tensor, residual: Tensor, scratch: Tensor) -> Tensor:
        qkv = cuda_chain.run(attended, residual, self.tail, self.head, scratch)
        assert qkv is not None
        return qkv


Sizes = tuple[int, int, int, int]


def make_layers(
    sizes: Sizes, *, with_bias: bool = False, activation: str = "silu", tap: LayerTap | None = None, last: bool = False
) -> Layers:
    attended, hidden, inner, outputs = sizes
    tail = Tail(
        product(hidden, attended, with_bias, 5),
        RowNorm(randn(hidden, dtype=BF16, seed=7), 1e-5),
        product(2 * inner, hidden, with_bias, 8),
        activation,
        product(hidden, inner, with_bias, 10),
    )
    norm = RowNorm(randn(hidden, dtype=BF16, seed=12), 1e-6, tap)
    return Layers(tail, None if last else Head(norm, product(outputs, hidden, with_bias, 13)))


def make_scratch() -> Tensor:
    return cuda_chain.make_scratch(torch.device(DEVICE))


def inputs(sizes: Sizes, num_tokens: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    attended, hidden, _, _ = sizes
    return (
        randn(num_tokens, attended, dtype=BF16, seed=seed),
        randn(num_tokens, hidden, dtype=BF16, seed=seed + 1, scale=3.0),
    )


def apply(x: Tensor, product: Product) -> Tensor:
    return x.float() @ product.weight.float().T + (0 if product.bias is None else product.bias.float())


def reference(layers: Layers, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """In float32, rounded where a row leaves a product."""
    tail, head = layers.tail, layers.head
    residual = (residual.float() + apply(attended, tail.output)).to(BF16)
    gate_up = apply(reference_norm(residual, tail.norm.weight, tail.norm.eps), tail.gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = (ACTIVATIONS[tail.activation](gate) * up).to(BF16)
    residual = (residual.float() + apply(inner, tail.down)).to(BF16)
    if head is None:
        return residual, None
    return residual, apply(reference_norm(residual, head.norm.weight, head.norm.eps), head.qkv)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Up to the rounding of results, and of a few operands, to bfloat16."""
    assert actual.dtype is BF16 and actual.shape == expected.shape
    assert (actual.float() - expected.float()).norm() <= 8e-3 * expected.float().norm()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chain(sizes: Sizes, num_tokens: int, with_bias: bool) -> None:
    layers = make_layers(sizes, with_bias=with_bias)
    attended, start = inputs(sizes, num_tokens)
    residual, check = guarded(num_tokens, sizes[1], dtype=BF16)
    residual.copy_(start)
    qkv = layers.run(attended, residual, make_scratch())
    expected, expected_qkv = reference(layers, attended, start)
    assert_near(residual, expected)
    assert expected_qkv is not None
    assert_near(qkv, expected_qkv)
    check()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_last_layer(activation: str) -> None:
    layers = make_layers(SIZES[1], with_bias=True, activation=activation, last=True)
    attended, residual = inputs(SIZES[1], 3)
    expected, _ = reference(layers, attended, residual)
    assert cuda_chain.run(attended, residual, layers.tail, None, make_scratch()) is None
    assert_near(residual, expected)


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_do_not_depend_on_the_batch(sizes: Sizes) -> None:
    layers, scratch = make_layers(sizes), make_scratch()
    attended, start = inputs(sizes, 4)
    whole = start.clone()
    whole_qkv = layers.run(attended, whole, scratch)
    for count in (1, 2, 3):
        residual = start[-count:].clone()
        assert torch.equal(layers.run(attended[-count:], residual, scratch), whole_qkv[-count:])
        assert torch.equal(residual, whole[-count:])


def test_hidden_tap() -> None:
    """Token 0 wants layers 1 and 70, token 1 nothing, token 2 layer 70, token 3 layer 0, around the ring."""
    wanted, first_rows = [(1, 70), (), (70,), (0,)], [5, -1, 1, 2]
    words = [[sum(1 << b for b in bits if b < 64), sum(1 << (b - 64) for b in bits if b >= 64)] for bits in wanted]
    sizes, scratch = SIZES[1], make_scratch()
    ring, check = guarded(6, sizes[1], dtype=BF16)
    table = HiddenTap(int32(*first_rows), torch.from_numpy(np.array(words, np.uint64).view(np.int64)).to(DEVICE), ring)
    states = {}
    for layer in (0, 1, 2, 70):
        attended, residual = inputs(sizes, 4, seed=layer + 10)
        plain = residual.clone()
        tapped = make_layers(sizes, tap=LayerTap(table, layer)).run(attended, residual, scratch)
        assert torch.equal(tapped, make_layers(sizes).run(attended, plain, scratch)) and torch.equal(residual, plain)
        states[layer] = residual
    for row, (layer, token) in {5: (1, 0), 0: (70, 0), 1: (70, 2), 2: (0, 3)}.items():
        assert torch.equal(ring[row], states[layer][token]), row
    assert ring[3:5].isnan().all()
    check()


class Chain(Protocol):
    def run(self, attended: Tensor, residual: Tensor, scratch: Tensor) -> Tensor | None: ...


def check_graph(chains: Sequence[Chain], start: Tensor, kept: Tensor, count: int = 20) -> None:
    """So many of them by turns, each behind the one before it: replay after replay a graph gives what they give one by
    one."""
    residual, scratch = kept.clone(), make_scratch()

    def run(apart: bool) -> Tensor:
        attended = start
        for i in range(count):
            qkv = chains[i % len(chains)].run(attended, residual, scratch)
            assert qkv is not None
            attended = qkv
            if apart:
                torch.cuda.synchronize()
        return attended

    first = run(apart=True)
    last_residual = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = run(apart=False)
    for _ in range(50):
        residual.copy_(kept)
        last.zero_()
        graph.replay()
        assert torch.equal(last, first) and torch.equal(residual, last_residual)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_chains_in_a_graph(num_tokens: int) -> None:
    """One begins while the one before it ends, replay after replay, and what they exchange is never an older one's."""
    sizes = (1024, 1024, 3072, 1024)
    check_graph([make_layers(sizes), make_layers(sizes, activation="gelu")], *inputs(sizes, num_tokens))


def test_what_cannot_be_chained() -> None:
    assert all(_C.cuda_can_chain(4096, 4096, 14336, bits) for bits in (4, 8, 16))
    assert _C.cuda_can_chain(2048, 1024, 3072, 16) and not _C.cuda_can_chain(2048, 1024, 512, 4)
    assert not _C.cuda_can_chain(2048, 1000, 3072, 16) and not _C.cuda_can_chain(8192, 8192, 1 << 16, 16)
    sizes = SIZES[0]
    attended, residual = inputs(sizes, 5)
    down = make_layers(sizes).tail.down.weight
    assert cuda_chain.can_chain(attended[:4], down) and not cuda_chain.can_chain(attended, down)
    assert not cuda_chain.can_chain(attended[:1].float(), down) and not cuda_chain.can_chain(attended[:0], down)
    with pytest.raises(_C.Error, match="rows"):
        make_layers(sizes).run(attended, residual, make_scratch())
