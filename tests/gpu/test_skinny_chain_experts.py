"""The chain of a layer with experts, for one row, against float32 torch and the kernels one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda_chain
from bequest.engine.kernels.cuda_chain import Choice, Head, Product, Tail
from bequest.engine.kernels.cuda_linear import RowNorm
from tests.gpu.test_ops import guarded, randn, reference_norm
from tests.gpu.test_skinny_chain import apply, assert_near, check_graph, make_scratch, product

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    attended: int
    hidden: int
    inner: int
    outputs: int
    num_experts: int
    top_k: int


# Fewer tiles than CTAs, an expert of less than a stage and of a whole one, more and fewer experts than 128, one to a
# row, outputs that do not fill a tile, and the sizes of models.
SIZES = [
    Sizes(256, 256, 256, 8, 4, 1),
    Sizes(512, 768, 512, 1021, 12, 3),
    Sizes(768, 1280, 1024, 2307, 64, 8),
    Sizes(512, 512, 256, 256, 132, 32),
    Sizes(4096, 2048, 768, 5120, 128, 8),
    Sizes(4096, 2048, 512, 9216, 256, 8),
]


@dataclass(frozen=True)
class Layer:
    tail: Tail
    head: Head | None

    def foreseeing(self, foresight: Tensor | None) -> Layer:
        assert self.tail.choice is not None
        return replace(self, tail=replace(self.tail, choice=replace(self.tail.choice, foresight=foresight)))

    def foresight(self) -> Tensor:
        choice = self.tail.choice
        assert choice is not None
        router = choice.router.weight if choice.shared is None else choice.router.weight[:-1]
        return cuda_chain.make_foresight(router, self.tail.norm, self.tail.output.weight)

    def run(self, attended: Tensor, residual: Tensor, scratch: Tensor, num_read: Tensor | None = None) -> Tensor | None:
        return cuda_chain.run(attended, residual, self.tail, self.head, scratch, num_read=num_read)


def make_layer(
    sizes: Sizes,
    *,
    activation: str = "silu",
    last: bool = False,
    renormalises: bool = True,
    factor: float = 1.0,
    has_shared: bool = False,
    offset: float = 0.0,
) -> Layer:
    hidden, inner, experts = sizes.hidden, sizes.inner, sizes.num_experts
    router = randn(experts + has_shared, hidden, dtype=BF16, seed=3, scale=3 * hidden**-0.5)
    shared = (product(2 * inner, hidden, False, 15), product(hidden, inner, False, 17)) if has_shared else None
    tail = Tail(
        product(hidden, sizes.attended, False, 5),
        RowNorm(randn(hidden, dtype=BF16, seed=7), 1e-5, offset=offset),
        Product(randn(experts, 2 * inner, hidden, dtype=BF16, seed=8, scale=hidden**-0.5)),
        activation,
        Product(randn(experts, hidden, inner, dtype=BF16, seed=10, scale=inner**-0.5)),
        Choice(Product(router), sizes.top_k, renormalises, factor, shared),
    )
    head = Head(
        RowNorm(randn(hidden, dtype=BF16, seed=12), 1e-6, offset=offset), product(sizes.outputs, hidden, False, 13)
    )
    return Layer(tail, None if last else head)


@dataclass(frozen=True)
class Expected:
    ids: list[int]  # who is chosen
    gap: float  # between the last expert that is chosen and the first that is not
    residual: Tensor
    qkv: Tensor | None


def reference(layer: Layer, attended: Tensor, residual: Tensor) -> Expected:
    """In float32, rounded where a row leaves a product."""
    tail, head, choice = layer.tail, layer.head, layer.tail.choice
    assert choice is not None
    residual = (residual.float() + apply(attended, tail.output)).to(BF16)
    normed = reference_norm(residual, tail.norm.weight.float() + tail.norm.offset, tail.norm.eps).float()
    logits = apply(normed, choice.router).to(BF16).float()[0]
    gate, logits = (logits[-1:], logits[:-1]) if choice.shared is not None else (logits[:0], logits)
    order = logits.argsort(descending=True, stable=True)
    ids, others = order[: choice.top_k], order[choice.top_k :]
    counts = logits.softmax(0)[ids]
    counts = choice.factor * (counts / counts.sum() if choice.renormalises else counts)
    total = torch.zeros_like(residual, dtype=torch.float32)
    taken = [(tail.gate_up.weight[i], tail.down.weight[i]) for i in ids.tolist()]
    if choice.shared is not None:
        taken.append((choice.shared[0].weight, choice.shared[1].weight))
    for (up_weight, down_weight), weight in zip(taken, [*counts.tolist(), *gate.sigmoid().tolist()], strict=True):
        gates, ups = (normed @ up_weight.float().T).chunk(2, dim=-1)
        gated = F.silu(gates) * ups if tail.activation == "silu" else F.gelu(gates) * ups
        total += weight * (gated @ down_weight.float().T)
    residual = (residual.float() + total).to(BF16)
    gap = float(logits[ids[-1]] - logits[others[0]]) if len(others) else 1.0
    qkv = None
    if head is not None:
        gain = head.norm.weight.float() + head.norm.offset
        qkv = apply(reference_norm(residual, gain, head.norm.eps), head.qkv)
    return Expected(sorted(ids.tolist()), gap, residual, qkv)


def inputs(sizes: Sizes, layer: Layer) -> tuple[Tensor, Tensor, Expected]:
    """A row whose choice does not hang on the rounding of a logit."""
    for seed in count(1):
        attended = randn(1, sizes.attended, dtype=BF16, seed=seed)
        residual = randn(1, sizes.hidden, dtype=BF16, seed=seed + 1000, scale=3.0)
        expected = reference(layer, attended, residual)
        if expected.gap > 0.05:
            return attended, residual, expected
    raise AssertionError


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "fields",
    [{}, {"renormalises": False, "factor": 2.5}, {"has_shared": True, "offset": 1.0}],
    ids=["renormalised", "as they are", "with a shared one"],
)
def test_chain(sizes: Sizes, fields: dict[str, Any]) -> None:
    layer = make_layer(sizes, **fields)
    attended, start, expected = inputs(sizes, layer)
    residual, check = guarded(1, sizes.hidden, dtype=BF16)
    residual.copy_(start)
    num_read = torch.full((1,), 5, device=residual.device)
    qkv = layer.foreseeing(layer.foresight()).run(attended, residual, make_scratch(), num_read)
    assert num_read.item() == 5 + sizes.top_k
    assert_near(residual, expected.residual)
    assert qkv is not None and expected.qkv is not None
    assert_near(qkv, expected.qkv)
    check()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("has_shared", [False, True])
def test_foresight_changes_no_bit(sizes: Sizes, has_shared: bool) -> None:
    """Whether it is right, wrong in every expert or in some."""
    layer = make_layer(sizes, has_shared=has_shared, offset=1.0)
    right, scratch = layer.foresight(), make_scratch()
    for seed in range(8):
        attended = randn(1, sizes.attended, dtype=BF16, seed=seed)
        start = randn(1, sizes.hidden, dtype=BF16, seed=seed + 1000, scale=3.0)
        results = []
        for foresight in (None, right, -right, right.roll(1, 0), torch.full_like(right, float("nan"))):
            residual = start.clone()
            qkv = layer.foreseeing(foresight).run(attended, residual, scratch)
            assert qkv is not None
            results.append((residual, qkv))
        expected = results[0]
        assert all(torch.equal(a, b) for pair in results[1:] for a, b in zip(expected, pair, strict=True))


@pytest.mark.parametrize("sizes", SIZES)
def test_foresight_is_right(sizes: Sizes) -> None:
    """The experts that the router chooses are best by it, too."""
    layer = make_layer(sizes, offset=0.5)
    attended, residual, expected = inputs(sizes, layer)
    begin = -sizes.attended % 1024
    row = torch.cat([F.pad(attended, (0, begin)), residual], dim=1).float()
    best = (row @ layer.foresight().float().T)[0].topk(sizes.top_k).indices
    assert sorted(best.tolist()) == expected.ids


def test_last_layer() -> None:
    layer = make_layer(SIZES[1], activation="gelu", last=True)
    attended, residual, expected = inputs(SIZES[1], layer)
    assert layer.run(attended, residual, make_scratch()) is None
    assert_near(residual, expected.residual)


def test_chains_in_a_graph() -> None:
    """Replay after replay the same, with another choice in every layer."""
    sizes = Sizes(1024, 1024, 512, 1024, 128, 8)
    layers = [make_layer(sizes, has_shared=True), make_layer(sizes, activation="gelu")]
    layers = [layer.foreseeing(layer.foresight()) for layer in layers]
    start, kept, _ = inputs(sizes, layers[0])
    check_graph(layers, start, kept)


def test_nan_gives_nan() -> None:
    """A row without numbers reads some expert and stays without."""
    layer, sizes = make_layer(SIZES[2]), SIZES[2]
    layer = layer.foreseeing(layer.foresight())
    attended, residual, _ = inputs(sizes, layer)
    qkv = layer.run(torch.full_like(attended, float("nan")), residual, make_scratch())
    assert qkv is not None and qkv.isnan().all() and residual.isnan().all()


def test_what_cannot_be_chained() -> None:
    assert _C.cuda_can_chain_experts(4096, 2048, 768, 128, 8, False)
    assert _C.cuda_can_chain_experts(4096, 2048, 512, 256, 8, True)
    assert not _C.cuda_can_chain_experts(4096, 2880, 2880, 32, 4, False)  # no multiples of 256
    assert not _C.cuda_can_chain_experts(4096, 4096, 14336, 8, 2, False)  # an expert of more than a stage
    assert not _C.cuda_can_chain_experts(4096, 2048, 768, 512, 8, False)
    assert not _C.cuda_can_chain_experts(4096, 2048, 768, 8, 9, False)
    layer, sizes = make_layer(SIZES[0]), SIZES[0]
    attended, residual, _ = inputs(sizes, layer)
    with pytest.raises(_C.Error, match="one row"):
        layer.run(attended.repeat(2, 1), residual.repeat(2, 1), make_scratch())
