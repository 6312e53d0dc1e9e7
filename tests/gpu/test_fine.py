"""Weights in codes with fine scales on a GPU: products, chains and experts against float32 over their values."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import gguf
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from bequest.engine.backends.cuda import fine
from bequest.engine.backends.cuda.backend import CudaBackend
from bequest.engine.backends.cuda.experts import PlannedChoice
from bequest.engine.backends.cuda.fine import FineExperts, FineWeight
from bequest.engine.backends.cuda.ops import CudaOps
from bequest.engine.kernels import cuda, cuda_chain, cuda_experts, cuda_fine
from bequest.engine.kernels.cpu_weights import QuantisedRows, StoredType
from bequest.engine.kernels.cuda_chain import Head, Product, Tail
from bequest.engine.kernels.cuda_experts import ExpertChoice, ExpertMatrices
from bequest.engine.kernels.cuda_fine import Codec, FineRows
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.layers.joined import JoinedWeight
from bequest.engine.models.load import load_model
from tests.gpu.test_engine import BF16_GAP
from tests.gpu.test_experts import PLAIN, gated_by, products
from tests.gpu.test_experts import assert_near as assert_near_rows
from tests.gpu.test_ops import DEVICE, guarded, randn
from tests.gpu.test_quantised import assert_near_tokens
from tests.gpu.test_skinny_chain import Layers, Sizes, assert_near, inputs, make_scratch, reference
from tests.models import tiny_quantised as tiny
from tests.models.k_quants import quantise
from tests.models.test_fine_codes import values_of
from tests.models.test_gpt_oss import write_packed
from tests.tiny_models import SHAPE, TINY_MODELS, save_tiny_model

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CHAINED: list[Codec] = ["offset4", "scaled8", "float8"]
CODECS: list[Codec] = [*CHAINED, "float4", "offset8"]
# (A, H, I, Q): fewer tiles than CTAs, several rounds, k of part of a stage and of many, odd outputs.
SIZES = [(1024, 1024, 1024, 8), (1024, 2048, 5120, 1021), (2048, 5120, 9216, 300), (4096, 4096, 14336, 6144)]


def draw(codec: Codec, outputs: int, depth: int, seed: int) -> tuple[FineRows, Tensor]:
    """Random codes, and what they stand for in float32."""
    random = torch.Generator(DEVICE).manual_seed(seed)
    most = 16 if codec in ("offset4", "float4") else 256
    codes = torch.randint(0, most, (outputs, depth), dtype=torch.uint8, generator=random, device=DEVICE)
    width = 16 if codec in ("scaled8", "float8") else 32
    scales = torch.rand(outputs, -(-depth // width), generator=random, device=DEVICE) * 2 * depth**-0.5 / most
    if codec == "scaled8":
        rows = cuda_fine.pack_scaled8(codes, scales.half().float())
    elif codec == "float8":
        numbers = codes.view(FP8).float().nan_to_num(0).to(FP8)
        rows = cuda_fine.pack_float8(numbers, scales.half().float())
    elif codec in ("offset4", "offset8"):
        offsets = (-scales * torch.randint(0, most, scales.shape, generator=random, device=DEVICE)).half().float()
        pack = cuda_fine.pack_offset4 if codec == "offset4" else cuda_fine.pack_offset8
        rows = pack(codes, scales.half().float(), offsets)
    else:
        rows = cuda_fine.pack_float4(codes, torch.frexp(scales).exponent)
    return rows, values_of(rows)


def product(codec: Codec, outputs: int, depth: int, with_bias: bool, seed: int) -> tuple[Product, Product]:
    """In codes and in numbers."""
    rows, values = draw(codec, outputs, depth, seed)
    bias = randn(outputs, dtype=BF16, seed=seed + 1) if with_bias else None
    return rows.product(bias), Product(values, bias)


def make_layers(codec: Codec, sizes: Sizes, *, with_bias: bool) -> tuple[Layers, Layers]:
    """In codes and in numbers."""
    attended, hidden, inner, outputs = sizes
    norms = RowNorm(randn(hidden, dtype=BF16, seed=7), 1e-5), RowNorm(randn(hidden, dtype=BF16, seed=12), 1e-6)
    made = [
        product(codec, hidden, attended, with_bias, 5),
        product(codec, 2 * inner, hidden, with_bias, 8),
        product(codec, hidden, inner, with_bias, 10),
        product(codec, outputs, hidden, with_bias, 13),
    ]
    in_codes, in_numbers = (
        Layers(Tail(output, norms[0], gate_up, "silu", down), Head(norms[1], qkv))
        for output, gate_up, down, qkv in zip(*made, strict=True)
    )
    return in_codes, in_numbers


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("codec", CHAINED)
def test_chain(codec: Codec, sizes: Sizes) -> None:
    in_codes, in_numbers = make_layers(codec, sizes, with_bias=sizes[3] != 300)
    attended, start = inputs(sizes, 4)
    expected, expected_qkv = reference(in_numbers, attended, start)
    assert expected_qkv is not None
    scratch, whole = make_scratch(), start.clone()
    whole_qkv = in_codes.run(attended, whole, scratch)
    for count in (1, 2, 3, 4):
        residual, check = guarded(count, sizes[1], dtype=BF16)
        residual.copy_(start[-count:])
        qkv = in_codes.run(attended[-count:], residual, scratch)
        assert_near(residual, expected[-count:])
        assert_near(qkv, expected_qkv[-count:])
        check()
        assert torch.equal(qkv, whole_qkv[-count:]) and torch.equal(residual, whole[-count:])


# (N, K): few rows, part of a unit, several, rows that the chain does not take, odd outputs.
PRODUCTS = [(8, 1024), (1021, 3072), (6144, 4096), (4096, 14336), (256, 736), (130, 64)]


@pytest.mark.parametrize(("outputs", "depth"), PRODUCTS)
@pytest.mark.parametrize("codec", CODECS)
def test_products(codec: Codec, outputs: int, depth: int) -> None:
    rows, values = draw(codec, outputs, depth, 3)
    bias = randn(outputs, dtype=BF16, seed=4)
    whole = randn(130, depth, dtype=BF16, seed=6)
    expected = (whole.float() @ values.T + bias.float()).to(BF16)
    assert_near(rows.numbers(), values)
    found = cuda_fine.linear(whole[:64], rows, bias)
    for count in (1, 5, 8, 9, 16, 31, 64, 130):
        actual = cuda_fine.linear(whole[:count], rows, bias)
        assert_near(actual, expected[:count])
        assert count > 64 or torch.equal(actual, found[:count]), "a row depends on others"


@pytest.mark.parametrize(("outputs", "depth"), [(8, 1024), (1024, 3072), (4096, 14336)])
@pytest.mark.parametrize("codec", CHAINED)
def test_products_of_few_rows(codec: Codec, outputs: int, depth: int) -> None:
    rows, values = draw(codec, outputs, depth, 3)
    bias, scratch = randn(outputs, dtype=BF16, seed=4), make_scratch()
    for count in range(1, rows.most_chained_rows + 1):
        x = randn(count, depth, dtype=BF16, seed=count)
        expected = (x.float() @ values.T + bias.float()).to(BF16)
        assert_near(cuda_chain.linear(x, rows.product(bias), scratch), expected)
        gate, up = expected.float().chunk(2, dim=-1)
        assert_near(cuda_chain.gated_linear(x, rows.product(bias), "silu", scratch), (F.silu(gate) * up).to(BF16))
        start = randn(count, outputs, dtype=BF16, seed=6)
        residual, check = guarded(count, outputs, dtype=BF16)
        residual.copy_(start)
        cuda_chain.linear_into(x, rows.product(bias), residual, scratch)
        assert_near(residual, (start.float() + expected.float()).to(BF16))
        check()
    assert rows.most_chained_rows == 4


@pytest.mark.parametrize("codec", CODECS)
def test_every_code(codec: Codec) -> None:
    """Each of them, with every scale, in every place of a lane."""
    rows, values = draw(codec, 300, 1024, 9)
    assert torch.equal(rows.numbers(), values.to(BF16)) or codec != "float4"
    assert (rows.numbers().float() - values).abs().max() <= 2**-8 * values.abs().max()
    one = torch.zeros(5, 1024, dtype=BF16, device=DEVICE)
    for at in range(0, 1024, 37):
        one.zero_()[:, at] = 1
        assert torch.equal(cuda_fine.linear(one, rows, None), rows.numbers()[:, at].expand(5, -1))
        if codec in CHAINED:
            few = cuda_chain.linear(one[:2].contiguous(), rows.product(), make_scratch())
            assert torch.equal(few, rows.numbers()[:, at].expand(2, -1))


# --- experts --------------------------------------------------------------------------------------------------------


@dataclass
class Matrices:
    rows: FineRows
    numbers: ExpertMatrices


def draw_experts(codec: Codec, num_experts: int, outputs: int, depth: int, seed: int) -> Matrices:
    each = [draw(codec, outputs, depth, seed + number) for number in range(num_experts)]
    codes, words, scales = (
        torch.stack([getattr(rows, name) for rows, _ in each]) for name in ("codes", "words", "scales")
    )
    bias = randn(num_experts, outputs, seed=seed)
    stacked = FineRows(codec, codes, words, scales, depth)
    return Matrices(stacked, ExpertMatrices(torch.stack([values for _, values in each]), bias))


def choose(num_tokens: int, num_experts: int, top_k: int) -> ExpertChoice:
    logits = randn(num_tokens, num_experts, seed=14, scale=2.0)
    return cuda_experts.route(logits, replace(PLAIN, top_k=top_k, renormalises=True))


@pytest.mark.parametrize("shape", [(4, 2, 64, 32), (32, 4, 320, 736), (9, 1, 256, 160), (8, 2, 480, 960)])
@pytest.mark.parametrize("codec", CODECS)
def test_experts(codec: Codec, shape: tuple[int, int, int, int]) -> None:
    num_experts, top_k, hidden, inner = shape
    up = draw_experts(codec, num_experts, 2 * inner, hidden, 20)
    down = draw_experts(codec, num_experts, hidden, inner, 70)
    for num_tokens in (0, 1, 3, 17, 70, 200, 600, 1100):
        x, choice = randn(num_tokens, hidden, dtype=BF16, seed=13), choose(num_tokens, num_experts, top_k)
        both = cuda_fine.expert_linear(x, up.rows, up.numbers.bias, choice, shared=True)
        expected = products(x, up.numbers, choice, top_k)
        assert_near_rows(both, expected)
        gate, high = both.double().chunk(2, dim=1)
        middle = gated_by("clamped_swish", gate, high).to(BF16)
        each = cuda_fine.expert_linear(middle, down.rows, down.numbers.bias, choice, shared=False)
        assert_near_rows(each, products(middle, down.numbers, choice, 1))
        summed = cuda_experts.sum_products(each, choice)
        of_ranks = each.double().view(num_tokens, top_k, hidden) * choice.weights.double()[:, :, None]
        assert_near_rows(summed, of_ranks.sum(1))
        if cuda_fine.has_expert_tiles(up.rows, choice):
            gated = cuda_fine.expert_gated(x, up.rows, up.numbers.bias, choice, "clamped_swish")
            assert torch.equal(gated, cuda.gated_activation(both, "clamped_swish"))
        if num_tokens:
            alone = choose(num_tokens, num_experts, top_k)
            few = cuda_fine.expert_linear(x[:1], up.rows, up.numbers.bias, _first(alone), shared=True)
            assert torch.equal(few, both[:top_k]), "a row depends on others"


@pytest.mark.parametrize("most_bytes", [0, 1 << 30])
@pytest.mark.parametrize("codec", CODECS)
def test_many_rows_of_experts(codec: Codec, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They become bfloat16 on their way, if there is room. One layer's follow another's in the same memory, several
    times, so that a product which begins too early meets what was there before."""
    monkeypatch.setattr(fine, "_MOST_WIDENED_BYTES", most_bytes)
    num_tokens, num_experts, top_k, hidden, inner = 900, 8, 2, 576, 736
    ops, x = CudaOps(), randn(num_tokens, hidden, dtype=BF16, seed=13)
    choice = choose(num_tokens, num_experts, top_k)
    chosen = PlannedChoice(choice.ids, choice.weights, choice)
    for seed in range(3):
        up = draw_experts(codec, num_experts, 2 * inner, hidden, 20 + 9 * seed)
        down = draw_experts(codec, num_experts, hidden, inner, 70 + 9 * seed)
        made = FineExperts(up.rows, up.numbers.bias, ops).gated(x, chosen, "clamped_swish")
        gate, high = products(x, up.numbers, choice, top_k).to(BF16).double().chunk(2, dim=1)
        assert_near_rows(made, gated_by("clamped_swish", gate, high))
        summed = FineExperts(down.rows, down.numbers.bias, ops).summed(made, chosen)
        each = products(made, down.numbers, choice, 1).view(num_tokens, top_k, hidden)
        assert_near_rows(summed, (each * choice.weights.double()[:, :, None]).sum(1))


def _first(choice: ExpertChoice) -> ExpertChoice:
    """Of the first token alone."""
    logits = torch.full((1, choice.num_experts), -50.0, device=DEVICE)
    ranks = torch.arange(choice.ids.shape[1], 0, -1, device=DEVICE, dtype=torch.float32)
    logits[0, choice.ids[0].long()] = ranks
    return cuda_experts.route(logits, replace(PLAIN, top_k=choice.ids.shape[1], renormalises=True))


# --- whole models ---------------------------------------------------------------------------------------------------

BROAD = SHAPE | {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2}
TOOLS = {
    "awq-32": tiny.awq(32),
    "packed-64": tiny.packed_rows(4, 64),
    "act-order": tiny.gptq(4, 32, symmetric=False, act_order=True),
    "int8": tiny.int8_rows(),
    "fp8-blocks": tiny.Tool(
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, tiny.fp8(128, 128, "weight_scale_inv")
    ),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_checkpoints(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TINY_MODELS, "llama-broad", (LlamaForCausalLM, LlamaConfig(**BROAD)))
    reference_model = tiny.write("llama-broad", tmp_path, TOOLS[tool])
    assert_near_tokens(tmp_path, reference_model, BF16_GAP)


def of_file(kind: str, outputs: int, depth: int) -> tuple[QuantisedRows, Tensor]:
    """As a GGUF file holds it, and its values."""
    numbers = torch.randn(outputs, depth, generator=torch.Generator().manual_seed(outputs)) * depth**-0.5
    stored = quantise(numbers.numpy(), GGMLQuantizationType[kind])
    values = torch.from_numpy(gguf.dequantize(stored, GGMLQuantizationType[kind]))
    return QuantisedRows(cast(StoredType, kind), torch.from_numpy(stored.copy())), values.to(DEVICE)


@pytest.mark.parametrize(
    "kinds", [("Q4_0",), ("Q4_1",), ("Q8_0",), ("Q4_K",), ("Q5_K",), ("Q6_K",), ("Q4_K", "Q4_K", "Q6_K")]
)
def test_types_of_gguf(kinds: tuple[str, ...]) -> None:
    """Those of one matrix, and of three that read the same rows."""
    parts = [of_file(kind, 64 + 32 * i, 1024) for i, kind in enumerate(kinds)]
    values = torch.cat([part for _, part in parts])
    bias = randn(len(values), dtype=BF16, seed=3)
    weight = CudaBackend(torch.device(DEVICE)).quantised_weight([rows for rows, _ in parts], bias)
    assert weight is not None and weight.out_features == len(values)
    assert type(weight) is (FineWeight if len(kinds) == 1 else JoinedWeight)
    for num_tokens in (1, 4, 5, 100):
        x = randn(num_tokens, 1024, dtype=BF16, seed=num_tokens)
        assert_near(weight(x), (x.float() @ values.T + bias.float()).to(BF16))


def test_experts_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are chosen: in bfloat16 a near tie would choose another one."""
    config = GptOssConfig(
        **SHAPE | {"hidden_size": 96, "intermediate_size": 160},
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=4,
        sliding_window=9,
        pad_token_id=1,
    )
    monkeypatch.setitem(TINY_MODELS, "gpt-oss-64", (GptOssForCausalLM, config))
    directory = save_tiny_model("gpt-oss-64", tmp_path / "numbers")
    (tmp_path / "codes").mkdir()
    reference_model = write_packed("gpt-oss-64", directory, tmp_path / "codes")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (directory / name).exists():
            shutil.copy(directory / name, tmp_path / "codes")
    loaded = load_model(tmp_path / "codes", "bfloat16", backend=CudaBackend(torch.device(DEVICE)))
    assert loaded.formats == ("bfloat16", "mxfp4")
    assert_near_tokens(tmp_path / "codes", reference_model, 2 * BF16_GAP)
