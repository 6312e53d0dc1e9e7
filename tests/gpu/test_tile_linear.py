"""Products of 5 to 128 rows in tiles, in three formats, with what is fused around them, against float32 torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda, cuda_coded, cuda_linear
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.kv_format import FP8
from tests.gpu.test_int4 import draw
from tests.gpu.test_ops import guarded, randn, reference_norm
from tests.gpu.test_skinny_linear import assert_near

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# (N, K): part of a tile, part of a unit of k, several units, few CTAs and many.
SHAPES = [(8, 256), (1000, 640), (1024, 3072), (4096, 1024), (2052, 2048)]
LARGE_SHAPES = [(6144, 4096), (28672, 512), (4096, 14336)]
ROWS = {16: (17, 24, 32), 8: (5, 16, 31, 64), 4: (5, 16, 33, 64, 65, 128)}


def weight_of(outputs: int, depth: int, bits: int) -> tuple[object, Tensor]:
    """As a kernel takes it, and its values in float32."""
    if bits == 4:
        return draw(outputs, depth, 3)
    matrix = randn(outputs, depth, dtype=BF16, seed=2, scale=depth**-0.5)
    if bits == 16:
        return (matrix, None), matrix.float()
    scales = matrix.float().abs().amax(1) / 448
    codes = (matrix.float() / scales[:, None]).to(FP8)
    return (codes, scales), codes.float() * scales[:, None]


def sizes(bits: int) -> list[tuple[int, int, int, int]]:
    shapes = SHAPES if bits == 16 else SHAPES + LARGE_SHAPES
    return [
        (bits, rows, outputs, depth)
        for rows in ROWS[bits]
        for outputs, depth in shapes
        if depth % (128 if bits == 4 else 64) == 0
    ]


ALL = [case for bits in (16, 8, 4) for case in sizes(bits)]


def linear(x: Tensor, weight: object, bias: Tensor | None) -> Tensor:
    if isinstance(weight, cuda_coded.CodedRows):
        assert weight.has_kernel(len(x))
        return cuda_coded.linear(x, weight, bias)
    assert isinstance(weight, tuple) and cuda_linear.is_tiled(x, weight[0])
    return cuda_linear.linear(x, weight[0], bias, weight[1])


def gated_linear(x: Tensor, weight: object, bias: Tensor | None, activation: str) -> Tensor:
    if isinstance(weight, cuda_coded.CodedRows):
        return cuda_coded.gated_linear(x, weight, bias, activation)
    assert isinstance(weight, tuple)
    return cuda_linear.gated_linear(x, weight[0], bias, activation, None, weight[1])


def linear_into(x: Tensor, weight: object, bias: Tensor | None, residual: Tensor) -> None:
    if isinstance(weight, cuda_coded.CodedRows):
        cuda_coded.linear_into(x, weight, bias, residual)
    else:
        assert isinstance(weight, tuple)
        cuda_linear.linear_into(x, weight[0], bias, residual, weight[1])


SMALL = [(16, 32), (8, 16), (8, 32), (8, 64), (4, 16), (4, 32), (4, 64), (4, 65)]


@pytest.mark.parametrize(("bits", "num_tokens"), SMALL)
def test_small(bits: int, num_tokens: int) -> None:
    """Rings of every length that go round, of a piece of k that ends in the middle of a round."""
    x = randn(num_tokens, 14336, dtype=BF16, seed=1)
    weight, values = weight_of(68, 14336, bits)
    assert_near(linear(x, weight, None), x.float() @ values.T)


@pytest.mark.parametrize(("bits", "num_tokens", "outputs", "depth"), ALL)
def test_products(bits: int, num_tokens: int, outputs: int, depth: int) -> None:
    x = randn(num_tokens, depth, dtype=BF16, seed=1)
    weight, values = weight_of(outputs, depth, bits)
    bias = randn(outputs, dtype=BF16, seed=3)
    expected = x.float() @ values.T + bias.float()
    plain = linear(x, weight, bias)
    assert_near(plain, expected)
    assert_near(linear(x, weight, None), x.float() @ values.T)
    residual, check = guarded(num_tokens, outputs, dtype=BF16)
    before = randn(num_tokens, outputs, dtype=BF16, seed=4)
    residual.copy_(before)
    linear_into(x, weight, bias, residual)
    assert torch.equal(residual, before + plain)
    check()
    assert torch.equal(gated_linear(x, weight, bias, "silu"), cuda.gated_activation(plain, "silu"))


@pytest.mark.parametrize("num_tokens", ROWS[16])
@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_normed_products(num_tokens: int, outputs: int, depth: int) -> None:
    x = randn(num_tokens, depth, dtype=BF16, seed=1, scale=3.0)
    norm = RowNorm(randn(depth, dtype=BF16, seed=5), 1e-5)
    (matrix, _), values = weight_of(outputs, depth, 16)  # type: ignore[misc]
    bias = randn(outputs, dtype=BF16, seed=3)
    expected = reference_norm(x, norm.weight, norm.eps) @ values.T + bias.float()
    normed = cuda_linear.normed_linear(x, norm, matrix, bias)
    assert_near(normed, expected)
    gated = cuda_linear.gated_linear(x, matrix, bias, "silu", norm)
    assert torch.equal(gated, cuda.gated_activation(normed, "silu"))


@pytest.mark.parametrize(
    ("bits", "counts"), [(16, (17, 20, 32)), (8, (5, 16, 17, 32)), (8, (33, 64)), (4, (5, 16, 31)), (4, (65, 99, 128))]
)
@pytest.mark.parametrize(("outputs", "depth"), [(1024, 3072), (4096, 1024), (6144, 1024)])
def test_rows_do_not_depend_on_the_batch(bits: int, counts: tuple[int, ...], outputs: int, depth: int) -> None:
    x = randn(counts[-1], depth, dtype=BF16, seed=1)
    weight, _ = weight_of(outputs, depth, bits)
    whole = linear(x, weight, None)
    for count in counts[:-1]:
        assert torch.equal(linear(x[-count:], weight, None), whole[-count:])


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_same_bits_every_time(bits: int) -> None:
    """What tensor cores still read is not overwritten, and kernels that overlap keep their order."""
    num_tokens = max(ROWS[bits])
    x = randn(num_tokens, 4096, dtype=BF16, seed=1)
    up, _ = weight_of(2048, 4096, bits)
    down, _ = weight_of(4096, 1024, bits)
    first = None
    for _ in range(100):
        residual = x.clone()
        for _ in range(4):
            linear_into(gated_linear(residual, up, None, "silu"), down, None, residual)
        first = residual if first is None else first
        assert torch.equal(residual, first)


@pytest.mark.parametrize(
    ("num_tokens", "outputs", "depth", "bits", "normed"),
    [
        (16, 1024, 1024, 16, False),
        (33, 1024, 1024, 16, True),
        (32, 8192, 8192, 16, False),
        (32, 1022, 1024, 8, False),
        (32, 1024, 1056, 8, False),
        (32, 1024, 1024, 8, True),
        (65, 1024, 1024, 8, False),
        (129, 1024, 1024, 4, False),
        (0, 1024, 1024, 4, False),
    ],
)
def test_what_is_no_tile(num_tokens: int, outputs: int, depth: int, bits: int, normed: bool) -> None:
    assert not _C.cuda_is_tile_product(num_tokens, outputs, depth, bits, normed)
