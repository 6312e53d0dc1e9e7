"""Products over the codes of quantised files: bit for bit those over the float32 values that the file means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.cpu_weights import StoredType
from tests.kernels.code_blocks import TYPES, blocks_of, values_of, whole

pytestmark = pytest.mark.usefixtures("two_threads")

TOKENS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 257, 300]
CANARY = 12345.0


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantised(
    kind: StoredType, out_features: int, in_features: int, seed: int = 0
) -> tuple[kernels.QuantisedRows, Tensor]:
    """Rows of random codes, and their values [N, K]."""
    assert in_features == whole(kind, in_features)
    blocks = blocks_of(kind, out_features, in_features, seed)
    values = torch.from_numpy(values_of(kind, blocks, out_features))
    return kernels.QuantisedRows(kind, torch.from_numpy(blocks).view(out_features, -1)), values


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("k", [32, 64, 576, 640, 672, 1536])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 47, 48, 200])
def test_has_the_bits_of_the_float32_product(kind: StoredType, n: int, k: int) -> None:
    k = whole(kind, k)
    rows, values = quantised(kind, n, k)
    codes, plain = kernels.pack_quantised([rows]), kernels.pack_weight(values, torch.float32)
    bias = random(n, seed=2)
    for t in TOKENS:
        x = random(t, k, seed=3)
        for b in (None, bias):
            guarded = torch.full((t + 2, n), CANARY)
            result = kernels.linear(x, codes, b, out=guarded[1:-1])
            assert torch.equal(result, kernels.linear(x, plain, b))
            assert (guarded[0] == CANARY).all() and (guarded[-1] == CANARY).all()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("k", [32, 576, 672, 1536])
@pytest.mark.parametrize("intermediate", [16, 32, 48, 112])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_product_has_the_bits_of_product_and_activation(
    kind: StoredType, k: int, intermediate: int, activation: str
) -> None:
    k = whole(kind, k)
    packed = kernels.pack_quantised([quantised(kind, 2 * intermediate, k)[0]])
    bias = random(2 * intermediate, seed=2)
    for t in TOKENS if activation == "silu" else [7, 65]:
        x = random(t, k, seed=3)
        for b in (None, bias):
            gate_up = kernels.linear(x, packed, b)
            if activation == "silu":
                expected = kernels.silu_mul(gate_up)
            else:
                expected = kernels.gelu_mul(gate_up, tanh=activation == "gelu_tanh")
            assert torch.equal(kernels.gated_linear(x, packed, activation, b), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_the_same_bits_in_every_batch_on_any_threads(kind: StoredType) -> None:
    k = whole(kind, 672)
    packed = kernels.pack_quantised([quantised(kind, 200, k)[0]])
    x = random(270, k, seed=3)
    kernels.set_num_threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(270)])
    for threads in (1, 2, 3):
        kernels.set_num_threads(threads)
        for t in (*range(1, 20), 64, 270):
            assert torch.equal(kernels.linear(x[1 : 1 + t], packed), alone[1 : 1 + t])


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_the_table_are_the_values(kind: StoredType) -> None:
    rows, values = quantised(kind, 37, whole(kind, 96))
    embedded = kernels.embedding(torch.arange(36, -1, -1, dtype=torch.int32), kernels.pack_quantised([rows]))
    assert torch.equal(embedded, values.flip(0))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("sizes", [(64, 32, 32), (5, 11, 1, 40), (16, 3, 13)])
def test_stacked_weights_are_the_joined_weight(kind: StoredType, sizes: tuple[int, ...]) -> None:
    k = whole(kind, 64)
    parts = [quantised(kind, size, k, seed=i) for i, size in enumerate(sizes)]
    stacked = kernels.pack_quantised([rows for rows, _ in parts])
    joined = kernels.pack_weight(torch.cat([values for _, values in parts]), torch.float32)
    x = random(3, k, seed=9)
    assert torch.equal(kernels.linear(x, stacked), kernels.linear(x, joined))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("Q4_0", 5), ("Q4_1", 5), ("Q8_0", 9), ("Q4_K", 4.625), ("Q5_K", 5.625), ("Q6_K", 6.625)],
)
def test_takes_the_memory_of_the_codes(kind: StoredType, bits: float) -> None:
    packed = kernels.pack_quantised([quantised(kind, 33, 512)[0]])
    assert (packed.out_features, packed.in_features, packed.dtype) == (33, 512, torch.float32)
    assert packed.nbytes * 8 == 48 * 512 * bits


def test_codes_and_shapes_are_checked() -> None:
    wide, narrow = quantised("Q4_1", 2, 64)[0], quantised("Q4_1", 2, 32)[0]
    with pytest.raises(AssertionError):
        kernels.pack_quantised([wide, narrow])
    with pytest.raises(AssertionError):
        kernels.pack_quantised([wide, quantised("Q8_0", 2, 64)[0]])
    with pytest.raises(AssertionError):
        kernels.linear(random(1, 32), kernels.pack_quantised([wide]))
    with pytest.raises(AssertionError):
        kernels.gated_linear(random(1, 64), kernels.pack_quantised([wide]), "silu")
    with pytest.raises(AssertionError):
        kernels.gated_linear(random(1, 64), kernels.pack_weight(random(32, 64), torch.float32), "silu")
