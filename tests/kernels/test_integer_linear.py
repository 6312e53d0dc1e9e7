"""Products over codes by integer dot products: bit for bit those of a slow reference, in every batch."""

from __future__ import annotations

import gguf.quants
import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.cpu_weights import StoredType
from tests.forked import run_program, run_tests
from tests.kernels import integer_reference as reference
from tests.kernels.code_blocks import TYPES, blocks_of, decoded

pytestmark = pytest.mark.usefixtures("two_threads")

TOKENS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 64, 257]
CANARY = 12345.0


def random(*shape: int, seed: int = 0) -> Tensor:
    """Of many sizes: rows and blocks of a row have steps of their own."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=draw)
    return values * torch.exp(2 * torch.randn(*shape[:-1], 1, generator=draw))


def packed(kind: StoredType, n: int, k: int, seed: int = 0) -> tuple[kernels.PackedWeight, reference.Decoded]:
    blocks = blocks_of(kind, n, k, seed)
    rows = kernels.QuantisedRows(kind, torch.from_numpy(blocks).view(n, -1))
    return kernels.pack_quantised([rows], fast=True), decoded(kind, blocks, n)


def depths(kind: StoredType) -> list[int]:
    return [256, 768, 2560] if kind.endswith("_K") else [32, 96, 576, 2112]


@pytest.mark.parametrize("kind", TYPES)
def test_the_reference_knows_the_values_of_the_file(kind: StoredType) -> None:
    blocks = blocks_of(kind, 3, 512, seed=4)
    expected = getattr(gguf.quants, kind).dequantize_blocks(blocks).reshape(3, 512)
    assert np.array_equal(decoded(kind, blocks, 3).values(), expected)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n", [1, 16, 17, 47, 80])
def test_has_the_bits_of_the_reference(kind: StoredType, n: int) -> None:
    for k in depths(kind):
        weight, codes = packed(kind, n, k)
        x, bias = random(max(TOKENS), k, seed=3), random(n, seed=2)
        expected = reference.product(x.numpy(), codes, bias.numpy())  # row by row, whatever the batch
        for t in TOKENS:
            guarded = torch.full((t + 2, n), CANARY)
            result = kernels.linear(x[:t], weight, bias, out=guarded[1:-1])
            assert np.array_equal(result.numpy(), expected[:t]), (k, t)
            assert (guarded[0] == CANARY).all() and (guarded[-1] == CANARY).all()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_product_has_the_bits_of_product_and_activation(kind: StoredType, activation: str) -> None:
    for intermediate in (16, 48, 80):
        weight, _ = packed(kind, 2 * intermediate, 256)
        bias = random(2 * intermediate, seed=2)
        for t in TOKENS if activation == "silu" else [5, 65]:
            x = random(t, 256, seed=3)
            for b in (None, bias):
                both = kernels.linear(x, weight, b)
                if activation == "silu":
                    expected = kernels.silu_mul(both)
                else:
                    expected = kernels.gelu_mul(both, tanh=activation == "gelu_tanh")
                assert torch.equal(kernels.gated_linear(x, weight, activation, b), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_the_same_bits_in_every_batch_on_any_threads(kind: StoredType) -> None:
    weight, _ = packed(kind, 200, 768)
    x = random(270, 768, seed=3)
    kernels.set_num_threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], weight) for i in range(270)])
    for threads in (1, 2, 3):
        kernels.set_num_threads(threads)
        for t in (*range(1, 20), 64, 269):
            assert torch.equal(kernels.linear(x[1 : 1 + t], weight), alone[1 : 1 + t])


@pytest.mark.parametrize("kind", TYPES)
def test_is_near_the_exact_product(kind: StoredType) -> None:
    """Rounding to 16 bits: an error of 2^-16 of a block's largest value, at most."""
    weight, codes = packed(kind, 33, 512)
    x, values = random(9, 512, seed=3), torch.from_numpy(codes.values()).double()
    blocks = x.double().abs().unflatten(1, (-1, 32)).amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    bound = (blocks / 2**15) @ values.abs().T
    scale = x.double().abs() @ values.abs().T
    assert ((kernels.linear(x, weight).double() - x.double() @ values.T).abs() <= bound + 1e-5 * scale).all()


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_the_table_are_the_values(kind: StoredType) -> None:
    weight, codes = packed(kind, 37, 256)
    found = kernels.embedding(torch.arange(36, -1, -1, dtype=torch.int32), weight)
    assert np.array_equal(found.numpy()[::-1], codes.values())


def test_blocks_of_zeros_and_of_tiny_values() -> None:
    weight, codes = packed("Q4_1", 16, 96)
    x = random(3, 96, seed=5)
    x[0, :32], x[1, 32:64], x[2] = 0.0, 1e-33, 0.0
    assert np.array_equal(kernels.linear(x, weight).numpy(), reference.product(x.numpy(), codes))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tokens", [1, 9])
def test_what_is_not_finite_spoils_its_row_alone(bad: float, tokens: int) -> None:
    weight, _ = packed("Q8_0", 16, 64)
    x = random(tokens, 64, seed=5)
    others = kernels.linear(x, weight)[1:]
    x[0, 40] = bad
    result = kernels.linear(x, weight)
    assert result[0].isnan().all() and torch.equal(result[1:], others)


def kinds_of_this_chip() -> list[str]:
    """Of dot products that it has, but for the one that this process takes."""
    sets = {"avx2": ["avx2"], "avxvnni": ["avx2"], "avx512": ["avx2"], "avx512vnni": ["avx2", "avx512"]}
    return sets.get(_C.dot(), ["neon"] if _C.dot() == "dotprod" else [])


@pytest.mark.parametrize("dot", kinds_of_this_chip())
def test_every_kind_of_dot_products_has_these_bits(dot: str) -> None:
    selected = "bits_of_the_reference or every_batch or gated or not_finite"
    command = [__file__, "-x", "-k", selected]
    done = run_tests(command, BEQUEST_DOT=dot)
    assert done.returncode == 0, done.stdout[-3000:]


def test_an_unknown_kind_of_dot_products_is_refused() -> None:
    code = "from bequest.engine import _C; _C.dot()"
    done = run_program(code, BEQUEST_DOT="abacus")
    assert done.returncode != 0 and "BEQUEST_DOT=abacus, but this CPU's dot products are" in done.stderr
