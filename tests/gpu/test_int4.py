"""Weights in codes of 4 bits on a GPU: products and chains of them against float32 over the values of the codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bequest.engine.kernels import cuda_chain, cuda_coded, cuda_int4, cuda_tiles
from bequest.engine.kernels.cuda_chain import Head, Product, Tail
from bequest.engine.kernels.cuda_coded import GROUP, CodedRows
from bequest.engine.kernels.cuda_linear import RowNorm
from tests.gpu.test_engine import BF16_GAP
from tests.gpu.test_ops import DEVICE, guarded, randn
from tests.gpu.test_quantised import assert_near_tokens
from tests.gpu.test_skinny_chain import Layers, Sizes, assert_near, check_graph, inputs, make_scratch, reference
from tests.models import tiny_quantised as tiny
from tests.tiny_models import SHAPE, TINY_MODELS

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# (A, H, I, Q): fewer tiles than CTAs, several rounds, k of part of a stage of 4096 and of many, odd outputs.
SIZES = [(1024, 1024, 1024, 8), (1024, 2048, 5120, 1021), (2048, 5120, 9216, 300), (4096, 4096, 14336, 6144)]


def draw(outputs: int, depth: int, seed: int) -> tuple[CodedRows, Tensor]:
    """Random codes, and what they stand for in float32."""
    random = torch.Generator(DEVICE).manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, depth), dtype=torch.uint8, generator=random, device=DEVICE)
    zeros = torch.randint(0, 17, (outputs, depth // GROUP), dtype=torch.int16, generator=random, device=DEVICE)
    zeros = torch.where(zeros > 12, 8, zeros)
    scales = torch.rand(outputs, depth // GROUP, generator=random, device=DEVICE) * 0.3 * depth**-0.5
    scales = scales.half().float()
    spread = [part.repeat_interleave(GROUP, 1) for part in (scales, zeros.float())]
    return cuda_int4.pack(codes, scales, zeros), (codes.float() - spread[1]) * spread[0]


def product(outputs: int, depth: int, with_bias: bool, seed: int) -> tuple[Product, Product]:
    """In codes and in numbers."""
    rows, values = draw(outputs, depth, seed)
    bias = randn(outputs, dtype=BF16, seed=seed + 1) if with_bias else None
    return cuda_int4.product(rows, bias), Product(values, bias)


def make_layers(sizes: Sizes, *, with_bias: bool) -> tuple[Layers, Layers]:
    """In codes and in numbers."""
    attended, hidden, inner, outputs = sizes
    norms = RowNorm(randn(hidden, dtype=BF16, seed=7), 1e-5), RowNorm(randn(hidden, dtype=BF16, seed=12), 1e-6)
    made = [
        product(hidden, attended, with_bias, 5),
        product(2 * inner, hidden, with_bias, 8),
        product(hidden, inner, with_bias, 10),
        product(outputs, hidden, with_bias, 13),
    ]
    in_codes, in_numbers = (
        Layers(Tail(output, norms[0], gate_up, "silu", down), Head(norms[1], qkv, gate_up))
        for output, gate_up, down, qkv in zip(*made, strict=True)
    )
    return in_codes, in_numbers


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chain(sizes: Sizes, num_tokens: int, with_bias: bool) -> None:
    in_codes, in_numbers = make_layers(sizes, with_bias=with_bias)
    attended, start = inputs(sizes, num_tokens)
    residual, check = guarded(num_tokens, sizes[1], dtype=BF16)
    residual.copy_(start)
    qkv = in_codes.run(attended, residual, make_scratch())
    expected, expected_qkv = reference(in_numbers, attended, start)
    assert_near(residual, expected)
    assert expected_qkv is not None
    assert_near(qkv, expected_qkv)
    check()


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_do_not_depend_on_the_batch(sizes: Sizes) -> None:
    """One row alone is multiplied in another way (skinny_chain_bytes.cuh)."""
    layers, scratch = make_layers(sizes, with_bias=False)[0], make_scratch()
    attended, start = inputs(sizes, 4)
    whole = start.clone()
    whole_qkv = layers.run(attended, whole, scratch)
    for count in (2, 3):
        residual = start[-count:].clone()
        assert torch.equal(layers.run(attended[-count:], residual, scratch), whole_qkv[-count:])
        assert torch.equal(residual, whole[-count:])


# Of these sizes a CTA has more stages than a ring, several rounds of gate and up, and two stages along k.
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_chains_in_a_graph(num_tokens: int) -> None:
    """Each asks the L2 for weights of its own and of the next one, while the one before it ends."""
    sizes = (2048, 5120, 9216, 2048)
    layers = [make_layers(sizes, with_bias=with_bias)[0] for with_bias in (False, True)]
    check_graph(layers, *inputs(sizes, num_tokens), count=8)


# (N, K): few tiles, part of a stage, several stages, rows that the chain does not take.
PRODUCTS = [(8, 1024), (1024, 3072), (6144, 4096), (4096, 14336), (256, 768)]


@pytest.fixture
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on chips that have none (tests/gpu/test_tile_linear.py)."""
    monkeypatch.setattr(cuda_tiles, "is_tile_product", lambda *_, **__: False)


@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize(("outputs", "depth"), PRODUCTS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 9, 16, 31, 64, 130])
def test_products(outputs: int, depth: int, num_tokens: int) -> None:
    rows, values = draw(outputs, depth, 3)
    bias, scratch = randn(outputs, dtype=BF16, seed=4), make_scratch()
    x = randn(num_tokens, depth, dtype=BF16, seed=num_tokens)
    expected = x.float() @ values.T + bias.float()
    if num_tokens > cuda_int4.most_rows(depth):
        assert_near(cuda_coded.linear(x, rows, bias), expected.to(BF16))
        return
    product = cuda_int4.product(rows, bias)
    assert_near(cuda_chain.linear(x, product, scratch), expected.to(BF16))
    gate, up = expected.to(BF16).float().chunk(2, dim=-1)
    assert_near(cuda_chain.gated_linear(x, product, "silu", scratch), (F.silu(gate) * up).to(BF16))
    start = randn(num_tokens, outputs, dtype=BF16, seed=6)
    residual, check = guarded(num_tokens, outputs, dtype=BF16)
    residual.copy_(start)
    cuda_chain.linear_into(x, product, residual, scratch)
    assert_near(residual, (start.float() + expected).to(BF16))
    check()


@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize(("outputs", "depth"), [*PRODUCTS, (298, 2048)])
def test_tiles_do_not_depend_on_the_batch(outputs: int, depth: int) -> None:
    rows, values = draw(outputs, depth, 3)
    x = randn(64, depth, dtype=BF16, seed=9)
    whole = cuda_coded.linear(x, rows, None)
    assert_near(whole, (x.float() @ values.T).to(BF16))
    for first, end in ((0, 5), (3, 12), (40, 64), (20, 37)):
        assert torch.equal(cuda_coded.linear(x[first:end], rows, None), whole[first:end])


@pytest.mark.parametrize("tiles", [False, True])
def test_every_code_with_every_zero(tiles: bool, request: pytest.FixtureRequest) -> None:
    if not tiles:
        request.getfixturevalue("without_tiles")
    codes = torch.arange(16, dtype=torch.uint8, device=DEVICE).repeat(64, 64)  # [64, 1024]
    zeros = torch.arange(64, dtype=torch.int16, device=DEVICE)[:, None].expand(64, 8)
    scales = torch.full((64, 8), 0.5, device=DEVICE)
    rows = cuda_int4.pack(codes, scales, zeros.contiguous())
    expected = (codes.float() - zeros.float().repeat_interleave(GROUP, 1)) * 0.5
    assert torch.equal(rows.numbers().float(), expected)
    one = torch.zeros(1, 1024, dtype=BF16, device=DEVICE)
    for at in range(20):
        one.zero_()[0, at * 51] = 1
        of_chain = cuda_chain.linear(one, cuda_int4.product(rows), make_scratch())
        of_five = cuda_coded.linear(one.expand(5, -1).contiguous(), rows, None)
        assert torch.equal(of_chain[0].float(), expected[:, at * 51])
        assert torch.equal(of_five.float(), expected[:, at * 51].expand(5, -1))


def test_one_row_of_any_size() -> None:
    """Groups of x have units of their own: a power of two changes exponents alone."""
    rows, values = draw(264, 5120, 3)
    product, scratch = cuda_int4.product(rows), make_scratch()
    x = randn(1, 5120, dtype=BF16, seed=5)
    x[:, ::GROUP] *= 1000
    plain = cuda_chain.linear(x, product, scratch)
    assert_near(plain, (x.float() @ values.T).to(BF16))
    for factor in (2.0**-40, 2.0**40):
        assert torch.equal(cuda_chain.linear(x * factor, product, scratch), plain * factor)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(value: float) -> None:
    rows, _ = draw(264, 5120, 3)
    x = randn(1, 5120, dtype=BF16, seed=5)
    x[0, 4567] = value
    assert cuda_chain.linear(x, cuda_int4.product(rows), make_scratch()).isnan().all()


def test_what_cannot_be_packed() -> None:
    assert cuda_int4.most_rows(1024) == cuda_int4.most_rows(14336) == 4 and cuda_int4.most_rows(1536) == 0
    assert cuda_chain.has_kernel(4096, 4096, 14336, bits=4)
    assert cuda_int4.can_pack(torch.tensor([0, 15])) and not cuda_int4.can_pack(torch.tensor([-1, 64]))


@pytest.mark.parametrize("tool", [tiny.awq(128), tiny.gptq(4, 128, symmetric=False), tiny.packed_rows(4, 128)])
def test_checkpoints(tool: tiny.Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPE | {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2}
    monkeypatch.setitem(TINY_MODELS, "llama-broad", (LlamaForCausalLM, LlamaConfig(**shape)))
    reference_model = tiny.write("llama-broad", tmp_path, tool)
    assert_near_tokens(tmp_path, reference_model, BF16_GAP)
