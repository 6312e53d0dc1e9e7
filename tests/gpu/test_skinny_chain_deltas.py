"""Chains whose rows have adapters, against float32 torch: each product with what the row's own adapter adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda_chain
from bequest.engine.kernels.cuda_chain import Deltas, Head, Product, Tail
from bequest.engine.kernels.cuda_lora import PackedPart, SiteShape, SiteSlots, rounded_rank
from tests.gpu.test_ops import DEVICE, guarded, int32, randn
from tests.gpu.test_skinny_chain import SIZES, Layers, Sizes, inputs, make_layers, make_scratch
from tests.gpu.test_skinny_chain import reference as plain_reference

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
NUM_SLOTS = 5
OUTPUT, GATE_UP, DOWN, QKV = range(4)
RANKS = (8, 16, 30, 64)  # of an adapter's parts in turns


@dataclass(frozen=True)
class Part:
    a: Tensor  # [R, K]
    b: Tensor  # [R, C]
    scale: float


Content = dict[tuple[int, int, int], Part]  # by site, slot and part


def ends_of(sizes: Sizes) -> dict[int, tuple[int, ...]]:
    _, hidden, inner, outputs = sizes
    third = outputs // 3 // 8 * 8
    return {OUTPUT: (hidden,), GATE_UP: (inner, 2 * inner), DOWN: (hidden,), QKV: (third, 2 * third, outputs)}


def fill(sizes: Sizes, most_rank: int) -> tuple[dict[int, SiteSlots], Content]:
    """Slots of adapters: 0 has all parts, 1 none of some, 2 nothing at all."""
    attended, hidden, inner, _ = sizes
    depths = {OUTPUT: attended, GATE_UP: hidden, DOWN: inner, QKV: hidden}
    sites: dict[int, SiteSlots] = {}
    content: Content = {}
    for site, ends in ends_of(sizes).items():
        slots = SiteSlots(SiteShape(ends, depths[site]), NUM_SLOTS, most_rank, torch.device(DEVICE))
        for slot in range(NUM_SLOTS):
            ranks, scales = [0] * len(ends), [0.0] * len(ends)
            for part, end in enumerate(ends):
                if slot == 2 or (slot == 1 and (part + site) % 2):
                    continue
                seed = 100 * site + 10 * slot + part
                rank = min(RANKS[(site + slot + part) % len(RANKS)], most_rank)
                a = randn(rank, depths[site], dtype=BF16, seed=seed, scale=depths[site] ** -0.5)
                b = randn(rank, end - (ends[part - 1] if part else 0), dtype=BF16, seed=seed + 5)
                content[site, slot, part] = Part(a.float(), b.float(), 0.3 + 0.1 * part)
                ranks[part], scales[part] = rank, 0.3 + 0.1 * part
                slots.write_part(slot, part, PackedPart.of(a.float().cpu(), b.float().cpu(), 0.0))
            slots.describe(slot, ranks, scales)
        sites[site] = slots
    return sites, content


def numbered(layers: Layers) -> Layers:
    tail, head = layers.tail, layers.head
    tail = replace(
        tail,
        output=replace(tail.output, site=OUTPUT),
        gate_up=replace(tail.gate_up, site=GATE_UP),
        down=replace(tail.down, site=DOWN),
    )
    return Layers(tail, None if head is None else replace(head, qkv=replace(head.qkv, site=QKV)))


def merged(product: Product, content: Content, site: int, slot: int, ends: tuple[int, ...]) -> Product:
    """In float32, with what the slot adds."""
    weight = product.weight.float().clone()
    for part, end in enumerate(ends):
        if (found := content.get((site, slot, part))) is not None:
            weight[ends[part - 1] if part else 0 : end] += found.scale * (found.b.T @ found.a)
    return Product(weight, product.bias)


def reference(
    layers: Layers, sizes: Sizes, content: Content, slots: list[int], attended: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Row by row with merged weights."""
    rows, ends = [], ends_of(sizes)
    for i, slot in enumerate(slots):
        tail, head = layers.tail, layers.head
        assert head is not None
        own = Layers(
            Tail(
                merged(tail.output, content, OUTPUT, slot, ends[OUTPUT]),
                tail.norm,
                merged(tail.gate_up, content, GATE_UP, slot, ends[GATE_UP]),
                tail.activation,
                merged(tail.down, content, DOWN, slot, ends[DOWN]),
            ),
            Head(head.norm, merged(head.qkv, content, QKV, slot, ends[QKV])),
        )
        rows.append(plain_reference(own, attended[i : i + 1], residual[i : i + 1]))
    return torch.cat([row for row, _ in rows]), torch.cat([qkv for _, qkv in rows if qkv is not None])


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """As of chains without adapters; of eight outputs one rounding is seen more."""
    assert actual.dtype is BF16 and actual.shape == expected.shape
    allowed = 8e-3 if expected.shape[1] > 8 else 2e-2
    assert (actual.float() - expected.float()).norm() <= allowed * expected.float().norm()


def run(layers: Layers, deltas: Deltas, attended: Tensor, residual: Tensor, scratch: Tensor) -> Tensor:
    qkv = cuda_chain.run(attended, residual, layers.tail, layers.head, scratch, deltas)
    assert qkv is not None
    return qkv


@pytest.mark.parametrize("most_rank", [16, 64])
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[1], SIZES[2], SIZES[3], SIZES[5]])
def test_chain(sizes: Sizes, num_tokens: int, most_rank: int) -> None:
    sites, content = fill(sizes, most_rank)
    layers = numbered(make_layers(sizes, with_bias=num_tokens == 2))
    attended, start = inputs(sizes, num_tokens)
    scratch = make_scratch()
    for slots in ([0, -1, 3, 0], [1, 1, 4, 2], [-1, 2, -1, -1]):
        of_rows = slots[:num_tokens]
        residual, check = guarded(num_tokens, sizes[1], dtype=BF16)
        residual.copy_(start)
        qkv = run(layers, Deltas(int32(*of_rows), sites), attended, residual, scratch)
        expected, expected_qkv = reference(layers, sizes, content, of_rows, attended, start)
        assert_near(residual, expected)
        assert_near(qkv, expected_qkv)
        check()


def test_a_row_depends_on_its_own_adapter_alone() -> None:
    sizes, scratch = SIZES[2], make_scratch()
    sites, _ = fill(sizes, 32)
    layers = numbered(make_layers(sizes))
    attended, start = inputs(sizes, 4)
    slots = int32(0, 1, -1, 3)
    whole = start.clone()
    whole_qkv = run(layers, Deltas(slots, sites), attended, whole, scratch)
    for i in range(4):
        residual = start[i : i + 1].clone()
        qkv = run(layers, Deltas(slots[i : i + 1].clone(), sites), attended[i : i + 1], residual, scratch)
        assert torch.equal(qkv[0], whole_qkv[i]) and torch.equal(residual[0], whole[i])


def test_products_without_a_site() -> None:
    """Adapters of some products alone, and of a last layer."""
    sizes, scratch = SIZES[1], make_scratch()
    sites, content = fill(sizes, 16)
    layers = numbered(make_layers(sizes))
    attended, start = inputs(sizes, 3)
    some = {DOWN: sites[DOWN]}
    residual = start.clone()
    qkv = run(layers, Deltas(int32(0, 3, -1), some), attended, residual, scratch)
    of_down = {key: part for key, part in content.items() if key[0] == DOWN}
    expected, expected_qkv = reference(layers, sizes, of_down, [0, 3, -1], attended, start)
    assert_near(residual, expected)
    assert_near(qkv, expected_qkv)
    last = start.clone()
    assert cuda_chain.run(attended, last, layers.tail, None, scratch, Deltas(int32(0, 3, -1), some)) is None
    assert torch.equal(last, residual)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_chains_in_a_graph(num_tokens: int) -> None:
    """Slots are data: a graph serves others than it was captured with, replay after replay."""
    sizes, scratch = (1024, 1024, 3072, 1024), make_scratch()
    sites, _ = fill(sizes, 16)
    layers = numbered(make_layers(sizes))
    start, kept = inputs(sizes, num_tokens)
    residual, slots = kept.clone(), int32(*[0] * num_tokens)

    def steps() -> Tensor:
        attended = start
        for _ in range(12):
            attended = run(layers, Deltas(slots, sites), attended, residual, scratch)
        return attended

    expected = {}
    for slot in (0, 1, 3, -1):
        slots.fill_(slot)
        residual.copy_(kept)
        expected[slot] = steps().clone(), residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = steps()
    for _ in range(10):
        for slot, (qkv, state) in expected.items():
            slots.fill_(slot)
            residual.copy_(kept)
            graph.replay()
            assert torch.equal(last, qkv) and torch.equal(residual, state), slot
    assert not torch.equal(expected[0][0], expected[3][0])


def test_what_cannot_be_chained() -> None:
    assert _C.cuda_can_chain_deltas(4096, 4096, 14336, 64) and _C.cuda_can_chain_deltas(2048, 1024, 3072, 16)
    assert not _C.cuda_can_chain_deltas(4096, 4096, 14336, rounded_rank(65))
    assert not _C.cuda_can_chain_deltas(2048, 1000, 3072, 16)
