"""Writing, copying and swapping of cache blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bequest.engine import _C
from bequest.engine.kernels import cpu as kernels

NB, L, NKV, BS, D = 6, 3, 2, 4, 5
NAN = float("nan")


def pairs(*values: tuple[int, int]) -> np.ndarray:
    return np.array(values, dtype=np.int32).reshape(-1, 2)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits: NaN equals NaN."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("fused", [False, True])
def test_write(dtype: torch.dtype, head_dim: int, fused: bool) -> None:
    slots = torch.tensor([0, 23, -1, 7, 4, -1, 12])
    rows = torch.randn(len(slots), 2 * NKV + 3, head_dim, generator=torch.Generator().manual_seed(0))
    k, v = rows[:, 3 : 3 + NKV], rows[:, 3 + NKV :]
    if not fused:
        k, v = k.contiguous(), v.contiguous()
    cache = torch.full((NB, L, 2, NKV, BS, head_dim), 7.0, dtype=dtype)
    expected = cache.clone()
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // BS, 1, 0, :, slot % BS] = k[t].to(dtype)
            expected[slot // BS, 1, 1, :, slot % BS] = v[t].to(dtype)
    kernels.write_kv(k, v, cache, 1, slots)
    assert same(cache, expected)


def test_write_rounds_to_nearest_even_and_keeps_specials() -> None:
    values = torch.tensor([1.00390625, 1.01171875, float("inf"), -float("inf"), NAN, -0.0, 3.4e38, 1e-40])
    cache = torch.zeros(1, 1, 2, 1, 1, len(values), dtype=torch.bfloat16)
    kernels.write_kv(values.view(1, 1, -1), values.view(1, 1, -1), cache, 0, torch.tensor([0]))
    expected = values.to(torch.bfloat16)
    stored = cache[0, 0, 0, 0, 0]
    assert stored.isnan().tolist() == expected.isnan().tolist()
    assert same(stored.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_every_float16_and_every_rounding() -> None:
    """All codes, the midpoints between neighbours and what lies just beside them; what is too large stays at the
    largest value, where torch would make it infinite."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    finite = codes[codes.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    odd = torch.tensor([NAN, torch.inf, -torch.inf, 65519.0, 65520.0, -65536.0, -1e30, 1e-30, -1e-45, 0.0, -0.0])
    values = torch.cat([codes, middles, middles.nextafter(up), middles.nextafter(down), odd])
    cache = torch.zeros(1, 1, 2, 1, 1, len(values), dtype=torch.float16)
    kernels.write_kv(values.view(1, 1, -1), values.view(1, 1, -1), cache, 0, torch.tensor([0]))
    number = ~values.isnan()
    for stored in cache[0, 0, :, 0, 0]:
        assert same(stored[number], values[number].clamp(-65504, 65504).to(torch.float16))
        assert stored[~number].isnan().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_write_many_tokens(threads: int) -> None:
    tokens = 4000
    k, v = torch.randn(2, tokens, NKV, D, generator=torch.Generator().manual_seed(0))
    cache = torch.full((tokens // BS, L, 2, NKV, BS, D), NAN)
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    _C.set_num_threads(threads)
    try:
        kernels.write_kv(k, v, cache, 2, slots)
    finally:
        _C.set_num_threads(1)
    assert torch.equal(cache[slots // BS, 2, 0, :, slots % BS], k)
    assert torch.equal(cache[slots // BS, 2, 1, :, slots % BS], v)
    assert cache[:, :2].isnan().all()


@pytest.mark.parametrize("slot", [-2, NB * BS, 2**40])
def test_slot_outside_the_cache_is_an_error_and_nothing_is_written(slot: int) -> None:
    cache = torch.zeros(NB, L, 2, NKV, BS, D)
    k = torch.ones(2, NKV, D)
    with pytest.raises(_C.Error, match="outside the cache"):
        kernels.write_kv(k, k, cache, 0, torch.tensor([1, slot]))
    assert not cache.any()
    with pytest.raises(_C.Error, match="layer"):
        kernels.write_kv(k, k, cache, L, torch.tensor([1, 2]))


def test_write_nothing() -> None:
    cache = torch.zeros(NB, L, 2, NKV, BS, D)
    kernels.write_kv(torch.empty(0, NKV, D), torch.empty(0, NKV, D), cache, 0, torch.empty(0, dtype=torch.int64))
    assert not cache.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copy_blocks(dtype: torch.dtype) -> None:
    cache = torch.randn(NB, L, 2, NKV, BS, D).to(dtype)
    expected = cache.clone()
    expected[4], expected[5], expected[2] = cache[1], cache[1], cache[3]
    kernels.copy_blocks(cache, pairs((1, 4), (1, 5), (3, 2)))
    assert same(cache, expected)
    kernels.copy_blocks(cache, pairs())
    assert same(cache, expected)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (((1, 2), (3, 2)), "written twice"),
        (((1, 2), (2, 3)), "both read and written"),
        (((1, 2), (3, 1)), "both read and written"),
        (((1, 1),), "both read and written"),
        (((NB, 1),), "source block 6"),
        (((-1, 1),), "source block -1"),
        (((1, NB),), "destination block 6"),
    ],
)
def test_copies_that_depend_on_their_order_are_errors(bad: tuple[tuple[int, int], ...], message: str) -> None:
    cache = torch.randn(NB, L, 2, NKV, BS, D)
    before = cache.clone()
    with pytest.raises(_C.Error, match=message):
        kernels.copy_blocks(cache, pairs(*bad))
    assert torch.equal(cache, before)


def test_swap_blocks() -> None:
    device, host = torch.randn(NB, L, 2, NKV, BS, D), torch.randn(3, L, 2, NKV, BS, D)
    device_before, host_before = device.clone(), host.clone()
    kernels.swap_blocks(device, host, torch.tensor([[5, 0], [0, 2]], dtype=torch.int32))
    assert torch.equal(host[0], device[5]) and torch.equal(host[2], device[0]) and torch.equal(host[1], host_before[1])
    # The same numbers name different blocks on the two sides.
    kernels.swap_blocks(host, device, pairs((0, 1), (1, 2), (2, 0)))
    assert torch.equal(device[1], device_before[5]) and torch.equal(device[2], host_before[1])
    assert torch.equal(device[3:], device_before[3:])
    with pytest.raises(_C.Error, match="destination block 3"):
        kernels.swap_blocks(device, host, pairs((5, 3)))
