"""Products over the codes of quantised files: bit for bit those over the float32 values that the file means."""

from __future__ import annotations

from typing import Literal

import gguf.quants
import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels

pytestmark = pytest.mark.usefixtures("two_threads")

Bits = Literal[4, 8]
KINDS = {4: gguf.quants.Q4_1, 8: gguf.quants.Q8_0}
TOKENS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 257, 300]
CANARY = 12345.0


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantised(bits: Bits, out_features: int, in_features: int, seed: int = 0) -> tuple[kernels.QuantisedRows, Tensor]:
    """Rows of random codes under random scales and offsets, of subnormal size too, and their values [N, K]."""
    kind = KINDS[bits]
    rng = np.random.default_rng(seed)
    groups = out_features * in_features // 32
    blocks = rng.integers(0, 256, (groups, kind.type_size), dtype=np.uint8)
    scales = (kind.type_size - 4 * bits) // 2  # 16-bit numbers before the codes
    sizes = rng.choice([1.0, 1e-3, 1e-7], (groups, scales), p=[0.8, 0.1, 0.1])
    blocks[:, : 2 * scales] = (rng.standard_normal((groups, scales)) * sizes).astype(np.float16).view(np.uint8)
    values = torch.from_numpy(kind.dequantize_blocks(blocks)).view(out_features, in_features)
    return kernels.QuantisedRows(bits, torch.from_numpy(blocks).view(out_features, -1)), values


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("k", [32, 64, 576, 640, 672, 1536])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 47, 48, 200])
def test_has_the_bits_of_the_float32_product(bits: Bits, n: int, k: int) -> None:
    rows, values = quantised(bits, n, k)
    codes, plain = kernels.pack_quantised([rows]), kernels.pack_weight(values, torch.float32)
    bias = random(n, seed=2)
    for t in TOKENS:
        x = random(t, k, seed=3)
        for b in (None, bias):
            guarded = torch.full((t + 2, n), CANARY)
            result = kernels.linear(x, codes, b, out=guarded[1:-1])
            assert torch.equal(result, kernels.linear(x, plain, b))
            assert (guarded[0] == CANARY).all() and (guarded[-1] == CANARY).all()


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("k", [32, 576, 672, 1536])
@pytest.mark.parametrize("intermediate", [16, 32, 48, 112])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_product_has_the_bits_of_product_and_activation(
    bits: Bits, k: int, intermediate: int, activation: str
) -> None:
    packed = kernels.pack_quantised([quantised(bits, 2 * intermediate, k)[0]])
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


@pytest.mark.parametrize("bits", KINDS)
def test_a_row_has_the_same_bits_in_every_batch_on_any_threads(bits: Bits) -> None:
    packed = kernels.pack_quantised([quantised(bits, 200, 672)[0]])
    x = random(270, 672, seed=3)
    kernels.set_num_threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(270)])
    for threads in (1, 2, 3):
        kernels.set_num_threads(threads)
        for t in (*range(1, 20), 64, 270):
            assert torch.equal(kernels.linear(x[1 : 1 + t], packed), alone[1 : 1 + t])


@pytest.mark.parametrize("bits", KINDS)
def test_rows_of_the_table_are_the_values(bits: Bits) -> None:
    rows, values = quantised(bits, 37, 96)
    embedded = kernels.embedding(torch.arange(36, -1, -1, dtype=torch.int32), kernels.pack_quantised([rows]))
    assert torch.equal(embedded, values.flip(0))


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("sizes", [(64, 32, 32), (5, 11, 1, 40), (16, 3, 13)])
def test_stacked_weights_are_the_joined_weight(bits: Bits, sizes: tuple[int, ...]) -> None:
    parts = [quantised(bits, size, 64, seed=i) for i, size in enumerate(sizes)]
    stacked = kernels.pack_quantised([rows for rows, _ in parts])
    joined = kernels.pack_weight(torch.cat([values for _, values in parts]), torch.float32)
    x = random(3, 64, seed=9)
    assert torch.equal(kernels.linear(x, stacked), kernels.linear(x, joined))


@pytest.mark.parametrize(("bits", "group_bytes"), [(4, 320), (8, 576)])
def test_takes_the_memory_of_the_codes(bits: Bits, group_bytes: int) -> None:
    packed = kernels.pack_quantised([quantised(bits, 33, 64)[0]])
    assert (packed.out_features, packed.in_features, packed.dtype) == (33, 64, torch.float32)
    assert packed.nbytes == 3 * 2 * group_bytes


def test_codes_and_shapes_are_checked() -> None:
    wide, narrow = quantised(4, 2, 64)[0], quantised(4, 2, 32)[0]
    with pytest.raises(AssertionError):
        kernels.pack_quantised([wide, narrow])
    with pytest.raises(AssertionError):
        kernels.pack_quantised([wide, quantised(8, 2, 64)[0]])
    with pytest.raises(AssertionError):
        kernels.linear(random(1, 32), kernels.pack_quantised([wide]))
    with pytest.raises(AssertionError):
        kernels.gated_linear(random(1, 64), kernels.pack_quantised([wide]), "silu")
    with pytest.raises(AssertionError):
        kernels.gated_linear(random(1, 64), kernels.pack_weight(random(32, 64), torch.float32), "silu")
