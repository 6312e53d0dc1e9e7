"""Products by the chip's matrix units: weights in tiles of bfloat16, x rounded to bfloat16, sums in float32.

Packing and gathering are the same on every chip; the products are tested where the units are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.cpu_weights import PackedWeight
from tests.forked import run_program

pytestmark = pytest.mark.usefixtures("two_threads")

BF16 = torch.bfloat16
CANARY = 12345.0
TOKENS = [0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 257]
OUTPUTS = [1, 15, 16, 17, 31, 32, 33, 64, 200]
INPUTS = [1, 15, 16, 17, 31, 32, 33, 64, 511, 513, 1025]
ROOT = Path(__file__).parent.parent.parent
needs_units = pytest.mark.skipif(not kernels.multiplies_tiles(), reason="this chip has no matrix units")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pack(weight: Tensor) -> PackedWeight:
    return kernels.pack_weight(weight, BF16, tiles=True)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.to(BF16).double() @ weight.to(BF16).double().T
    return out if bias is None else out + bias.double()


def assert_close(actual: Tensor, expected: Tensor, depth: int) -> None:
    # Inputs are exact, so only float32 sums round: their error grows with the depth. Five sigma.
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1.2e-7 * depth + 1e-6)


# --- packing, on every chip -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("n", [1, 16, 17, 32, 33, 80])
@pytest.mark.parametrize("source", [torch.float32, BF16, torch.float16])
def test_tiles_hold_the_rounded_weight_and_zeros(n: int, k: int, source: torch.dtype) -> None:
    weight = random(n, k).to(source)
    packed = pack(weight)
    strips, k_tiles = -(-n // 32), -(-k // 32)
    assert packed.nbytes == strips * k_tiles * 2048
    padded = torch.zeros(strips * 32, k_tiles * 32, dtype=BF16)
    padded[:n, :k] = weight.to(BF16)
    # [strip, panel, column, k tile, row, pair] → [strip, k tile, panel, row, column, pair]
    expected = padded.view(strips, 2, 16, k_tiles, 16, 2).permute(0, 3, 1, 4, 2, 5)
    assert torch.equal(packed._storage, expected)
    rows = kernels.embedding(torch.arange(n, dtype=torch.int32), packed)
    assert torch.equal(rows, weight.to(BF16).float())


@pytest.mark.parametrize("sizes", [(64, 32, 32), (5, 11, 1, 40), (16, 3, 13)])
def test_stacked_weights_are_the_joined_weight(sizes: tuple[int, ...]) -> None:
    weights = [random(size, 70, seed=i) for i, size in enumerate(sizes)]
    stacked = kernels.pack_weights(weights, BF16, tiles=True)
    assert torch.equal(stacked._storage, pack(torch.cat(weights))._storage)


def test_packing_rounds_to_even_and_keeps_what_is_not_finite() -> None:
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40])
    row = kernels.embedding(torch.zeros(1, dtype=torch.int32), pack(halfway.view(1, -1)))
    torch.testing.assert_close(row[0], halfway.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_bfloat16_is_in_tiles_where_the_units_are_and_nothing_else_is() -> None:
    assert kernels.pack_weight(random(3, 4), BF16).tiles == kernels.multiplies_tiles()
    assert not kernels.pack_weight(random(3, 4), torch.float32).tiles


@pytest.mark.skipif(not sys.platform.startswith("linux") or kernels.isa() == "neon", reason="x86-64 has lesser sets")
def test_without_units_bfloat16_is_in_panels_and_tiles_are_refused() -> None:
    program = (
        "import torch; from bequest.engine.kernels import cpu as kernels\n"
        "assert not kernels.multiplies_tiles()\n"
        "x, weight = torch.randn(3, 40), torch.randn(5, 40)\n"
        "packed = kernels.pack_weight(weight, torch.bfloat16)\n"
        "assert not packed.tiles\n"
        "torch.testing.assert_close(kernels.linear(x, packed), x @ weight.bfloat16().float().T)\n"
        "kernels.linear(x, kernels.pack_weight(weight, torch.bfloat16, tiles=True))\n"
    )
    done = run_program(program, BEQUEST_ISA="avx2")
    assert done.returncode == 1 and "this chip has no matrix units" in done.stderr, done.stderr


# --- products ---------------------------------------------------------------------------------------------------------


@needs_units
@pytest.mark.parametrize("k", INPUTS)
@pytest.mark.parametrize("n", OUTPUTS)
def test_matches_float64_and_writes_nothing_else(n: int, k: int) -> None:
    weight, bias = random(n, k, seed=1), random(n, seed=2)
    packed = pack(weight)
    for t in TOKENS:
        x = random(t, k, seed=3)
        for b in (None, bias):
            guarded = torch.full((t + 2, n), CANARY)
            result = kernels.linear(x, packed, b, out=guarded[1:-1])
            assert_close(result, reference(x, weight, b), k)
            assert (guarded[0] == CANARY).all() and (guarded[-1] == CANARY).all()


@needs_units
@pytest.mark.parametrize(("n", "k"), [(200, 576), (17, 1537), (1, 3)])
def test_a_row_has_the_same_bits_in_every_batch_on_any_threads(n: int, k: int) -> None:
    rows = 530  # more than two blocks of rows
    packed, bias, x = pack(random(n, k, seed=1)), random(n, seed=2), random(rows, k, seed=3)
    kernels.set_num_threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed, bias) for i in range(rows)])
    for threads in (1, 2, 3):
        kernels.set_num_threads(threads)
        for t in [*range(1, 20), 31, 32, 33, 64, 257, rows]:
            for first in {0, 1, rows - t} - {rows - t + 1}:
                assert torch.equal(kernels.linear(x[first : first + t], packed, bias), alone[first : first + t])


@needs_units
def test_a_column_has_the_same_bits_wherever_it_stands() -> None:
    weight, x = random(70, 100, seed=1), random(21, 100, seed=2)
    together = kernels.linear(x, pack(weight))
    for n in (0, 1, 15, 16, 33, 69):
        assert torch.equal(kernels.linear(x, pack(weight[n : n + 1])), together[:, n : n + 1])


@needs_units
def test_x_is_rounded_to_nearest_even() -> None:
    x = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 3.0e38]])
    assert torch.equal(kernels.linear(x, pack(torch.eye(5))), x.bfloat16().float())


@needs_units
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "clamped_swish"])
@pytest.mark.parametrize("t", [1, 16, 33, 257])
def test_activations_of_sums_and_gates(activation: str, t: int) -> None:
    x, bias = random(t, 600, seed=1), random(128, seed=2)
    packed = pack(random(128, 600, seed=3) / 10)
    assert packed.can_gate and packed.can_activate
    for b in (None, bias):
        plain = kernels.linear(x, packed, b)
        gated = kernels.gated_linear(x, packed, activation, b)
        assert_activated(gated, kernels.gated_activation(plain, activation))
        activated = kernels.activated_linear(x, packed, activation, b)
        assert_activated(activated, kernels.activate(plain, activation))


def assert_activated(actual: Tensor, expected: Tensor) -> None:
    """bfloat16, which the next product rounds to, has 2^-9."""
    torch.testing.assert_close(actual, expected, rtol=2**-13, atol=1e-9)


@needs_units
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_of_any_value(activation: str) -> None:
    finite = torch.cat([torch.linspace(-12, 12, 3001), torch.tensor([0.0, 1e-30, -1e-30, 100.0, -100.0, 1e20, -1e20])])
    x = torch.cat([finite.bfloat16().float(), torch.tensor([torch.inf, torch.nan])])
    actual = kernels.activated_linear(x.view(-1, 1), pack(torch.ones(1, 1)), activation)[:, 0]
    assert_activated(actual[:-2], kernels.activate(x[:-2].clone(), activation))
    assert actual[-2] == torch.inf and actual[-1].isnan()


@needs_units
def test_an_odd_number_of_columns_is_activated_but_not_gated() -> None:
    x, packed = random(5, 40, seed=1), pack(random(34, 40, seed=2))
    assert not packed.can_gate
    expected = kernels.activate(kernels.linear(x, packed), "gelu")
    assert_activated(kernels.activated_linear(x, packed, "gelu"), expected)


@needs_units
@pytest.mark.parametrize("gated", [False, True])
def test_a_deep_product_is_cut_without_a_trace(gated: bool) -> None:
    """Rows of 300 tokens do not fit L2 at once, one does."""
    x, weight, bias = random(300, 5000, seed=1), random(640, 5000, seed=2) / 70, random(640, seed=3)
    packed = pack(weight)

    def multiply(rows: Tensor) -> Tensor:
        return (
            kernels.gated_linear(rows, packed, "silu", bias)
            if gated
            else kernels.activated_linear(rows, packed, "relu", bias)
        )

    together = multiply(x)
    plain = kernels.linear(x, packed, bias)
    assert_close(plain, reference(x, weight, bias), 5000)
    expected = kernels.gated_activation(plain, "silu") if gated else kernels.activate(plain.clone(), "relu")
    assert_activated(together, expected)
    for row in (0, 17, 255, 299):
        assert torch.equal(multiply(x[row : row + 1])[0], together[row])


@needs_units
@pytest.mark.parametrize(("inner", "gated"), [(40, False), (64, False), (96, True), (2048, True)])
def test_a_feed_forward_layer_is_its_two_products(inner: int, gated: bool) -> None:
    """On any threads: many rows go through both products a block at a time."""
    hidden, out = 70, 45
    up = pack(random(inner * (1 + gated), hidden, seed=1) / 8)
    down = pack(random(out, inner, seed=2))
    up_bias, down_bias = random(inner * (1 + gated), seed=3), random(out, seed=4)
    first = kernels.gated_linear if gated else kernels.activated_linear
    for t in (0, 1, 15, 16, 17, 33, 255, 1100):
        x = random(t, hidden, seed=5)
        for biases in ((None, None), (up_bias, down_bias)):
            expected = kernels.linear(first(x, up, "gelu", biases[0]), down, biases[1])
            for threads in (1, 2, 3):
                kernels.set_num_threads(threads)
                actual = kernels.feed_forward(x, up, biases[0], down, biases[1], "gelu", gated)
                assert torch.equal(actual, expected)


@needs_units
def test_a_nan_stays_in_its_row_or_its_column() -> None:
    weight, x = random(20, 30, seed=1), random(19, 30, seed=2)
    x[4, 29] = torch.nan
    out = kernels.linear(x, pack(weight))
    assert out[4].isnan().all() and out.isnan().sum() == 20
    weight[18, 0] = torch.nan
    out = kernels.linear(x[:4], pack(weight))
    assert out.isnan().sum() == 4 and out[:, 18].isnan().all()


@needs_units
def test_other_users_of_the_units_do_not_disturb() -> None:
    """torch's bfloat16 products configure the tiles of the same thread in their own way."""
    x, weight = random(40, 300, seed=1), random(50, 300, seed=2)
    packed, theirs = pack(weight), random(7, 300, seed=3).to(BF16)
    expected = kernels.linear(x, packed)
    for _ in range(3):
        product = theirs @ weight.to(BF16).T
        assert torch.equal(kernels.linear(x, packed), expected)
        torch.testing.assert_close(product, theirs @ weight.to(BF16).T)


@needs_units
def test_addresses_need_no_alignment() -> None:
    x, bias, packed = random(18, 45, seed=1), random(37, seed=2), pack(random(37, 45, seed=3))

    def unaligned(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)

    out = unaligned(torch.zeros(18, 37))
    assert torch.equal(kernels.linear(unaligned(x), packed, unaligned(bias), out=out), kernels.linear(x, packed, bias))
