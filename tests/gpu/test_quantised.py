"""Weights in float8 on a GPU: products and chains of them against float32 over the values of the codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bequest.engine.backends.cuda.ops import CudaOps
from bequest.engine.backends.cuda.weights import DenseWeight
from bequest.engine.kernels import cuda, cuda_chain, cuda_linear
from bequest.engine.kernels.cuda_chain import Head, Product, Tail
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.layers.parts import Norm
from bequest.engine.layers.plain import apply
from bequest.engine.layers.source import NormedStream
from bequest.engine.layers.spec import FeedForward, Sublayer
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight
from tests.engine.direct import LLM
from tests.engine.test_against_transformers import PARAMS, Judge, prompts
from tests.gpu.test_engine import BF16_GAP, config
from tests.gpu.test_ops import guarded, randn, reference_norm
from tests.gpu.test_skinny_chain import Layers, Sizes, assert_near, inputs, make_scratch, reference
from tests.models import tiny_quantised as tiny
from tests.tiny_models import make_reference

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# (A, H, I, Q): as those of the chain in numbers, of multiples of 512; k of part of a stage of 2048 and of many.
SIZES = [(512, 512, 512, 8), (512, 1024, 1536, 1021), (1024, 9216, 8704, 300), (4096, 4096, 14336, 6144)]


def codes_of(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 [N, K] and a scale for each row."""
    scales = matrix.float().abs().amax(1) / 448
    return (matrix.float() / scales[:, None]).to(FP8), scales


def product(outputs: int, depth: int, with_bias: bool, seed: int) -> Product:
    weight, scales = codes_of(randn(outputs, depth, dtype=BF16, seed=seed, scale=depth**-0.5))
    return Product(weight, randn(outputs, dtype=BF16, seed=seed + 1) if with_bias else None, scales)


def in_numbers(product: Product) -> Product:
    assert product.scales is not None
    return Product(product.weight.float() * product.scales[:, None], product.bias)


def make_layers(sizes: Sizes, *, with_bias: bool) -> Layers:
    attended, hidden, inner, outputs = sizes
    tail = Tail(
        product(hidden, attended, with_bias, 5),
        RowNorm(randn(hidden, dtype=BF16, seed=7), 1e-5),
        product(2 * inner, hidden, with_bias, 8),
        "silu",
        product(hidden, inner, with_bias, 10),
    )
    return Layers(
        tail, Head(RowNorm(randn(hidden, dtype=BF16, seed=12), 1e-6), product(outputs, hidden, with_bias, 13))
    )


def layers_in_numbers(layers: Layers) -> Layers:
    tail, head = layers.tail, layers.head
    assert head is not None
    output, gate_up, down = (in_numbers(part) for part in (tail.output, tail.gate_up, tail.down))
    return Layers(Tail(output, tail.norm, gate_up, tail.activation, down), Head(head.norm, in_numbers(head.qkv)))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chain(sizes: Sizes, num_tokens: int, with_bias: bool) -> None:
    layers = make_layers(sizes, with_bias=with_bias)
    attended, start = inputs(sizes, num_tokens)
    residual, check = guarded(num_tokens, sizes[1], dtype=BF16)
    residual.copy_(start)
    qkv = layers.run(attended, residual, make_scratch())
    expected, expected_qkv = reference(layers_in_numbers(layers), attended, start)
    assert_near(residual, expected)
    assert expected_qkv is not None
    assert_near(qkv, expected_qkv)
    check()


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_do_not_depend_on_the_batch(sizes: Sizes) -> None:
    layers, scratch = make_layers(sizes, with_bias=False), make_scratch()
    attended, start = inputs(sizes, 4)
    whole = start.clone()
    whole_qkv = layers.run(attended, whole, scratch)
    for count in (1, 2, 3):
        residual = start[-count:].clone()
        assert torch.equal(layers.run(attended[-count:], residual, scratch), whole_qkv[-count:])
        assert torch.equal(residual, whole[-count:])


def test_every_code_counts() -> None:
    """The smallest codes are subnormal: they must not be taken for zeros."""
    sizes = (512, 512, 512, 256)
    layers = make_layers(sizes, with_bias=False)
    assert layers.head is not None
    every = torch.arange(256, dtype=torch.uint8, device="cuda").view(FP8).float().nan_to_num(0.0)
    codes = every[:, None].expand(256, 512).to(FP8).contiguous()
    head = Head(layers.head.norm, Product(codes, None, torch.full((256,), 2.0**-6, device="cuda")))
    attended, start = inputs(sizes, 1)
    qkv = Layers(layers.tail, head).run(attended, start.clone(), make_scratch())
    _, expected = reference(layers_in_numbers(Layers(layers.tail, head)), attended, start)
    assert expected is not None
    error = (qkv.float() - expected).abs()
    assert (error <= 2e-2 * expected.abs() + 1e-6).all()


def test_codes_beside_numbers_are_refused() -> None:
    sizes = SIZES[0]
    layers = make_layers(sizes, with_bias=False)
    plain = Product(in_numbers(layers.tail.down).weight.to(BF16))
    mixed = Tail(layers.tail.output, layers.tail.norm, layers.tail.gate_up, "silu", plain)
    attended, residual = inputs(sizes, 1)
    with pytest.raises(RuntimeError, match="some weights are in codes"):
        cuda_chain.run(attended, residual, mixed, None, make_scratch())
    assert not cuda_chain.has_kernel(512, 768, 512, bits=8)


# --- single products ------------------------------------------------------------------------------------------------

# (N, K): few tiles, part of a stage, several stages, rows of x that do not fit into shared memory.
PRODUCTS = [(16, 512), (1024, 1536), (6144, 4096), (4096, 14336)]


def made(outputs: int, depth: int, num_tokens: int) -> tuple[Tensor, Product, Tensor]:
    """x, a product in codes, and its matrix in numbers."""
    x = randn(num_tokens, depth, dtype=BF16, seed=num_tokens)
    codes = product(outputs, depth, True, 3)
    return x, codes, in_numbers(codes).weight


@pytest.mark.parametrize(("outputs", "depth"), PRODUCTS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_products_of_few_rows(outputs: int, depth: int, num_tokens: int) -> None:
    x, codes, matrix = made(outputs, depth, num_tokens)
    assert codes.bias is not None and cuda_linear.is_fused(x, codes.weight)
    expected = x.float() @ matrix.T + codes.bias.float()
    assert_near(cuda_linear.linear(x, codes.weight, codes.bias, codes.scales), expected)
    residual = randn(num_tokens, outputs, dtype=BF16, seed=9)
    added = residual.clone()
    cuda_linear.linear_into(x, codes.weight, codes.bias, added, codes.scales)
    assert_near(added, residual.float() + expected.to(BF16).float())
    gate, up = expected.chunk(2, dim=1)
    gated = cuda_linear.gated_linear(x, codes.weight, codes.bias, "silu", None, codes.scales)
    assert_near(gated, torch.nn.functional.silu(gate) * up)
    if cuda_linear.is_fused(x, codes.weight, normed=True):
        norm = RowNorm(randn(depth, dtype=BF16, seed=4), 1e-5)
        normed = reference_norm(x, norm.weight, norm.eps) @ matrix.T + codes.bias.float()
        assert_near(cuda_linear.normed_linear(x, norm, codes.weight, codes.bias, codes.scales), normed)


@pytest.mark.parametrize(("outputs", "depth"), PRODUCTS)
@pytest.mark.parametrize("num_tokens", [129, 200])
def test_products_of_many_rows(outputs: int, depth: int, num_tokens: int) -> None:
    x, codes, matrix = made(outputs, depth, num_tokens)
    assert codes.bias is not None and not cuda_linear.is_fused(x, codes.weight)
    rows = cuda_linear.float8_rows(x)
    rounded = rows.codes.float() * rows.scales[:, None]
    assert (rounded - x.float()).abs().max() <= 2**-4 * x.float().abs().max()
    assert torch.equal(rows.codes.float().abs().amax(1), torch.full((num_tokens,), 448.0, device="cuda"))
    actual = cuda_linear.linear(x, codes.weight, codes.bias, codes.scales)
    assert_near(actual, rounded @ matrix.T + codes.bias.float())


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("hidden", [64, 1024, 4096, 9216, 14336])
@pytest.mark.parametrize("num_tokens", [1, 64, 300])
def test_norms_that_round(hidden: int, num_tokens: int, with_residual: bool) -> None:
    """The bits of a norm and of rounding its result, one behind the other."""
    x, weight = randn(num_tokens, hidden, dtype=BF16, seed=1), randn(hidden, dtype=BF16, seed=2)
    x[num_tokens // 2] = 0
    x[-1, -1] = torch.nan
    residual = randn(num_tokens, hidden, dtype=BF16, seed=3) if with_residual else None
    added = None if residual is None else residual.clone()
    expected = cuda_linear.float8_rows(cuda.rms_norm(x, weight, 1e-5, residual, offset=1.0))
    found = cuda_linear.normed_float8_rows(x, RowNorm(weight, 1e-5, offset=1.0), added)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
    if residual is not None and added is not None:
        assert torch.equal(residual.view(torch.int16), added.view(torch.int16))


@pytest.mark.parametrize(("outputs", "depth"), PRODUCTS)
@pytest.mark.parametrize("num_tokens", [40, 65])
def test_products_of_normed_rows(outputs: int, depth: int, num_tokens: int) -> None:
    """A weight gives the bits of its norm, its rounding and its product one behind the other, also where something is
    still to be added to the stream."""
    x, codes, _ = made(outputs, depth, num_tokens)
    weight = DenseWeight(codes.weight, codes.bias, CudaOps(), codes.scales)
    norm = Norm(randn(depth, dtype=BF16, seed=4), 1e-5)
    for added in (None, randn(num_tokens, depth, dtype=BF16, seed=5)):
        one, other = (Stream(weight.ops, x.clone(), None if added is None else added.clone()) for _ in range(2))
        assert torch.equal(weight.normed(one, norm), weight(other.normed(norm)))
        assert torch.equal(one.state(), other.state())
        if outputs % 4 == 0:
            assert torch.equal(weight.normed_gated(one, norm, "silu"), weight.gated(other.normed(norm), "silu"))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "clamped_swish"])
@pytest.mark.parametrize("inner", [8, 264, 1024, 14336, 16392, 32768, 32776])
@pytest.mark.parametrize("num_tokens", [0, 1, 140])
def test_gates_that_round(inner: int, num_tokens: int, activation: str) -> None:
    """The bits of an activation and of rounding its result, one behind the other; the last size in two launches."""
    gate_up = randn(num_tokens, 2 * inner, dtype=BF16, seed=1, scale=4.0)
    gate_up[num_tokens // 2 :][:1] = 0
    gate_up[-1:, -1] = torch.nan
    gate_up[-1:, 0] = torch.inf
    expected = cuda_linear.float8_rows(cuda.gated_activation(gate_up, activation))
    found = cuda_linear.gated_float8_rows(gate_up, activation)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales.view(torch.int32), expected.scales.view(torch.int32))


@pytest.mark.parametrize("in_float8", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("num_tokens", [3, 40, 129, 300])
def test_feed_forwards_that_round(
    num_tokens: int, in_float8: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activation rounds for the product behind it, or a kernel of its own does: the same bits."""
    hidden, inner = 512, 1536
    weights = []
    for (outputs, depth), is_coded in zip([(2 * inner, hidden), (hidden, inner)], in_float8, strict=True):
        codes = product(outputs, depth, True, outputs)
        plain = DenseWeight(in_numbers(codes).weight.to(BF16), codes.bias, CudaOps())
        weights.append(DenseWeight(codes.weight, codes.bias, CudaOps(), codes.scales) if is_coded else plain)
    up, down = weights
    sublayer = Sublayer(mixer=FeedForward(up, "silu", down, gated=True))
    norm = Norm(randn(hidden, dtype=BF16, seed=4), 1e-5)
    total, added = (randn(num_tokens, hidden, dtype=BF16, seed=seed) for seed in (5, 6))
    step = LayerStep(positions=added, slot_mapping=(), kv_cache=added, attention=())  # a feed-forward reads none

    def ran() -> Tensor:
        stream = Stream(up.ops, total.clone(), added.clone())
        apply(sublayer, NormedStream(stream, norm, None), stream, step)
        return stream.state()

    with monkeypatch.context() as patch:
        patch.setattr(DenseWeight, "gates_apart", Weight.gates_apart)
        expected = ran()
    rounds = 0

    def counted(gate_up: Tensor, activation: str) -> cuda_linear.Float8Rows:
        nonlocal rounds
        rounds += 1
        return gated(gate_up, activation)

    gated = cuda_linear.gated_float8_rows
    monkeypatch.setattr(cuda_linear, "gated_float8_rows", counted)
    assert torch.equal(ran(), expected)
    assert rounds == (in_float8[1] and num_tokens > 128 and up.gates_apart(Stream(up.ops, total)))
    assert rounds == 1 or num_tokens <= 128 or in_float8 != (True, True)


@pytest.mark.parametrize("num_tokens", [6, 40, 65])
def test_rows_of_zeros_and_of_no_numbers(num_tokens: int) -> None:
    x = torch.zeros(num_tokens, 512, dtype=BF16, device="cuda")
    x[1, 3] = torch.nan
    codes = product(32, 512, False, 3)
    actual = cuda_linear.linear(x, codes.weight, None, codes.scales)
    assert actual[1].isnan().all() and (actual[0] == 0).all() and (actual[2:] == 0).all()


# --- whole models ---------------------------------------------------------------------------------------------------

GAP = 4 * BF16_GAP  # rows of x are float8 in steps of more than four tokens
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
TOOLS = {
    "rows": tiny.Tool({"quant_method": "fbgemm_fp8"}, tiny.fp8(1, None)),
    "tensor": tiny.Tool({"quant_method": "fp8"}, tiny.fp8(None, None)),
    "blocks": tiny.Tool(BLOCKS, tiny.fp8(32, 32, "weight_scale_inv")),
    "awq": tiny.awq(32),
    "gptq-act-order": tiny.gptq(4, 8, symmetric=True, act_order=True),
}


def assert_near_tokens(directory: Path, reference: PreTrainedModel, gap: float, **fields: object) -> None:
    """In a crowd, and one by one, where layers are chained."""
    asked = prompts()
    with LLM(config(directory, **({"dtype": "bfloat16"} | fields))) as llm:
        crowd = llm.generate(asked, PARAMS, progress=False)
        alone = [llm.generate([prompt], PARAMS, progress=False)[0] for prompt in asked]
    judge = Judge(reference, asked)
    for answers in (crowd, alone):
        for answer, one in zip(answers, judge(answers), strict=True):
            tokens = list(answer.choices[0].token_ids)
            first = next((i for i, (a, b) in enumerate(zip(tokens, one.tokens, strict=True)) if a != b), None)
            if first is not None:
                best, ours = one.logprobs[first].max(), one.logprobs[first][tokens[first]]
                assert best - ours < gap, f"token {first}: {tokens[first]} lies {best - ours:.3f} under the best"


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ["llama-wide", "llama-head-64", "qwen3", "mixtral"])
def test_checkpoints(name: str, tool: str, tmp_path: Path) -> None:
    reference = tiny.write(name, tmp_path, TOOLS[tool])
    # In bfloat16 a near tie of the router chooses another expert, and the text is another one.
    dtype = "float32" if name == "mixtral" else "bfloat16"
    assert_near_tokens(tmp_path, reference, GAP if tool in ("rows", "tensor") else BF16_GAP, dtype=dtype)


@pytest.mark.parametrize("name", ["llama-wide", "qwen3"])
def test_float8_made_at_load(name: str, tiny_model: Callable[[str], Path]) -> None:
    assert_near_tokens(tiny_model(name), make_reference(name), GAP, quantization="fp8")


def test_layers_of_both_formats(tmp_path: Path) -> None:
    """A chain ends where the format changes."""
    reference = tiny.write("llama-wide", tmp_path, TOOLS["rows"], left_alone=".layers.1.")
    assert_near_tokens(tmp_path, reference, GAP)
