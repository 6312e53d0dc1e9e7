"""The matrix kernel against float64 at the edges, and its promise: a row's bits depend on the row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels

pytestmark = pytest.mark.usefixtures("two_threads")

TOKENS = [0, 1, 2, 5, 6, 7, 12, 13, 16, 17, 31, 33, 64]
OUTPUTS = [1, 15, 16, 17, 960]
INPUTS = [1, 3, 64, 576]
STORED = [torch.float32, torch.bfloat16]
CANARY = 12345.0


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unaligned(tensor: Tensor) -> Tensor:
    """The same values at an address that is a multiple of 4 and of nothing larger."""
    shifted = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return shifted.copy_(tensor)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def assert_close(actual: Tensor, expected: Tensor, depth: int) -> None:
    # Partial sums grow with the root of k, and each step rounds one: the error grows with the depth. Five sigma.
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1.2e-7 * depth + 1e-6)


@pytest.mark.parametrize("k", INPUTS)
@pytest.mark.parametrize("n", OUTPUTS)
def test_matches_float64_and_writes_nothing_else(n: int, k: int) -> None:
    weight, bias = random(n, k, seed=1), random(n, seed=2)
    packed = kernels.pack_weight(weight, torch.float32)
    for t in TOKENS:
        x = random(t, k, seed=3)
        for b in (None, bias):
            guarded = torch.full((t + 2, n), CANARY)
            result = kernels.linear(x, packed, b, out=guarded[1:-1])
            assert_close(result, reference(x, weight, b), k)
            assert (guarded[0] == CANARY).all() and (guarded[-1] == CANARY).all()


@pytest.mark.parametrize("k", [639, 640, 641, 1280, 1281])
def test_depth_is_cut_into_passes_without_a_trace(k: int) -> None:
    weight, bias = random(33, k, seed=1), random(33, seed=2)
    x = random(13, k, seed=3)
    packed = kernels.pack_weight(weight, torch.float32)
    together = kernels.linear(x, packed, bias)
    assert_close(together, reference(x, weight, bias), k)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed, bias) for i in range(13)])  # one row takes one pass
    assert torch.equal(alone, together)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("n", "k"), [(200, 576), (17, 1537), (1, 3)])
def test_a_row_has_the_same_bits_in_every_batch_on_any_threads(n: int, k: int, stored: torch.dtype) -> None:
    rows = 230  # more than one block of rows
    packed = kernels.pack_weight(random(n, k, seed=1), stored, tiles=False)
    bias = random(n, seed=2)
    x = random(rows, k, seed=3)
    kernels.set_num_threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed, bias) for i in range(rows)])
    for threads in (1, 2, 3):
        kernels.set_num_threads(threads)
        for t in [*range(1, 28), 64, rows]:
            for first in {0, 1, rows - t} - {rows - t + 1}:
                assert torch.equal(kernels.linear(x[first : first + t], packed, bias), alone[first : first + t])


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", STORED)
def test_storage_rounds_the_weight_and_nothing_else(source: torch.dtype, stored: torch.dtype) -> None:
    weight = random(33, 67).to(source)
    packed = kernels.pack_weight(weight, stored, tiles=False)
    assert (packed.out_features, packed.in_features, packed.dtype) == (33, 67, stored)
    assert packed.nbytes == 48 * 67 * stored.itemsize
    for t in range(1, 14):
        x = random(t, 67, seed=t)
        assert_close(kernels.linear(x, packed), reference(x, weight.to(stored)), 67)
    rows = kernels.embedding(torch.arange(33, dtype=torch.int32), packed)
    assert torch.equal(rows, weight.to(stored).float())


def test_bfloat16_storage_rounds_to_even_and_keeps_what_is_not_finite() -> None:
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40])
    packed = kernels.pack_weight(halfway.view(1, -1), torch.bfloat16)
    row = kernels.embedding(torch.zeros(1, dtype=torch.int32), packed)
    torch.testing.assert_close(row[0], halfway.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sizes", [(64, 32, 32), (5, 11, 1, 40), (16, 3, 13)])
@pytest.mark.parametrize("stored", STORED)
def test_stacked_weights_are_the_joined_weight(sizes: tuple[int, ...], stored: torch.dtype) -> None:
    weights = [random(size, 70, seed=i) for i, size in enumerate(sizes)]
    x = random(3, 70, seed=9)
    joined = kernels.pack_weight(torch.cat(weights), stored, tiles=False)
    assert torch.equal(kernels.linear(x, kernels.pack_weights(weights, stored, tiles=False)), kernels.linear(x, joined))


def test_addresses_need_no_alignment() -> None:
    weight, bias, x = random(37, 19, seed=1), random(37, seed=2), random(7, 19, seed=3)
    packed = kernels.pack_weight(weight, torch.float32)
    moved = kernels.pack_weight(unaligned(weight), torch.float32)
    expected = kernels.linear(x, packed, bias)
    out = unaligned(torch.zeros(7, 37))
    assert torch.equal(kernels.linear(unaligned(x), moved, unaligned(bias), out=out), expected)


@pytest.mark.parametrize("stored", STORED)
def test_a_nan_stays_in_its_row_or_its_column(stored: torch.dtype) -> None:
    weight, x = random(20, 30, seed=1), random(9, 30, seed=2)
    x[4, 29] = torch.nan
    out = kernels.linear(x, kernels.pack_weight(weight, stored, tiles=False))
    assert out[4].isnan().all() and not out[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()
    weight[18, 0] = torch.nan
    out = kernels.linear(x[:4], kernels.pack_weight(weight, stored, tiles=False))
    assert out.isnan().sum() == 4 and out[:, 18].isnan().all()


def test_embedding_of_no_ids_and_of_wrong_ids() -> None:
    packed = kernels.pack_weight(random(17, 5), torch.float32)
    assert kernels.embedding(torch.empty(0, dtype=torch.int32), packed).shape == (0, 5)
    for wrong in (-1, 17, 2**31 - 1):
        with pytest.raises(kernels.Error, match=f"id {wrong} is outside"):
            kernels.embedding(torch.tensor([0, wrong], dtype=torch.int32), packed)


def test_shapes_dtypes_and_layouts_are_checked() -> None:
    packed = kernels.pack_weight(random(4, 6), torch.float32)
    for wrong in (random(2, 5), random(2, 6).double(), random(6, 2).T):
        with pytest.raises(AssertionError):
            kernels.linear(wrong, packed)
    with pytest.raises(AssertionError):
        kernels.linear(random(2, 6), packed, bias=random(5))
    with pytest.raises(AssertionError):
        kernels.linear(random(2, 6), packed, out=random(3, 4))
    with pytest.raises(AssertionError):
        kernels.embedding(torch.zeros(1, dtype=torch.int64), packed)
