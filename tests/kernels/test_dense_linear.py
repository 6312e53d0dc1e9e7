"""The matrix kernel against float64 at the edges, and its promise: a row's bits depend on the row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine import kernels

TOKENS = [0, 1, 2, 5, 6, 7, 12, 13, 16, 17, 31, 33, 64]
OUTPUTS = [1, 15, 16, 17, 960]
INPUTS = [1, 3, 64, 576]
CANARY = 12345.0


@pytest.fixture(autouse=True)
def two_threads() -> None:
    kernels.set_num_threads(2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def assert_close(actual: Tensor, expected: Tensor, depth: int) -> None:
    # Partial sums grow with the root of k, and each step rounds one: the error grows with the depth. Five sigma.
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1.2e-7 * depth + 1e-6)


@pytest.mark.parametrize("k", INPUTS)
@pytest.mark.parametrize("n", OUTPUTS)
def test_matches_float64_and_writes_nothing_else(n: int, k: int) -> None:
    weight = random(n, k, seed=1)
    bias = random(n, seed=2)
    packed = kernels.pack_weight(weight, torch.float32)
    for t in TOKENS:
        x = random(t, k, seed=3)
        for b in (None, bias):
            guarded = torch.full((t + 2, n), CANARY)
            result = kernels.linear(x, packed, b, out=guarded[1:-1])
            assert_close(result, reference(x, weight, b), k)
            assert (guarded[0] == CANARY).all() and (guarded[-1] == CANARY).all()


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_storage_rounds_the_weight_and_nothing_else(source: torch.dtype, stored: torch.dtype) -> None:
    weight = random(33, 67).to(source)
    packed = kernels.pack_weight(weight, stored)
    x = random(5, 67, seed=1)
    assert_close(kernels.linear(x, packed), reference(x, weight.to(stored)), 67)
    rows = kernels.embedding(torch.arange(33, dtype=torch.int32), packed)
    assert torch.equal(rows, weight.to(stored).float())
