"""A stack of layers in one call gives, to the bit, what its kernels give one by one: states, cache and taps."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.cpu_stack import LayerStack, StackCache, StackProduct, can_store_in_cache, linear_into_cache
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap
from bequest.engine.models.backend import Activation, CpuBackend
from bequest.engine.models.cpu_layers import stack_of
from bequest.engine.models.encoder_decoder import PreNorm
from bequest.engine.models.layers import LayerNorm, Linear, RMSNorm
from bequest.engine.models.sublayers import (
    CrossAttention,
    CrossLayer,
    EncoderLayer,
    FeedForward,
    Norm,
    SelfAttention,
    SelfKeys,
)

pytestmark = pytest.mark.usefixtures("two_threads")

HEADS, BLOCK, LAYERS = 2, 16, 3
BF16, F32 = torch.bfloat16, torch.float32
needs_units = pytest.mark.skipif(not kernels.multiplies_tiles(), reason="this chip has no matrix units")


class Maker:
    """Layers of random weights."""

    def __init__(self, dtype: torch.dtype, head_dim: int, inner: int, gated: bool, rms: bool) -> None:
        self.backend, self.dtype, self.gated, self.rms = CpuBackend(), dtype, gated, rms
        self.head_dim, self.hidden, self.inner = head_dim, 48, inner
        self.random = torch.Generator().manual_seed(3)

    def values(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def linear(self, n: int, k: int) -> Linear:
        return Linear(self.backend, self.backend.matrix([self.values(n, k) * 0.2], self.dtype), self.values(n))

    def norm(self) -> Norm:
        weight = self.values(self.hidden)
        return (
            RMSNorm(self.backend, weight, 1e-6)
            if self.rms
            else LayerNorm(self.backend, weight, self.values(self.hidden), 1e-5)
        )

    def layer(self, index: int, has_cross: bool) -> EncoderLayer | CrossLayer:
        width, scale = HEADS * self.head_dim, self.head_dim**-0.5
        attention = SelfAttention(self.linear(3 * width, self.hidden), self.linear(self.hidden, width), HEADS, scale)
        activation: Activation = "gelu"
        up = self.linear(self.inner * (2 if self.gated else 1), self.hidden)
        mlp = FeedForward(up, self.linear(self.hidden, self.inner), activation, self.gated)
        if not has_cross:
            return EncoderLayer(self.norm(), attention, self.norm(), mlp)
        q, kv, output = (
            self.linear(*shape) for shape in ((width, self.hidden), (2 * width, self.hidden), (self.hidden, width))
        )
        cross = CrossAttention(q, kv, output, HEADS, scale, index)
        return CrossLayer(self.norm(), attention, self.norm(), cross, self.norm(), mlp)


def plan(
    num_tokens: int, num_keys: int, tables: list[int], num_blocks: int, maker: Maker, causal: bool
) -> kernels.AttentionPlan:
    return kernels.AttentionPlan(
        np.array([0, num_tokens], np.int32),
        np.array([num_keys], np.int32),
        np.array([tables], np.int32),
        num_q_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=maker.head_dim,
        block_size=BLOCK,
        num_blocks=num_blocks,
        causal=causal,
        bfloat16=maker.dtype is BF16,
    )


def one_by_one(layers: list[EncoderLayer | CrossLayer], x: Tensor, cache: StackCache, tap: HiddenTap | None) -> Tensor:
    """The stream behind all layers."""
    stream = PreNorm(x)
    positions = torch.zeros(len(x), dtype=torch.int32)
    for index, layer in enumerate(layers):
        in_cache = index if isinstance(layer, CrossLayer) else 0
        keys = SelfKeys(positions, cache.slots, cache.kv_cache, in_cache, cache.attention, cache.bias)
        before = None if tap is None else LayerTap(tap, index)
        stream.apply(layer.attention_norm, partial(layer.attention, keys=keys), before=before)
        if isinstance(layer, CrossLayer):
            stream.apply(layer.cross_norm, partial(layer.cross, kv_cache=cache.kv_cache, work=cache.cross))
        stream.apply(layer.mlp_norm, layer.mlp)
    return stream.state()


def in_one_call(stack: LayerStack, x: Tensor, cache: StackCache, tap: HiddenTap | None) -> Tensor:
    stream = PreNorm(x)
    stream.apply_all(stack, cache, tap)
    return stream.state()


CASES = [
    pytest.param(F32, F32, 24, 40, id="float32"),
    pytest.param(BF16, F32, 32, 64, id="bfloat16-over-float32"),
    pytest.param(BF16, BF16, 32, 64, id="bfloat16"),
    pytest.param(BF16, BF16, 24, 40, id="bfloat16-of-odd-sizes"),
]


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 17, 70, 600])
@pytest.mark.parametrize(("gated", "rms"), [(False, False), (True, True)], ids=["plain", "gated"])
@pytest.mark.parametrize("has_cross", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("dtype", "kv_dtype", "head_dim", "inner"), CASES)
def test_a_stack_is_its_kernels(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    inner: int,
    has_cross: bool,
    gated: bool,
    rms: bool,
    num_tokens: int,
) -> None:
    maker = Maker(dtype, head_dim, inner, gated, rms)
    layers = [maker.layer(index, has_cross) for index in range(LAYERS)]
    blocks = -(-num_tokens // BLOCK)
    num_blocks = blocks + 4
    cross_blocks = [num_blocks - 2, num_blocks - 1]
    shape = (num_blocks, LAYERS if has_cross else 1, 2, HEADS, BLOCK, head_dim)
    filled = maker.values(*shape).to(kv_dtype)  # cross keys among them
    x = maker.values(num_tokens, maker.hidden)
    wanted = torch.arange(num_tokens, dtype=torch.int32) * LAYERS
    wanted[1::5] = -1
    stack = stack_of(layers, maker.hidden)
    assert stack is not None
    results = []
    for run in (partial(one_by_one, layers), partial(in_one_call, stack)):
        cache = StackCache(
            filled.clone(),
            torch.arange(BLOCK, BLOCK + num_tokens),
            plan(num_tokens, num_tokens, list(range(1, blocks + 1)), num_blocks, maker, causal=has_cross),
            plan(num_tokens, BLOCK + 3, cross_blocks, num_blocks, maker, causal=False) if has_cross else None,
        )
        ring = torch.zeros(num_tokens * LAYERS, maker.hidden)
        layers_wanted = torch.tensor([[0b111, 0]] * num_tokens)
        tap = HiddenTap(wanted, layers_wanted, ring) if has_cross else None
        results.append((run(x.clone(), cache, tap), cache.kv_cache, ring))
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)
    assert not has_cross or results[0][2].any()


@needs_units
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 33, 300])
@pytest.mark.parametrize("num_out", [0, 32, 64])
def test_keys_and_values_go_from_the_product_to_the_cache(num_tokens: int, num_out: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    head_dim, layer = 32, 1
    x = torch.randn(num_tokens, 70, generator=generator)
    weight = torch.randn(num_out + 2 * HEADS * head_dim, 70, generator=generator)
    product = StackProduct(kernels.pack_weight(weight, BF16), torch.randn(len(weight), generator=generator))
    slots = torch.randperm(num_tokens + 40, generator=generator)[:num_tokens]
    slots[1::7] = -1
    caches = torch.zeros(2, num_tokens // BLOCK + 4, 2, 2, HEADS, BLOCK, head_dim, dtype=BF16)
    assert can_store_in_cache(product.weight, caches[0])
    rows = kernels.linear(x, product.weight, product.bias)
    heads = rows[:, num_out:].unflatten(1, (2 * HEADS, head_dim))
    kernels.write_kv(heads[:, :HEADS], heads[:, HEADS:], caches[0], layer, slots)
    out = torch.empty(num_tokens, num_out)
    linear_into_cache(x, product, caches[1], layer, slots, out)
    assert torch.equal(out, rows[:, :num_out])
    assert torch.equal(caches[0], caches[1])


@needs_units
def test_a_slot_outside_the_cache_is_an_error() -> None:
    product = StackProduct(kernels.pack_weight(torch.zeros(2 * HEADS * 32, 8), BF16), None)
    cache = torch.ones(2, 1, 2, HEADS, BLOCK, 32, dtype=BF16)
    with pytest.raises(kernels.Error, match="outside the cache"):
        linear_into_cache(torch.zeros(2, 8), product, cache, 0, torch.tensor([0, 2 * BLOCK]))
    assert cache.eq(1).all()


def test_rows_of_a_product_may_overlap() -> None:
    values = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))[0]
    windows = values.as_strided((13, 16), (2, 1))
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(2))
    for dtype in (F32, BF16):
        packed = kernels.pack_weight(weight, dtype)
        assert torch.equal(kernels.linear(windows, packed), kernels.linear(windows.contiguous(), packed))
