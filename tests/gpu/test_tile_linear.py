"""Products of batches of rows in tiles, in four formats, with what is fused around them, against float32 torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda, cuda_coded, cuda_linear
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.cuda_tiles import TileFormat
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.kernels.streams import current_stream
from bequest.engine.kernels.weighed_rows import GainAhead, WeighedRows
from tests.gpu.test_int4 import draw
from tests.gpu.test_ops import guarded, randn, reference_norm
from tests.gpu.test_skinny_linear import assert_near

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
BFLOAT16, FLOAT8, FLOAT8_ROWS, INT4 = TileFormat
# (N, K): part of a tile, part of a unit of k, several units, few CTAs and many.
SHAPES = [(8, 256), (1000, 640), (1024, 2048), (1024, 3072), (4096, 1024), (2052, 2048)]
LARGE_SHAPES = [(6144, 4096), (28672, 512), (4096, 14336)]
ROWS = {
    BFLOAT16: (5, 9, 16, 32, 33, 64),
    FLOAT8: (5, 16, 31),
    FLOAT8_ROWS: (33, 64, 65, 128),
    INT4: (5, 16, 33, 64, 65, 128),
}


def weight_of(outputs: int, depth: int, format: TileFormat) -> tuple[object, Tensor]:
    """As a kernel takes it, and its values in float32."""
    if format is INT4:
        return draw(outputs, depth, 3)
    matrix = randn(outputs, depth, dtype=BF16, seed=2, scale=depth**-0.5)
    if format is BFLOAT16:
        return (matrix, None), matrix.float()
    scales = matrix.float().abs().amax(1) / 448
    codes = (matrix.float() / scales[:, None]).to(FP8)
    return (codes, scales), codes.float() * scales[:, None]


def multiplied(x: Tensor, format: TileFormat) -> Tensor:
    """What is multiplied of x, in float32."""
    if format is not FLOAT8_ROWS:
        return x.float()
    rows = cuda_linear.float8_rows(x)
    return rows.codes.float() * rows.scales[:, None]


ALL = [
    (format, rows, outputs, depth)
    for format in TileFormat
    for rows in ROWS[format]
    for outputs, depth in (SHAPES if format is BFLOAT16 else SHAPES + LARGE_SHAPES)
]
ALL += [(INT4, 200, 6144, 4096), (INT4, 256, 4096, 14336)]
ALL += [(BFLOAT16, rows, outputs, depth) for rows in (5, 8, 16, 32, 64) for outputs, depth in LARGE_SHAPES]


def linear(x: Tensor, weight: object, bias: Tensor | None) -> Tensor:
    if isinstance(weight, cuda_coded.CodedRows):
        assert weight.is_tiled(len(x))
        return cuda_coded.linear(x, weight, bias)
    assert isinstance(weight, tuple) and cuda_linear.tile_format(x, weight[0]) is not None
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


SMALL = [
    (BFLOAT16, 8),
    (BFLOAT16, 16),
    (BFLOAT16, 32),
    (BFLOAT16, 64),
    (FLOAT8, 16),
    (FLOAT8, 32),
    (FLOAT8_ROWS, 64),
    (FLOAT8_ROWS, 128),
]
SMALL += [(INT4, 16), (INT4, 32), (INT4, 64), (INT4, 65)]


@pytest.mark.parametrize(("format", "num_tokens"), SMALL)
def test_small(format: TileFormat, num_tokens: int) -> None:
    """Rings of every length that go round, of a piece of k that ends in the middle of a round."""
    x = randn(num_tokens, 14336, dtype=BF16, seed=1)
    weight, values = weight_of(68, 14336, format)
    assert_near(linear(x, weight, None), multiplied(x, format) @ values.T)


@pytest.mark.parametrize(("format", "num_tokens", "outputs", "depth"), ALL)
def test_products(format: TileFormat, num_tokens: int, outputs: int, depth: int) -> None:
    x = randn(num_tokens, depth, dtype=BF16, seed=1)
    weight, values = weight_of(outputs, depth, format)
    bias = randn(outputs, dtype=BF16, seed=3)
    product = multiplied(x, format) @ values.T
    plain = linear(x, weight, bias)
    assert_near(plain, product + bias.float())
    assert_near(linear(x, weight, None), product)
    residual, check = guarded(num_tokens, outputs, dtype=BF16)
    before = randn(num_tokens, outputs, dtype=BF16, seed=4)
    residual.copy_(before)
    linear_into(x, weight, bias, residual)
    assert torch.equal(residual, before + plain)
    check()
    assert torch.equal(gated_linear(x, weight, bias, "silu"), cuda.gated_activation(plain, "silu"))


@pytest.mark.parametrize("splits", range(1, 9))
@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("format", [BFLOAT16, FLOAT8, INT4])
def test_tiles_of_every_size(format: TileFormat, rows: int, splits: int) -> None:
    """Divided in every way: tiles that W ends in, pieces of k of which some have one unit or none, bands that not all
    thread blocks of a cluster finish."""
    for num_tokens, outputs, depth in ((5, 268, 256), (16, 1000, 512), (30, 68, 2048), (64, 2052, 1152)):
        if format is FLOAT8 and num_tokens > 32:
            continue
        x = randn(num_tokens, depth, dtype=BF16, seed=1)
        weight, values = weight_of(outputs, depth, format)
        if isinstance(weight, cuda_coded.CodedRows):
            product = weight._product(None)
        else:
            matrix, scales = weight  # type: ignore[misc]
            product = (matrix.data_ptr(), 0, outputs, depth, 0 if scales is None else scales.data_ptr(), 0)
        out, check = guarded(num_tokens, outputs, dtype=BF16)
        shape = (x.data_ptr(), num_tokens, depth, 1)
        _C.cuda_planned_tile_linear(shape, 0, product, out.data_ptr(), (rows, splits), current_stream())
        assert_near(out, x.float() @ values.T)
        check()


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [64, 96, 128, 144, 192, 224])
def test_waves_of_every_size(rows: int, splits: int) -> None:
    """Rows in float8, divided in every way: tiles that W ends in, and pieces of k of which some have nothing."""
    for num_tokens, outputs, depth in (
        (64, 272, 1920),
        (33, 2052, 256),
        (5, 1000, 14336),
        (67, 1000, 1920),
        (128, 272, 256),
    ):
        x = randn(num_tokens, depth, dtype=BF16, seed=1)
        weight, values = weight_of(outputs, depth, FLOAT8_ROWS)
        assert isinstance(weight, tuple)
        codes, scales = weight
        rounded = cuda_linear.float8_rows(x)
        out, check = guarded(num_tokens, outputs, dtype=BF16)
        matrix = (rounded.codes.data_ptr(), num_tokens, depth, 2)
        product = (codes.data_ptr(), 0, outputs, depth, scales.data_ptr(), 0)
        _C.cuda_planned_tile_linear(
            matrix, rounded.scales.data_ptr(), product, out.data_ptr(), (rows, splits), current_stream()
        )
        assert_near(out, multiplied(x, FLOAT8_ROWS) @ values.T)
        check()


NORMED_SHAPES = [(8, 256), (1000, 640), (4096, 1024), (2052, 2048), (6144, 2048), (64, 4096)]


def left(x: Tensor, gain: GainAhead) -> WeighedRows:
    """What is left of rows [T, K] that nothing is added to."""
    num_tokens, depth = x.shape
    nothing = torch.zeros(num_tokens, 64, dtype=BF16, device=x.device)
    weighed = added(nothing, torch.zeros(depth, 64, dtype=BF16, device=x.device), None, x.clone(), gain)
    assert torch.equal(weighed.before, x)
    return weighed


def added(x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor, gain: GainAhead) -> WeighedRows:
    found = cuda_linear.linear_into(x, matrix, bias, residual, None, gain)
    assert found is not None
    return found


def weighed_linear(x: WeighedRows, matrix: Tensor, bias: Tensor | None, tap: LayerTap | None = None) -> Tensor:
    assert cuda_linear.takes_weighed(x, matrix)
    return cuda_linear.normed_linear(x, RowNorm(x.rows, x.eps, tap), matrix, bias)


def weighed_gated(x: WeighedRows, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return cuda_linear.gated_linear(x, matrix, bias, "silu", RowNorm(x.rows, x.eps))


def matrix_of(outputs: int, depth: int) -> Tensor:
    return randn(outputs, depth, dtype=BF16, seed=2, scale=depth**-0.5)


def gain_of(depth: int, offset: float = 0.0) -> GainAhead:
    return GainAhead(randn(depth, dtype=BF16, seed=5), offset, 1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("num_tokens", [5, 8, 9, 16, 32, 33, 64])
@pytest.mark.parametrize(
    ("outputs", "depth"), [(8, 256), (1000, 640), (1024, 3072), (2048, 2048), (4096, 14336), (20000, 64)]
)
def test_what_is_left_for_a_norm(num_tokens: int, outputs: int, depth: int, offset: float) -> None:
    x, matrix = randn(num_tokens, depth, dtype=BF16, seed=1), matrix_of(outputs, depth)
    bias, gain = randn(outputs, dtype=BF16, seed=3), gain_of(outputs, offset)
    plain, check = guarded(num_tokens, outputs, dtype=BF16)
    plain.copy_(randn(num_tokens, outputs, dtype=BF16, seed=4))
    residual = plain.clone()
    cuda_linear.linear_into(x, matrix, bias, plain)
    found = added(x, matrix, bias, residual, gain)
    assert torch.equal(residual, plain) and found.before is residual
    sums = plain.float()
    assert torch.equal(found.rows, (sums * (gain.weight.float() + offset)).to(BF16))
    torch.testing.assert_close(found.squares, sums.square().view(num_tokens, -1, 8).sum(2), rtol=1e-5, atol=0)
    check()


@pytest.mark.parametrize("num_tokens", [5, 8, 9, 16, 31, 32, 33, 64])
@pytest.mark.parametrize(("outputs", "depth"), NORMED_SHAPES)
def test_normed_products(num_tokens: int, outputs: int, depth: int) -> None:
    x, gain, matrix = randn(num_tokens, depth, dtype=BF16, seed=1, scale=3.0), gain_of(depth), matrix_of(outputs, depth)
    bias, rows = randn(outputs, dtype=BF16, seed=3), left(x, gain)
    normed = weighed_linear(rows, matrix, bias)
    assert_near(normed, reference_norm(x, gain.weight, gain.eps) @ matrix.float().T + bias.float())
    assert torch.equal(weighed_gated(rows, matrix, bias), cuda.gated_activation(normed, "silu"))


@pytest.mark.parametrize("num_tokens", [5, 16, 40])
@pytest.mark.parametrize(("outputs", "depth"), [(8, 256), (2000, 1024), (33000, 4096)])
def test_the_tap_sees_rows_before_their_norm(num_tokens: int, outputs: int, depth: int) -> None:
    """Token 0 wants layers 1 and 70, token 2 layer 70, token 3 layer 0, around the ring."""
    words = torch.zeros(num_tokens, 2, dtype=torch.int64)
    words[0, 0], words[0, 1], words[2, 1], words[3, 0] = 1 << 1, 1 << 6, 1 << 6, 1
    first_rows = torch.full((num_tokens,), -1, dtype=torch.int32)
    first_rows[[0, 2, 3]] = torch.tensor([5, 1, 2], dtype=torch.int32)
    ring, check = guarded(6, depth, dtype=BF16)
    table = HiddenTap(first_rows.cuda(), words.cuda(), ring)
    matrix = matrix_of(outputs, depth)
    states = {}
    for layer in (0, 1, 2, 70):
        states[layer] = randn(num_tokens, depth, dtype=BF16, seed=layer + 10)
        rows = left(states[layer], gain_of(depth))
        tapped = weighed_linear(rows, matrix, None, LayerTap(table, layer))
        assert torch.equal(tapped, weighed_linear(rows, matrix, None))
    for row, (layer, token) in {5: (1, 0), 0: (70, 0), 1: (70, 2), 2: (0, 3)}.items():
        assert torch.equal(ring[row], states[layer][token]), row
    assert ring[3:5].isnan().all()
    check()


def test_normed_rows_do_not_depend_on_the_batch() -> None:
    x, gain, matrix = randn(64, 1024, dtype=BF16, seed=1), gain_of(1024), matrix_of(4096, 1024)
    whole = weighed_linear(left(x, gain), matrix, None)
    for count in (5, 8, 9, 16, 17, 32, 33):
        assert torch.equal(weighed_linear(left(x[-count:], gain), matrix, None), whole[-count:])


@pytest.mark.parametrize("num_tokens", [8, 16, 32, 64])
def test_norms_have_the_same_bits_every_time(num_tokens: int) -> None:
    """Each product starts while the one before it leaves what it reads."""
    x, gain = randn(num_tokens, 2048, dtype=BF16, seed=1), gain_of(2048)
    up, down, first = matrix_of(2048, 2048), matrix_of(2048, 1024), None
    for _ in range(100):
        residual = x.clone()
        rows = added(cuda_linear.gated_linear(residual, up, None, "silu", None), down, None, residual, gain)
        for _ in range(4):
            rows = added(weighed_gated(rows, up, None), down, None, residual, gain)
        first = residual if first is None else first
        assert torch.equal(residual, first)


@pytest.mark.parametrize(
    ("format", "counts"),
    [
        (BFLOAT16, (5, 8, 9, 16, 20, 32, 40, 64)),
        (FLOAT8, (5, 16, 17, 32)),
        (FLOAT8_ROWS, (33, 64, 100, 128)),
        (INT4, (5, 16, 31)),
        (INT4, (65, 99, 128)),
    ],
)
@pytest.mark.parametrize(("outputs", "depth"), [(1024, 2048), (1024, 3072), (4096, 1024), (6144, 1024)])
def test_rows_do_not_depend_on_the_batch(format: TileFormat, counts: tuple[int, ...], outputs: int, depth: int) -> None:
    x = randn(counts[-1], depth, dtype=BF16, seed=1)
    weight, _ = weight_of(outputs, depth, format)
    whole = linear(x, weight, None)
    for count in counts[:-1]:
        assert torch.equal(linear(x[-count:], weight, None), whole[-count:])


@pytest.mark.parametrize(("outputs", "depth"), LARGE_SHAPES)
def test_rows_of_large_weights_do_not_depend_on_the_batch(outputs: int, depth: int) -> None:
    """In bfloat16: up to 8, 16, 32 and 64 rows have kernels of their own."""
    x = randn(64, depth, dtype=BF16, seed=1)
    weight, _ = weight_of(outputs, depth, BFLOAT16)
    whole = linear(x, weight, None)
    for count in (5, 8, 9, 16, 17, 33):
        assert torch.equal(linear(x[-count:], weight, None), whole[-count:])


@pytest.mark.parametrize(("format", "num_tokens"), [(each, max(ROWS[each])) for each in TileFormat] + [(INT4, 128)])
def test_the_same_bits_every_time(format: TileFormat, num_tokens: int) -> None:
    """What tensor cores still read is not overwritten, and kernels that overlap keep their order."""
    x = randn(num_tokens, 4096, dtype=BF16, seed=1)
    up, _ = weight_of(2048, 4096, format)
    down, _ = weight_of(4096, 1024, format)
    first = None
    for _ in range(100):
        residual = x.clone()
        for _ in range(4):
            linear_into(gated_linear(residual, up, None, "silu"), down, None, residual)
        first = residual if first is None else first
        assert torch.equal(residual, first)


def test_a_slice_that_is_ahead_waits() -> None:
    """With three stages a warpgroup waits for a round before the other's has landed. The memory is busy beside it, so
    that copies overtake each other; a barrier too few fails within some dozens of these."""
    x = randn(65, 14336, dtype=BF16, seed=1)
    weight, values = weight_of(4096, 14336, INT4)
    first = linear(x, weight, None)
    assert_near(first, x.float() @ values.T)
    beside = torch.empty(80 << 20, dtype=torch.uint8, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        beside.zero_()
        wrong += (linear(x, weight, None) != first).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize(
    ("num_tokens", "outputs", "depth", "format"),
    [
        (4, 1024, 1024, BFLOAT16),
        (4, 8192, 8192, BFLOAT16),
        (65, 8192, 8192, BFLOAT16),
        (17, 49152, 576, BFLOAT16),
        (32, 1022, 1024, FLOAT8),
        (32, 1024, 1056, FLOAT8),
        (33, 1024, 1024, FLOAT8),
        (32, 1024, 1024, FLOAT8_ROWS),
        (64, 1024, 1088, FLOAT8_ROWS),
        (129, 1024, 1024, FLOAT8_ROWS),
        (129, 1024, 1024, INT4),
        (257, 8192, 4096, INT4),
        (0, 1024, 1024, INT4),
    ],
)
def test_what_is_no_tile(num_tokens: int, outputs: int, depth: int, format: TileFormat) -> None:
    assert not _C.cuda_is_tile_product(num_tokens, outputs, depth, format)
