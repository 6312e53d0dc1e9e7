"""Products of a few rows, alone and with what is fused around them, against float32 torch and the unfused kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda as ops
from bequest.engine.kernels import cuda_linear as products
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap
from tests.gpu.test_ops import CANARY, DEVICE, guarded, int32, randn, reference_norm

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# Outputs that do not fill a tile of 8, a pair of tiles, a CTA or a round; k of part of a chunk of 1024 and of many.
SHAPES = [(1, 256), (7, 512), (9, 768), (1021, 3072), (1056, 1280), (2051, 1792), (8195, 768), (12345, 256)]
LARGE_SHAPES = [(8195, 1280), (65539, 256), (1111, 7936)]  # streamed through shared memory, of few rows only
ROWS_AND_SHAPES = [(rows, *shape) for rows in (1, 2, 3, 7, 8, 9, 15, 16) for shape in SHAPES] + [
    (rows, *shape) for rows in (1, 2, 3, 4) for shape in LARGE_SHAPES
]


def weights(outputs: int, depth: int, with_bias: bool) -> tuple[Tensor, Tensor | None]:
    weight = randn(outputs, depth, dtype=BF16, seed=2, scale=depth**-0.5)
    return weight, randn(outputs, dtype=BF16, seed=3) if with_bias else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.float() @ weight.float().T + (bias.float() if bias is not None else 0)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Up to the rounding of results, and of a few operands, to bfloat16."""
    assert actual.dtype is BF16 and actual.shape == expected.shape
    assert (actual.float() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize(
    ("num_tokens", "outputs", "depth"),
    [
        *ROWS_AND_SHAPES,
        *((rows, *shape) for rows in (17, 32, 33) for shape in SHAPES[:4]),
        (5, 64, 100),
        (5, 9001, 1024),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(num_tokens: int, outputs: int, depth: int, with_bias: bool) -> None:
    x = randn(num_tokens, depth, dtype=BF16, seed=1)
    weight, bias = weights(outputs, depth, with_bias)
    assert_near(products.linear(x, weight, bias), product(x, weight, bias))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_linear_of_long_rows(num_tokens: int) -> None:
    """Rows that are too long for shared memory come from the L2 chunk by chunk, and several rounds of them."""
    x = randn(num_tokens, 14336 + 256, dtype=BF16, seed=1)
    weight, _ = weights(8 * 132 * 9 + 3, 14336 + 256, False)
    assert_near(products.linear(x, weight), product(x, weight, None))


@pytest.mark.parametrize(("num_tokens", "outputs", "depth"), ROWS_AND_SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_into(num_tokens: int, outputs: int, depth: int, with_bias: bool) -> None:
    x = randn(num_tokens, depth, dtype=BF16, seed=1)
    weight, bias = weights(outputs, depth, with_bias)
    residual, check = guarded(num_tokens, outputs, dtype=BF16)
    before = randn(num_tokens, outputs, dtype=BF16, seed=4)
    residual.copy_(before)
    products.linear_into(x, weight, bias, residual)
    assert torch.equal(residual, before + products.linear(x, weight, bias))
    check()


@pytest.mark.parametrize(("num_tokens", "outputs", "depth"), ROWS_AND_SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_normed_linear(num_tokens: int, outputs: int, depth: int, with_bias: bool) -> None:
    x = randn(num_tokens, depth, dtype=BF16, seed=1, scale=3.0)
    gain = randn(depth, dtype=BF16, seed=5)
    weight, bias = weights(outputs, depth, with_bias)
    normed = reference_norm(x, gain, 1e-5)
    if num_tokens <= products.MOST_STREAMED_ROWS:
        normed = normed.to(BF16)  # as the norm alone would store it; more rows are scaled behind the product
    kept = x.clone()
    assert_near(products.normed_linear(x, RowNorm(gain, 1e-5), weight, bias), product(normed, weight, bias))
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    ("num_tokens", "inner", "depth"),
    [
        (rows, *shape)
        for rows in (1, 3, 8, 9, 16)
        for shape in [(1, 256), (5, 512), (513, 768), (1023, 1280), (4099, 512)]
    ]
    + [(rows, 4099, 1280) for rows in (1, 4)],
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_gated_linear(num_tokens: int, inner: int, depth: int, with_bias: bool, with_norm: bool) -> None:
    x = randn(num_tokens, depth, dtype=BF16, seed=1)
    gain = randn(depth, dtype=BF16, seed=5)
    weight, bias = weights(2 * inner, depth, with_bias)
    for activation in ("silu", "gelu", "gelu_tanh", "relu", "clamped_swish") if inner == 513 else ("silu",):
        actual = products.gated_linear(x, weight, bias, activation, RowNorm(gain, 1e-5) if with_norm else None)
        if with_norm:
            gate_up = products.normed_linear(x, RowNorm(gain, 1e-5), weight, bias)
        else:
            gate_up = products.linear(x, weight, bias)
        assert torch.equal(actual, ops.gated_activation(gate_up, activation))


@pytest.mark.parametrize(
    ("outputs", "depth", "counts"),
    [
        (1001, 1024, range(1, 5)),
        (1001, 1024, range(5, 17)),
        (1001, 1024, range(17, 33)),
        (3001, 1024, range(5, 17)),
        (7001, 1024, range(5, 17)),
        (1001, 4352, range(5, 17)),
        (9001, 1024, range(1, 5)),
        (600, 14336, range(1, 5)),
    ],
)
def test_linear_rows_do_not_depend_on_the_batch(outputs: int, depth: int, counts: range) -> None:
    """Within the range of row counts that one of our kernels serves, whether rows pass through shared memory or not."""
    x = randn(counts[-1], depth, dtype=BF16, seed=1)
    weight = randn(outputs, depth, dtype=BF16, seed=2)
    whole = products.linear(x, weight)
    for count in counts:
        assert torch.equal(products.linear(x[-count:], weight), whole[-count:])


@pytest.mark.parametrize(
    ("inner", "depth", "counts"), [(700, 1024, range(1, 5)), (301, 2048, range(5, 17)), (5000, 1024, range(1, 5))]
)
def test_fused_rows_do_not_depend_on_the_batch(inner: int, depth: int, counts: range) -> None:
    most = counts[-1]
    x = randn(most, depth, dtype=BF16, seed=1)
    norm = RowNorm(randn(depth, dtype=BF16, seed=5), 1e-6)
    weight, bias = weights(2 * inner, depth, True)
    whole = products.gated_linear(x, weight, bias, "silu", norm)
    whole_sum = randn(most, 2 * inner, dtype=BF16, seed=6)
    before = whole_sum.clone()
    products.linear_into(x, weight, bias, whole_sum)
    for count in counts:
        assert torch.equal(products.gated_linear(x[-count:], weight, bias, "silu", norm), whole[-count:])
        part = before[-count:].clone()
        products.linear_into(x[-count:], weight, bias, part)
        assert torch.equal(part, whole_sum[-count:])


@pytest.mark.parametrize("depth", [256, 1024, 4096])
@pytest.mark.parametrize(
    ("outputs", "num_tokens"),
    [(8, 4), (2000, 4), (33000, 4), (8, 6), (2001, 6), (2000, 16)],
)
def test_hidden_tap_of_a_normed_product(depth: int, outputs: int, num_tokens: int) -> None:
    """Token 0 wants layers 1 and 70, token 1 nothing, token 2 layer 70, token 3 layer 0, around the ring."""
    layers, first_rows = [(1, 70), (), (70,), (0,)], [5, -1, 1, 2]
    layers, first_rows = layers + [()] * (num_tokens - 4), first_rows + [-1] * (num_tokens - 4)
    words = [
        [sum(1 << b for b in wanted if b < 64), sum(1 << (b - 64) for b in wanted if b >= 64)] for wanted in layers
    ]
    ring, check = guarded(6, depth, dtype=BF16)
    tap = HiddenTap(int32(*first_rows), torch.from_numpy(np.array(words, np.uint64).view(np.int64)).to(DEVICE), ring)
    gain = randn(depth, dtype=BF16)
    weight, _ = weights(outputs, depth, False)
    states = {}
    for layer in (0, 1, 2, 70):
        x = states[layer] = randn(num_tokens, depth, dtype=BF16, seed=layer + 10)
        tapped = products.normed_linear(x, RowNorm(gain, 1e-5, LayerTap(tap, layer)), weight, None)
        assert torch.equal(tapped, products.normed_linear(x, RowNorm(gain, 1e-5), weight, None))
    for row, (layer, token) in {5: (1, 0), 0: (70, 0), 1: (70, 2), 2: (0, 3)}.items():
        assert torch.equal(ring[row], states[layer][token]), row
    assert ring[3:5].isnan().all()
    check()


def test_results_stay_in_their_rows() -> None:
    """Rows around x are poisoned, those around the result are canaries."""
    num_tokens, outputs, depth = 5, 1021, 768
    x, _ = guarded(num_tokens, depth, dtype=BF16)
    rows = randn(num_tokens, depth, dtype=BF16)
    x.copy_(rows)
    weight, _ = weights(outputs, depth, False)
    total, check = guarded(num_tokens, outputs, dtype=BF16)
    total.zero_()
    products.linear_into(x, weight, None, total)
    assert torch.equal(total, products.linear(rows, weight))
    check()
    assert CANARY not in total.float().unique().tolist()


def test_what_is_not_fused_is_refused() -> None:
    small, large = randn(64, 4096, dtype=BF16), randn(8200, 9216, dtype=BF16)
    x = randn(65, 4096, dtype=BF16)
    assert products.is_fused(x[:64], small) and not products.is_fused(x, small)
    assert products.is_fused(x[:16], small, normed=True) and not products.is_fused(x[:17], small, normed=True)
    assert not products.is_fused(x[:0], small) and not products.is_fused(x[:1].float(), small)
    assert not products.is_fused(randn(1, 100, dtype=BF16), randn(8, 100, dtype=BF16))
    long = randn(65, 9216, dtype=BF16)
    assert products.is_fused(long[:4], large) and products.is_fused(long[:64], large)
    assert not products.is_fused(long, large)
    assert products.is_fused(long[:3], large, normed=True) and not products.is_fused(long[:4], large, normed=True)
    with pytest.raises(_C.Error, match="normed"):
        products.normed_linear(long[:4], RowNorm(randn(9216, dtype=BF16), 1e-5), large, None)
    with pytest.raises(_C.Error, match="fuse"):  # no tile: the outputs are no multiple of four
        products.linear_into(x[:17], small[:62], None, randn(17, 62, dtype=BF16))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("fused", [False, True])
def test_a_chain_of_overlapping_kernels_keeps_its_order(rows: int, fused: bool) -> None:
    """Each kernel starts while the one before it ends: what it reads must be finished all the same."""
    hidden, inner = 1024, 3072
    up = randn(2 * inner, hidden, dtype=BF16, seed=1, scale=hidden**-0.5)
    down = randn(hidden, inner, dtype=BF16, seed=2, scale=inner**-0.5)
    gain = torch.ones(hidden, dtype=BF16, device=DEVICE)

    def chain(start: Tensor, apart: bool) -> Tensor:
        residual, added = start.clone(), None
        for _ in range(20):
            if fused:
                gated = products.gated_linear(residual, up, None, "silu", RowNorm(gain, 1e-6))
            else:
                normed = ops.rms_norm(
                    residual if added is None else added, gain, 1e-6, None if added is None else residual
                )
                gated = ops.silu_mul(products.linear(normed, up))
            if apart:
                torch.cuda.synchronize()
            if fused:
                products.linear_into(gated, down, None, residual)
            else:
                added = products.linear(gated, down)
            if apart:
                torch.cuda.synchronize()
        return residual if added is None else residual + added

    start = randn(rows, hidden, dtype=BF16, seed=3)
    torch.cuda.synchronize()
    first = chain(start, apart=True)
    for _ in range(50):
        assert torch.equal(chain(start, apart=False), first)
