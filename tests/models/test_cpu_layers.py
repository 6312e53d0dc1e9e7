"""Layers in one call give, to the bit, what their kernels give one by one: states, cache and taps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.backends.cpu.stack import StackProgram
from bequest.engine.backends.cpu.weights import CpuWeight
from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.cpu_lora import LoraMatrices, LoraPart, LoraRows
from bequest.engine.kernels.cpu_stack import can_store_in_cache, linear_into_cache
from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.kernels.kv_format import FP8, UNSCALED, KvScales
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.parts import HeadNorm, Heads, Norm, Routing
from bequest.engine.layers.plain import PlainProgram
from bequest.engine.layers.program import Program
from bequest.engine.layers.spec import Attention, CrossAttention, Experts, FeedForward, LayerSpec, Mixer, Sublayer
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.step import LayerStep, ReadRows
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight

pytestmark = pytest.mark.usefixtures("two_threads")

BLOCK, LAYERS, HIDDEN = 16, 3, 48
BF16, F32 = torch.bfloat16, torch.float32
needs_units = pytest.mark.skipif(not kernels.multiplies_tiles(), reason="this chip has no matrix units")


@dataclass(frozen=True)
class Shape:
    """Layers of random weights."""

    dtype: torch.dtype = F32
    kv_dtype: torch.dtype = F32
    head_dim: int = 32
    inner: int = 64
    heads: int = 4
    kv_heads: int = 4
    rms: bool = True
    gated: bool = True
    place: str = "before"  # of the norms
    has_cross: bool = False
    is_encoder: bool = False
    turns: bool = False  # positions turn heads
    norms_heads: bool = False
    norms_rows: bool = False  # all heads at once
    parallel: bool = False  # the last sublayer reads what the one before it reads
    factor: float = 1.0
    soft_cap: float = 0.0
    has_sinks: bool = False
    windows: tuple[int, ...] = (0, 0, 0)
    scales: KvScales = UNSCALED
    experts: int = 0  # of each layer but the first
    shared: str = "none"  # or "whole", or "gated"


class Maker:
    def __init__(self, shape: Shape) -> None:
        self.shape, self.backend = shape, CpuBackend()
        self.random = torch.Generator().manual_seed(3)

    def values(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def weight(self, n: int, k: int) -> Weight:
        return self.backend.weight([self.values(n, k) * 0.2], self.values(n), self.shape.dtype)

    def norm(self) -> Norm:
        weight = self.values(HIDDEN)
        return Norm(weight, 1e-6) if self.shape.rms else Norm(weight, 1e-5, self.values(HIDDEN))

    def heads(self, index: int) -> Heads:
        shape, dim = self.shape, self.shape.head_dim
        angles = torch.arange(700.0)[:, None] / 10000 ** (torch.arange(0, dim - 8, 2) / dim)
        return Heads(
            num_heads=shape.heads,
            scale=dim**-0.5,
            cache_layer=0 if shape.is_encoder else index,
            strip=sorted({*shape.windows}).index(shape.windows[index]),
            window=shape.windows[index],
            norm=self.head_norm(),
            soft_cap=shape.soft_cap,
            sinks=self.values(shape.heads) if shape.has_sinks else None,
            rope=torch.cat([angles.cos(), angles.sin()], 1) if shape.turns else None,
            kv_scales=shape.scales,
        )

    def head_norm(self) -> HeadNorm | None:
        shape, dim = self.shape, self.shape.head_dim
        if shape.norms_rows:
            return HeadNorm(self.values(shape.heads * dim), self.values(shape.kv_heads * dim), 1e-6, over_rows=True)
        return HeadNorm(self.values(dim), self.values(dim), 1e-6) if shape.norms_heads else None

    def layer(self, index: int) -> LayerSpec:
        shape, heads = self.shape, self.heads(index)
        width, both = shape.heads * shape.head_dim, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        mixers: list[Mixer] = [Attention(self.weight(both, HIDDEN), heads, self.weight(HIDDEN, width))]
        if shape.has_cross:
            q, kv = self.weight(width, HIDDEN), self.weight(2 * width, HIDDEN)
            plain = replace(heads, window=0, norm=None, rope=None)
            mixers.append(CrossAttention(q, kv, plain, self.weight(HIDDEN, width)))
        mixers.append(self.experts() if shape.experts and index else self.feed_forward())
        sublayers = [Sublayer(mixer=mixer, factor=shape.factor, **self.norms()) for mixer in mixers]
        if shape.parallel:
            sublayers[-1] = replace(sublayers[-1], before=None, beside=True)
        return LayerSpec(index, tuple(sublayers))

    def feed_forward(self) -> FeedForward:
        shape = self.shape
        up = self.weight(shape.inner * (2 if shape.gated else 1), HIDDEN)
        return FeedForward(up, "gelu", self.weight(HIDDEN, shape.inner), shape.gated)

    def experts(self) -> Experts:
        shape, count = self.shape, self.shape.experts
        return Experts(
            self.weight(count, HIDDEN),
            Routing(top_k=3, scoring="sigmoid", bias=self.values(count), renormalises=True, factor=1.7),
            self.expert_weights(2 * shape.inner, HIDDEN),
            "silu",
            self.expert_weights(HIDDEN, shape.inner),
            None if shape.shared == "none" else self.feed_forward(),
            self.weight(1, HIDDEN) if shape.shared == "gated" else None,
        )

    def expert_weights(self, n: int, k: int) -> ExpertWeights:
        count = self.shape.experts
        matrices = [[self.values(n, k) * 0.2] for _ in range(count)]
        return self.backend.expert_weights(matrices, count, self.values(count, n), self.shape.dtype)

    def norms(self) -> dict[str, Norm]:
        places = {"around": ("before", "behind")}.get(self.shape.place, (self.shape.place,))
        return {place: self.norm() for place in places}


class World:
    """A step of one sequence over a cache that is full of other things."""

    def __init__(self, maker: Maker, num_tokens: int, num_read: int | None) -> None:
        shape = maker.shape
        self.maker, self.num_tokens = maker, num_tokens
        blocks = -(-num_tokens // BLOCK)
        self.num_blocks = blocks + 4
        size = (self.num_blocks, 1 if shape.is_encoder else LAYERS, 2, shape.kv_heads, BLOCK, shape.head_dim)
        self.cache = maker.values(*size).to(shape.kv_dtype)
        self.own, self.cross = list(range(1, blocks + 1)), [self.num_blocks - 2, self.num_blocks - 1]
        self.ring = torch.zeros(num_tokens * (LAYERS + 1), HIDDEN)
        self.num_read = num_read
        self.adapters: LoraRows | None = None

    def step(self, cache: Tensor, ring: Tensor) -> LayerStep:
        shape, tokens = self.maker.shape, self.num_tokens
        wanted = torch.arange(tokens, dtype=torch.int32) * (LAYERS + 1)
        wanted[1::5] = -1
        read = None
        if self.num_read is not None:
            rows = torch.arange(tokens - self.num_read, tokens)
            read = ReadRows(rows, self._plan(self.num_read, tokens, self.own, window=shape.windows[-1]))
        windows = sorted({*shape.windows})  # strips that have the same blocks: each layer has a place in them anyway
        return LayerStep(
            positions=torch.arange(tokens, dtype=torch.int32),
            slot_mapping=(torch.arange(BLOCK, BLOCK + tokens),) * len(windows),
            kv_cache=cache,
            attention=tuple(self._plan(tokens, tokens, self.own, window=window) for window in windows),
            cross=self._plan(tokens, BLOCK + 3, self.cross, window=None) if shape.has_cross else None,
            read=read,
            tap=HiddenTap(wanted, torch.tensor([[0b1111, 0]] * tokens), ring),
            adapters=self._step_adapters(None if read is None else read.rows.tolist()),
        )

    def _step_adapters(self, read: list[int] | None) -> StepAdapters | None:
        if self.adapters is None:
            return None
        return StepAdapters(self.adapters, self.num_tokens, None if read is None else self.adapters.of(read))

    def _plan(self, queries: int, keys: int, tables: list[int], window: int | None) -> kernels.AttentionPlan:
        shape = self.maker.shape
        return kernels.AttentionPlan(
            np.array([0, queries], np.int32),
            np.array([keys], np.int32),
            np.array([tables], np.int32),
            num_q_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_size=BLOCK,
            num_blocks=self.num_blocks,
            causal=window is not None and not shape.is_encoder,
            window=window or 0,
            bfloat16=shape.dtype is BF16,
        )

    def run(self, program: Program, stream: Stream | StartRows) -> tuple[Tensor, Tensor, Tensor]:
        cache, ring = self.cache.clone(), self.ring.clone()
        step = self.step(cache, ring)
        if isinstance(stream, StartRows):
            stream = program.run_from(stream, step)
        else:
            program.run(stream, step)
        return stream.state(), cache.view(torch.uint8), ring


STORED = [
    pytest.param(Shape(), id="float32"),
    pytest.param(Shape(head_dim=24, inner=40), id="float32-of-odd-sizes"),
    pytest.param(Shape(BF16), id="bfloat16-over-float32"),
    pytest.param(Shape(BF16, BF16), id="bfloat16"),
    pytest.param(Shape(BF16, BF16, head_dim=24, inner=40), id="bfloat16-of-odd-sizes"),
]
KINDS = {
    "encoder": {"is_encoder": True, "rms": False, "gated": False},
    "decoder": {"has_cross": True, "rms": False, "gated": False},
    "t5": {"has_cross": True},
    "bart": {"has_cross": True, "rms": False, "gated": False, "place": "after"},
    "llama": {"turns": True, "kv_heads": 2},
    "qwen3": {"turns": True, "kv_heads": 1, "norms_heads": True, "windows": (0, 9, 9)},
    "around": {"turns": True, "place": "around"},
    "after": {"turns": True, "place": "after"},
    "olmo2": {"turns": True, "place": "behind", "norms_rows": True, "kv_heads": 2},
    "cohere": {"turns": True, "parallel": True, "rms": False},
    "granite": {"turns": True, "factor": 0.22},
    "gemma2": {"turns": True, "place": "around", "soft_cap": 5.0, "windows": (9, 0, 9)},
    "gpt-oss": {"turns": True, "has_sinks": True, "kv_heads": 2, "windows": (9, 0, 9)},
    "experts": {"turns": True, "experts": 8},
    "experts-shared": {"turns": True, "experts": 5, "shared": "whole", "place": "around"},
    "experts-gated": {"experts": 16, "shared": "gated"},
}


@pytest.mark.parametrize(("num_tokens", "num_read"), [(1, None), (8, None), (17, 1), (70, 70), (600, 3)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", STORED)
def test_a_stack_is_its_kernels(shape: Shape, kind: str, num_tokens: int, num_read: int | None) -> None:
    maker = Maker(replace(shape, **KINDS[kind]))  # type: ignore[arg-type]
    layers, ops = [maker.layer(index) for index in range(LAYERS)], maker.backend.ops
    world = World(maker, num_tokens, num_read)
    x = maker.values(num_tokens, HIDDEN)
    plain, stack = PlainProgram(layers, ops, ends=True), StackProgram(layers, ops, ends=True)
    expected, actual = (world.run(program, Stream(ops, x.clone())) for program in (plain, stack))
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)
    assert expected[2].any()
    narrowed = num_read is not None and not maker.shape.has_cross and maker.shape.place != "after"
    assert len(expected[0]) == (num_read if narrowed else num_tokens)


def random_adapter(maker: Maker, layers: list[LayerSpec], leaves_out: int) -> LoraMatrices:
    """Of all products that all tokens take, but for every `leaves_out`-th; numbers them."""
    sites = {}
    for site, weight in enumerate(weight for layer in layers for weight in layer.weights):
        weight.site = site
        if (site + 1) % leaves_out:
            columns = weight.out_features - weight.out_features // 3
            a, b = maker.values(3, weight.in_features), maker.values(3, columns)
            sites[site] = [LoraPart(a * 0.1, b, weight.out_features // 3, 0.5)]
    return LoraMatrices(sites)


@pytest.mark.parametrize(("num_tokens", "num_read"), [(1, None), (17, None), (17, 5), (70, 3)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [STORED[0], STORED[3], STORED[4]])
def test_a_stack_adds_what_its_kernels_add(shape: Shape, kind: str, num_tokens: int, num_read: int | None) -> None:
    """With two adapters and none among the rows; an adapter that no row has changes nothing."""
    maker = Maker(replace(shape, **KINDS[kind]))  # type: ignore[arg-type]
    layers, ops = [maker.layer(index) for index in range(LAYERS)], maker.backend.ops
    world, x = World(maker, num_tokens, num_read), maker.values(num_tokens, HIDDEN)
    plain = PlainProgram(layers, ops, ends=True)
    one, other = (random_adapter(maker, layers, leaves_out) for leaves_out in (3, 4))
    stack = StackProgram(layers, ops, ends=True)  # with the numbers
    without = world.run(stack, Stream(ops, x.clone()))
    world.adapters = LoraRows([(one, list(range(2, num_tokens, 3))), (other, list(range(0, num_tokens, 3)))])
    expected, actual = (world.run(program, Stream(ops, x.clone())) for program in (plain, stack))
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(expected[0], without[0])
    world.adapters = LoraRows([(one, [])])
    for a, b in zip(without, world.run(stack, Stream(ops, x.clone())), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("shape", STORED)
def test_a_stack_begins_with_rows_of_tables(shape: Shape, has_positions: bool) -> None:
    maker = Maker(replace(shape, turns=True))
    layers, ops = [maker.layer(index) for index in range(LAYERS)], maker.backend.ops
    world = World(maker, 20, None)
    table = maker.weight(99, HIDDEN)
    positions = torch.arange(20, dtype=torch.int32) if has_positions else None
    rows = maker.backend.table(maker.values(30, HIDDEN), shape.dtype) if has_positions else None
    ids = torch.randint(99, (20,), generator=maker.random, dtype=torch.int32)
    start = StartRows(ids, table, None, positions, rows, factor=7.5)
    programs = PlainProgram(layers, ops, ends=True), StackProgram(layers, ops, ends=True)
    for one, other in zip(*(world.run(program, start) for program in programs), strict=True):
        assert torch.equal(one, other)


def test_a_stack_scales_an_fp8_cache() -> None:
    maker = Maker(Shape(kv_dtype=FP8, turns=True, kv_heads=2, scales=KvScales(0.5, 3.0)))
    layers, ops = [maker.layer(index) for index in range(LAYERS)], maker.backend.ops
    world = World(maker, 20, 2)
    x = maker.values(20, HIDDEN)
    programs = PlainProgram(layers, ops, ends=True), StackProgram(layers, ops, ends=True)
    for one, other in zip(*(world.run(program, Stream(ops, x.clone())) for program in programs), strict=True):
        assert torch.equal(one, other)


class Shifted(CpuWeight):
    """A format of its own: its product comes with something added."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1


def test_a_weight_that_declines_runs_its_layer_kernel_by_kernel() -> None:
    maker = Maker(Shape(turns=True))
    layers = [maker.layer(index) for index in range(LAYERS)]
    attention = layers[1].sublayers[0].mixer
    assert isinstance(attention, Attention) and isinstance(attention.output, CpuWeight)
    shifted = Shifted(attention.output.packed, attention.output.bias, maker.backend.ops)
    changed = replace(layers[1].sublayers[0], mixer=replace(attention, output=shifted))
    layers[1] = replace(layers[1], sublayers=(changed, layers[1].sublayers[1]))
    stack = maker.backend.compile(layers)
    assert stack.notes == ("layer 1 kernel by kernel (in one call: a weight is a Shifted)",)
    world, x = World(maker, 20, 2), maker.values(20, HIDDEN)
    plain = PlainProgram(layers, maker.backend.ops, ends=True)
    expected, actual = (world.run(program, Stream(maker.backend.ops, x.clone())) for program in (plain, stack))
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@needs_units
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 33, 300])
@pytest.mark.parametrize("num_out", [0, 32, 64])
def test_keys_and_values_go_from_the_product_to_the_cache(num_tokens: int, num_out: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    heads, head_dim, layer = 2, 32, 1
    x = torch.randn(num_tokens, 70, generator=generator)
    weight = torch.randn(num_out + 2 * heads * head_dim, 70, generator=generator)
    packed, bias = kernels.pack_weight(weight, BF16), torch.randn(len(weight), generator=generator)
    slots = torch.randperm(num_tokens + 40, generator=generator)[:num_tokens]
    slots[1::7] = -1
    caches = torch.zeros(2, num_tokens // BLOCK + 4, 2, 2, heads, BLOCK, head_dim, dtype=BF16)
    assert can_store_in_cache(packed, caches[0])
    rows = kernels.linear(x, packed, bias)
    columns = rows[:, num_out:].unflatten(1, (2 * heads, head_dim))
    kernels.write_kv(columns[:, :heads], columns[:, heads:], caches[0], layer, slots)
    out = torch.empty(num_tokens, num_out)
    linear_into_cache(x, packed, bias, caches[1], layer, slots, out)
    assert torch.equal(out, rows[:, :num_out])
    assert torch.equal(caches[0], caches[1])


@needs_units
def test_a_slot_outside_the_cache_is_an_error() -> None:
    packed = kernels.pack_weight(torch.zeros(2 * 2 * 32, 8), BF16)
    cache = torch.ones(2, 1, 2, 2, BLOCK, 32, dtype=BF16)
    with pytest.raises(kernels.Error, match="outside the cache"):
        linear_into_cache(torch.zeros(2, 8), packed, None, cache, 0, torch.tensor([0, 2 * BLOCK]))
