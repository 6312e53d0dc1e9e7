"""Attention in products of bfloat16, where the chip has units for them. What its bits depend on: see float32's tests.

The reference is float64 over inputs rounded to bfloat16; what is left is the rounding of the weights. They are rounded
before they are summed, so each is off by a factor 1 + e, |e| <= 2^-8, in the numerator and in the sum alike, and an
output by sum p e (v - out): at most 2^-8 times the mean distance of the values from it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.kv_format import FP8
from tests.forked import run_tests
from tests.kernels.test_attention import Case, Step, attend, make_plan, make_step
from tests.kernels.test_attention_invariance import rows_of

needs_units = pytest.mark.skipif(kernels.isa() != "amx", reason="this chip multiplies no tiles of bfloat16")


def rounded(x: Tensor) -> Tensor:
    return x.float().to(torch.bfloat16).double()


def expected(step: Step, s: int) -> tuple[Tensor, Tensor]:
    """Rows of sequence s, [query_len, NQ, D] float64, and how far off they may be."""
    case, bias = step.case, step.case.bias
    query_len, seq_len = case.lens[s]
    first, group = int(step.query_start[s]), case.num_q_heads // case.num_kv_heads
    q = rounded(step.q[first : first + query_len])  # [query_len, NQ, D]
    keys = rounded(step.keys[s]).repeat_interleave(group, 1)  # [seq_len, NQ, D]
    values = rounded(step.values[s]).repeat_interleave(group, 1)
    distance = torch.arange(seq_len) - (torch.arange(query_len)[:, None] + seq_len - query_len)
    scores = torch.einsum("thd,khd->htk", q, keys) * case.scale  # [NQ, query_len, seq_len]
    if case.soft_cap:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    if bias is not None:
        reach = bias.shape[1] // 2
        scores = scores + bias[:, distance.clamp(-reach, reach) + reach].double()
    hidden = distance > 0 if case.causal else torch.zeros_like(distance, dtype=torch.bool)
    if case.window:
        hidden = hidden | (distance <= -case.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if case.sinks is not None:
        scores = torch.cat((scores, case.sinks[:, None, None].double().expand(-1, query_len, 1)), -1)
    weights = torch.softmax(scores, -1)[..., :seq_len]
    out = torch.einsum("htk,khd->thd", weights, values)
    away = (values[None] - out[:, None]).abs()  # [query_len, seq_len, NQ, D]
    size = torch.einsum("htk,khd->thd", weights, values.abs())
    return out, 2**-8 * torch.einsum("htk,tkhd->thd", weights, away) + 3e-5 * size


def check(case: Case) -> None:
    step = make_step(replace(case, bfloat16=True))
    got = attend(step)
    for s, (query_len, seq_len) in enumerate(case.lens):
        rows = got[int(step.query_start[s]) : int(step.query_start[s + 1])]
        if seq_len == 0:
            assert torch.equal(rows, torch.zeros_like(rows))
            continue
        out, tolerance = expected(step, s)
        error = (rows.double() - out).abs()
        assert (error <= tolerance).all(), (query_len, seq_len, (error / tolerance).max())


@needs_units
@pytest.mark.parametrize("count", [1, 2, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200])
def test_lengths(count: int) -> None:
    check(Case(((count, count), (1, 3 * count), (2, count + 1))))


@needs_units
def test_tiles_and_splits() -> None:
    """More rows than a tile has, more keys than a split; chunks that begin in the middle of either."""
    lens = ((390, 390), (16, 512), (17, 513), (40, 1100), (193, 600), (1, 511), (2, 513), (3, 1100))
    check(Case(lens, num_q_heads=2, num_kv_heads=1, head_dim=32))


@needs_units
@pytest.mark.parametrize("head_dim", [1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 80, 96, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check(Case(((20, 70), (33, 33), (5, 40), (1, 70), (3, 16)), head_dim=head_dim, dtype=dtype))


@needs_units
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    check(
        Case(((20, 2 * block_size + 20), (40, 130), (3, 530), (1, 90)), head_dim=32, block_size=block_size, dtype=dtype)
    )


@needs_units
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (9, 3), (8, 1), (14, 2), (16, 4), (250, 1)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check(Case(((1, 70), (2, 70), (17, 69), (50, 50)), num_q_heads=heads[0], num_kv_heads=heads[1]))


@needs_units
@pytest.mark.parametrize("window", [1, 7, 31, 32, 33, 64, 200, 5000])
def test_windows(window: int) -> None:
    check(Case(((1, 600), (70, 70), (35, 530), (3, 1060)), window=window))


@needs_units
def test_sinks() -> None:
    check(Case(((1, 70), (20, 80), (40, 40), (1, 1300)), num_q_heads=6, has_sinks=True))


@needs_units
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap: float, causal: bool) -> None:
    check(Case(((1, 70), (20, 80), (40, 40)), soft_cap=soft_cap, causal=causal, num_q_heads=6))


@needs_units
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reach", [0, 1, 16, 63, 128, 600])
def test_bias_by_distance(reach: int, causal: bool) -> None:
    lens = ((1, 130), (70, 70), (3, 300), (40, 700), (0, 7))
    check(Case(lens, causal=causal, bias_reach=reach, window=1 << 28 if causal else 0))


@needs_units
def test_cross_attention() -> None:
    """Queries of a decoder over keys of an encoder: more of these or of those, one key, and none at all."""
    lens = ((1, 70), (20, 5), (17, 1), (19, 0), (64, 65), (16, 1500))
    check(Case(lens, causal=False, num_q_heads=6, num_kv_heads=6, head_dim=64, block_size=16))


@needs_units
def test_a_lone_key_is_its_value() -> None:
    for count in (1, 3, 20):
        step = make_step(Case(((count, 1),), causal=False, bfloat16=True))
        values = rounded(step.values[0]).repeat_interleave(2, 1).float()  # [1, NQ, D]
        assert torch.equal(attend(step), values.expand(count, -1, -1))


@needs_units
def test_a_cache_in_fp8() -> None:
    """Every fp8 is a bfloat16: the cache gives the bits that one in bfloat16 of the same values gives."""
    step = make_step(Case(((40, 90), (1, 530), (3, 20)), head_dim=48, bfloat16=True))
    cache = step.kv_cache.nan_to_num(0.0).to(FP8)
    wide = replace(step, kv_cache=cache.float().to(torch.bfloat16))
    assert torch.equal(attend(replace(step, kv_cache=cache)), attend(wide))


@needs_units
def test_large_scores_and_nan() -> None:
    step = make_step(Case(((40, 300), (20, 30)), bfloat16=True))
    step.q[:40] *= 1e3
    clean = attend(step)
    out, _ = expected(step, 0)
    torch.testing.assert_close(clean[:40].double(), out, rtol=2e-2, atol=2e-2)
    step.q[7, 2] = torch.nan
    dirty = attend(step)
    assert dirty[7, 2].isnan().all()
    dirty[7, 2] = clean[7, 2]
    assert torch.equal(clean, dirty)


@needs_units
def test_subnormal_numbers_count_as_zero_for_few_rows_and_many() -> None:
    step = make_step(Case(((40, 300),), dtype=torch.bfloat16, head_dim=32, bfloat16=True))
    step.kv_cache[:, :, 1] *= 1e-37
    whole = attend(step)
    for row in (0, 20, 39):
        assert torch.equal(attend(rows_of(step, 0, row, row + 1)), whole[row : row + 1])


def test_without_units_it_is_float32() -> None:
    """In a process of its own where this chip has them."""
    if kernels.isa() == "amx":
        command = ["-x", f"{__file__}::{_NAME}"]
        done = run_tests(command, BEQUEST_ISA="avx512")
        assert done.returncode == 0, done.stdout + done.stderr
        return
    step = make_step(Case(((40, 90), (16, 530), (1, 5)), bfloat16=True))
    assert torch.equal(attend(step), attend(replace(step, case=replace(step.case, bfloat16=False))))


_NAME = test_without_units_it_is_float32.__name__


def test_a_scale_below_zero_is_refused() -> None:
    step = make_step(Case(((20, 20),), bfloat16=True))
    with pytest.raises(kernels.Error, match="scale above 0"):
        kernels.paged_attention(step.q, step.kv_cache, 1, make_plan(step), -1.0)
