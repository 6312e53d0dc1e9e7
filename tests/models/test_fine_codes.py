"""Weights with fine scales as kernels of a GPU read them, here by the layout of csrc/ops/cuda/fine_codes.h."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from bequest.engine.backends.cuda.fine_codes import columns_of, fine_float8, fine_integers, fine_stored
from bequest.engine.formats import mxfp4
from bequest.engine.kernels.cpu_weights import QuantisedRows
from bequest.engine.kernels.cuda_fine import FineRows, stack
from bequest.engine.layers.codes import Float8Rows, IntegerRows
from tests.models.k_quants import quantise

CPU = torch.device("cpu")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def values_of(rows: FineRows) -> Tensor:
    """[N, K], place by place: a block of K is four lanes of 16 bytes, each with eight values of every group."""
    k = torch.arange(rows.depth)
    block_size = 64 if rows.bits == 8 else 128
    group, lane, at = k % block_size // 32, k % 32 // 8, k % 8
    begin = k // block_size * 64 + lane * 16
    words = rows.words.long() & 0xFFFFFFFF
    if rows.bits == 8:
        octets = rows.codes[:, begin + group * 8 + at]
        if rows.codec == "offset8":
            return rows.scales[:, None] * _with_offset(octets, words[:, k // 32])
        codes = octets.view(torch.float8_e4m3fn).float() if rows.codec == "float8" else octets.float() - 128
        return rows.scales[:, None] * _half(words[:, k // 32], lane // 2) * codes
    octets = rows.codes[:, begin + group * 4 + at % 2 * 2 + at // 4].int()
    codes = octets >> (at // 2 % 2 * 4) & 15
    if rows.codec == "offset4":
        return rows.scales[:, None] * _with_offset(codes, words[:, k // 32])
    biased = words[:, k // 128] >> (8 * group) & 0xFF
    powers = torch.where(biased > 0, torch.exp2(biased - 29.0), 0.0)
    return rows.scales[:, None] * powers * E2M1[codes]


def _with_offset(codes: Tensor, words: Tensor) -> Tensor:
    return _half(words, torch.tensor(0)) * codes + _half(words, torch.tensor(1))


def _half(words: Tensor, which: Tensor) -> Tensor:
    bits = (words >> (16 * which) & 0xFFFF).to(torch.int32).to(torch.uint16)
    return bits.view(torch.float16).float()


def integers(bits: int, group: int, depth: int, *, order: Tensor | None = None, zero: int | None = None) -> IntegerRows:
    random = torch.Generator().manual_seed(bits + group + depth)
    groups = -(-depth // group)
    codes = torch.randint(0, 2**bits, (6, depth), dtype=torch.uint8, generator=random)
    scales = (torch.rand(6, groups, generator=random) * torch.tensor([1e-6, 1e-3, 0.01, 0.3, 4, 900])[:, None]).half()
    zeros = torch.randint(0, 2**bits, (6, groups), dtype=torch.int16, generator=random)
    if zero is not None:
        zeros.fill_(zero)
    return IntegerRows(bits, codes, scales.float(), zeros, group, order)


def assert_values(rows: FineRows | None, expected: Tensor, steps: float) -> None:
    """steps: what a value may be off by, of the largest of its row"""
    assert rows is not None
    error = (values_of(rows) - expected).abs().amax(1)
    assert (error <= steps * expected.abs().amax(1)).all(), error


@pytest.mark.parametrize(("group", "depth"), [(32, 512), (64, 192), (128, 384), (96, 96)])
def test_codes_of_4_bits(group: int, depth: int) -> None:
    part = integers(4, group, depth)
    rows = fine_integers(part, CPU)
    assert_values(rows, part.values(), 2**-11)
    assert rows is not None and rows.codec == "offset4" and rows.codes.shape[1] == -(-depth // 256) * 128


@pytest.mark.parametrize("bits", [2, 3])
def test_fewer_bits(bits: int) -> None:
    part = integers(bits, 32, 256)
    assert_values(fine_integers(part, CPU), part.values(), 2**-11)


def test_columns_of_act_order_follow_each_other_by_group() -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(4)) // 32
    part = integers(4, 32, 256, order=order)
    columns = columns_of(order)
    assert_values(fine_integers(part, CPU), part.values()[:, columns], 2**-11)
    assert torch.equal(order[columns], torch.arange(256) // 32)


def test_codes_of_8_bits() -> None:
    part = integers(8, 64, 320, zero=128)
    rows = fine_integers(part, CPU)
    assert rows is not None and rows.codec == "scaled8"
    assert_values(rows, part.values(), 2**-11)
    assert fine_integers(integers(8, 64, 320), CPU) is None  # zeros that no code of 8 bits is left for
    assert fine_integers(integers(4, 16, 320), CPU) is None and fine_integers(integers(4, 8, 24), CPU) is None


def test_mxfp4_is_found_among_integers() -> None:
    random = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (5, 9, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(100, 127, (5, 9), dtype=torch.uint8, generator=random)
    values, factors = mxfp4.integers(blocks, scales)
    part = IntegerRows(
        8, (values + 128).to(torch.uint8), factors, torch.full(factors.shape, 128, dtype=torch.int16), 32
    )
    rows = fine_integers(part, CPU)
    assert rows is not None and rows.codec == "float4" and rows.nbytes < 5 * 512 * 0.6
    assert torch.equal(values_of(rows), mxfp4.decode(blocks, scales).float())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_types_of_gguf(kind: str) -> None:
    numbers = torch.randn(7, 512, generator=torch.Generator().manual_seed(3)) * torch.logspace(-4, 2, 7)[:, None]
    numbers[2, :64] = 0.25  # a group of one value
    stored = quantise(numbers.numpy(), GGMLQuantizationType[kind])
    expected = torch.from_numpy(gguf.dequantize(stored, GGMLQuantizationType[kind]))
    rows = fine_stored(QuantisedRows(kind, torch.from_numpy(stored.copy())), CPU)  # type: ignore[arg-type]
    assert_values(rows, expected, 2**-10)


@pytest.mark.parametrize(("group", "depth"), [(128, 384), (16, 64), (96, 96)])
def test_float8_in_groups(group: int, depth: int) -> None:
    random = torch.Generator().manual_seed(depth)
    codes = (torch.randn(5, depth, generator=random) * 100).to(torch.float8_e4m3fn)
    part = Float8Rows(codes, torch.rand(5, -(-depth // group), generator=random) + 1e-3, group)
    assert_values(fine_float8(part, CPU), part.values(), 2**-11)
    assert fine_float8(Float8Rows(codes, torch.ones(5, depth // 8), 8), CPU) is None


def test_rows_are_stacked() -> None:
    parts = [integers(4, 32, 256), integers(4, 64, 256)]
    packed = [fine_integers(part, CPU) for part in parts]
    rows = stack([part for part in packed if part is not None])
    assert_values(rows, torch.cat([part.values() for part in parts]), 2**-11)
