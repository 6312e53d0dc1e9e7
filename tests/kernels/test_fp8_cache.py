"""Caches on a CPU that are narrower than what is computed: the roundings of fp8 are torch's, and reading a cache in
8 or 16 bits gives what a float32 cache of its values gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.kv_format import FP8, KvScales

BS, NKV, NQ = 4, 2, 6


def saturated(x: Tensor) -> Tensor:
    """torch makes NaN of what is too large; a cache keeps it at the largest value."""
    return x.clamp(-448, 448).to(FP8)  # clamp keeps NaN


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_every_code_and_every_rounding() -> None:
    """All 256 codes, the midpoints between neighbours and what lies just beside them, and what no code has."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = codes[codes.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 449.0, 464.0, 465.0, -1e30, 1e-30, -1e-45, 0.0, -0.0])
    values = torch.cat([codes, middles, middles.nextafter(up), middles.nextafter(down), odd])
    cache = torch.zeros(len(values), 1, 2, 1, 1, 1, dtype=FP8)  # a token per value: the end of a row
    kernels.write_kv(values.view(-1, 1, 1), values.view(-1, 1, 1), cache, 0, torch.arange(len(values)))
    wide = torch.zeros(1, 1, 2, 1, 1, len(values), dtype=FP8)  # and whole vectors
    kernels.write_kv(values.view(1, 1, -1), values.view(1, 1, -1), wide, 0, torch.tensor([0]))
    for stored in (*cache.view(-1, 2).t(), wide[0, 0, 0, 0, 0], wide[0, 0, 1, 0, 0]):
        number = ~values.isnan()
        assert same_bits(stored[number], saturated(values[number]))
        assert stored[~number].isnan().all()


def written(k: Tensor, v: Tensor, scales: KvScales, dtype: torch.dtype = FP8) -> Tensor:
    """k, v [T, NKV, D] in a cache whose other slots are NaN."""
    tokens, _, head_dim = k.shape
    cache = torch.full((-(-tokens // BS) + 1, 1, 2, NKV, BS, head_dim), torch.nan).to(dtype)
    kernels.write_kv(k, v, cache, 0, torch.arange(BS, BS + tokens), scales)
    return cache


def attend(q: Tensor, cache: Tensor, length: int, scales: KvScales) -> Tensor:
    plan = kernels.AttentionPlan(
        torch.tensor([0, len(q)], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        torch.arange(1, cache.shape[0], dtype=torch.int32)[None],
        num_q_heads=NQ,
        num_kv_heads=NKV,
        head_dim=q.shape[2],
        block_size=BS,
        num_blocks=cache.shape[0],
    )
    return kernels.paged_attention(q, cache, 0, plan, q.shape[2] ** -0.5, scales=scales)


@pytest.mark.parametrize("dtype", [FP8, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [5, 16, 64, 100])
@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 3), (1, 300), (2, 33), (40, 41), (17, 300)])
def test_attention_reads_the_stored_values(queries: int, length: int, head_dim: int, dtype: torch.dtype) -> None:
    """Bit for bit: a narrow value is exact in float32. Small values (of exponent 0) and large ones are among them."""
    generator = torch.Generator().manual_seed(length)
    k, v = torch.randn(2, length, NKV, head_dim, generator=generator).pow(3)
    k[::3] *= 1e-4  # where float16 has exponent 0
    q = torch.randn(queries, NQ, head_dim, generator=generator)
    cache = written(k, v, KvScales(), dtype)
    assert torch.equal(attend(q, cache, length, KvScales()), attend(q, cache.float(), length, KvScales()))


def test_scales_bring_values_into_range_and_back() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 70, NKV, 64, generator=generator)
    k, v, scales = k * 5000, v / 3000, KvScales(key=40.0, value=2e-5)
    q = torch.randn(3, NQ, 64, generator=generator) / 5000
    cache = written(k, v, scales)
    slots = torch.arange(BS, BS + 70)
    assert same_bits(cache[slots // BS, 0, 0, :, slots % BS], saturated(k * torch.tensor(1 / 40.0)))
    assert same_bits(cache[slots // BS, 0, 1, :, slots % BS], saturated(v * torch.tensor(1 / 2e-5)))
    stored = cache.float()
    stored[:, :, 0] *= scales.key
    stored[:, :, 1] *= scales.value
    expected = attend(q, stored, 70, KvScales())
    assert (attend(q, cache, 70, scales) - expected).norm() < 1e-5 * expected.norm()


def test_nan_stays_nan() -> None:
    k, v = torch.ones(2, 5, NKV, 16)
    v[2, 0, 3] = torch.nan
    out = attend(torch.ones(1, NQ, 16), written(k, v, KvScales()), 5, KvScales())
    assert out.isnan().sum() == NQ // NKV and out[0, : NQ // NKV, 3].isnan().all()
