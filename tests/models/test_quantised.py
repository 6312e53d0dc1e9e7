"""Checkpoints in codes: every layout gives what its codes stand for, on whole models; what is broken is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bequest.engine.errors import ModelError
from bequest.engine.layers.codes import Float8Rows, IntegerRows
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.fields import Fields
from bequest.engine.models.load import load_model, open_checkpoint
from bequest.engine.models.padding import pad_heads
from bequest.engine.models.quantised.described import Quantisation, parse_quantisation
from bequest.engine.models.quantised.made import MadeFloat8, check_fp8, float8_rows
from bequest.engine.models.quantised.source import QuantisedSource, kinds_of
from bequest.engine.models.safetensors_loader import SafetensorsSource
from tests.models import tiny_quantised as tiny
from tests.models.paged import PagedSequences
from tests.tiny_models import SHAPE, TINY_MODELS, VOCAB_SIZE

TOKENS = [(7 * i + 3) % VOCAB_SIZE for i in range(23)]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [48, 40]}  # which leave a shorter block at the end

TOOLS = {
    "fp8-tensor": tiny.Tool(FP8 | {"activation_scheme": "static"}, tiny.fp8(None, None, extra="input_scale")),
    "fp8-transformers": tiny.Tool(
        FP8 | {"activation_scheme": "static"}, tiny.fp8(None, None, "weight_scale_inv", extra="activation_scale")
    ),
    "fp8-blocks": tiny.Tool(BLOCKS, tiny.fp8(48, 40, "weight_scale_inv")),
    "fbgemm": tiny.Tool({"quant_method": "fbgemm_fp8"}, tiny.fp8(1, None)),
    "modelopt": tiny.Tool({"quant_method": "modelopt", "quant_algo": "FP8"}, tiny.fp8(None, None, extra="input_scale")),
    "compressed-fp8": tiny.Tool(
        tiny.compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}), tiny.fp8(1, None)
    ),
    "awq": tiny.awq(8),
    "awq-in-codes": tiny.awq(32),
    "gptq": tiny.gptq(4, 32, symmetric=True),
    "gptq-asymmetric": tiny.gptq(4, 32, symmetric=False),
    "gptq-v2": tiny.gptq(4, 32, symmetric=False, form="gptq_v2"),
    "gptq-act-order": tiny.gptq(4, 8, symmetric=True, act_order=True),
    "gptq-3-bits": tiny.gptq(3, 32, symmetric=False, form="gptq_v2"),
    "gptq-8-bits": tiny.gptq(8, 32, symmetric=True),
    "int8": tiny.int8_rows(),
    "packed": tiny.packed_rows(4, 32),
}
IN_CODES = {
    "gptq": 4,
    "gptq-asymmetric": 4,
    "gptq-v2": 4,
    "gptq-3-bits": 4,
    "awq-in-codes": 4,
    "gptq-8-bits": 8,
    "int8": 8,
    "packed": 4,
}
ROUNDED = 4e-3  # what the offsets of asymmetric codes, rounded to float16, make of logits


def logits_of(directory: Path, **options: Any) -> Tensor:
    return PagedSequences(load_model(directory, **options).model, 1, len(TOKENS)).run(0, TOKENS, chunk=7)


@torch.no_grad()
def expected_of(reference: PreTrainedModel) -> Tensor:
    logits: Tensor = reference(torch.tensor([TOKENS])).logits[0]
    return logits


def assert_same(actual: Tensor, expected: Tensor, rounding: float = 2e-5) -> None:
    assert (actual - expected).abs().max() < rounding * expected.abs().max()


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_values_are_those_of_the_codes(name: str, tool: str, tmp_path: Path) -> None:
    if tool in ("gptq-3-bits", "fbgemm") and name != "llama":
        pytest.skip("differs from others in how one matrix is read")
    reference = tiny.write(name, tmp_path, TOOLS[tool])
    exact = tool not in ("awq-in-codes", "gptq-asymmetric", "gptq-v2", "gptq-3-bits")
    assert_same(logits_of(tmp_path), expected_of(reference), 2e-5 if exact else ROUNDED)


@pytest.mark.parametrize("tool", IN_CODES)
def test_integers_stay_in_codes_on_a_cpu(tool: str, tmp_path: Path) -> None:
    tiny.write("llama", tmp_path, TOOLS[tool])
    in_codes = load_model(tmp_path)
    assert in_codes.formats == (f"codes of {IN_CODES[tool]} bits", "float32")  # the head is in numbers
    in_bfloat16 = load_model(tmp_path, dtype="bfloat16")
    assert in_bfloat16.formats == ("bfloat16",)


@pytest.mark.parametrize("tool", ["awq-in-codes", "gptq-asymmetric", "gptq-8-bits", "packed"])
def test_rows_of_one_group(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are columns then, and those of some tools are stored transposed."""
    narrow = LlamaConfig(**SHAPE | {"intermediate_size": 32})
    monkeypatch.setitem(TINY_MODELS, "narrow", (LlamaForCausalLM, narrow))
    reference = tiny.write("narrow", tmp_path, TOOLS[tool])
    assert load_model(tmp_path).formats == (f"codes of {IN_CODES[tool]} bits", "float32")
    assert_same(logits_of(tmp_path), expected_of(reference), ROUNDED)


def test_symmetric_codes_have_the_bits_of_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write("llama", tmp_path, TOOLS["gptq"])
    in_codes = logits_of(tmp_path)
    monkeypatch.setattr("bequest.engine.backends.cpu.backend.CpuBackend.code_types", lambda backend, dtype: ())
    assert torch.equal(in_codes, logits_of(tmp_path))


def test_modelopt_describes_codes_in_a_file_of_its_own(tmp_path: Path) -> None:
    reference = tiny.write("llama", tmp_path, TOOLS["modelopt"])
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="only float tensors are supported"):
        open_checkpoint(tmp_path)
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    assert_same(logits_of(tmp_path), expected_of(reference))


def test_weights_beside_float8_decide_the_dtype(tmp_path: Path) -> None:
    tiny.write("llama", tmp_path, TOOLS["fp8-blocks"], torch.bfloat16)
    assert open_checkpoint(tmp_path).source.dtype is torch.bfloat16


def test_heads_that_are_padded_leave_other_codes_alone(tmp_path: Path) -> None:
    tiny.write("llama", tmp_path, TOOLS["gptq"])
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint.config, DecoderConfig)
    _, padded = pad_heads(checkpoint.config, checkpoint.source, (64,))
    assert padded.load_codes("model.layers.0.self_attn.q_proj.weight") is None
    assert isinstance(padded.load_codes("model.layers.0.mlp.up_proj.weight"), IntegerRows)


# --- codes that are made at load ------------------------------------------------------------------------------------


def test_float8_is_made_of_layers_alone(tiny_model: Callable[[str], Path]) -> None:
    source = MadeFloat8(open_checkpoint(tiny_model("llama")).source)
    assert source.load_codes("lm_head.weight") is None and source.load_codes("model.embed_tokens.weight") is None
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        codes, values = source.load_codes(name), source.load(name)
        assert isinstance(codes, Float8Rows) and codes.scales.shape == (values.shape[0], 1)
        # Three bits of mantissa, and below the smallest exponent steps of 2^-9.
        assert ((codes.values() - values).abs() <= values.abs() * 2**-4 + codes.scales * 2**-10).all()


def test_a_row_of_zeros_stays_zero() -> None:
    codes = float8_rows(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert torch.equal(codes.values(), torch.tensor([[0.0, 0.0], [1.0, -2.0]]))


@pytest.mark.parametrize(
    ("stored", "storage", "fields", "message"),
    [
        (None, torch.bfloat16, {"on_cpu": True}, "quantization=fp8 is for a GPU"),
        (None, torch.bfloat16, {"is_dense": False}, "quantization=fp8 is for decoders without experts"),
        (None, torch.float32, {}, "quantization=fp8 goes with dtype=bfloat16"),
        (Quantisation("awq", ("awq",)), torch.bfloat16, {}, r"the checkpoint is quantised already \(awq\)"),
    ],
)
def test_float8_that_cannot_be_made(
    stored: Quantisation | None, storage: torch.dtype, fields: dict[str, bool], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check_fp8(stored, storage, **({"on_cpu": False, "is_dense": True} | fields))


def test_a_cpu_refuses_to_make_float8(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="quantization=fp8 is for a GPU"):
        load_model(tiny_model("llama"), quantization="fp8")


# --- the tools themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (3, True), (8, True)])
def test_what_compressed_tensors_packs(bits: int, symmetric: bool, strategy: str, tmp_path: Path) -> None:
    group = {"group_size": 32} if strategy == "group" else {}
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, **group}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))

    def store(matrix: Tensor) -> tiny.Stored:
        size = group.get("group_size", matrix.shape[1])
        _, scales, zeros = tiny.rounded(matrix, bits, size, symmetric=symmetric)
        state = {"weight": matrix, "weight_scale": scales.float()}
        if not symmetric:
            state["weight_zero_point"] = (zeros - 2 ** (bits - 1)).to(torch.int8)
        stored = PackedQuantizationCompressor.compress(state, scheme)
        values = PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
        return tiny.Stored({name: tensor.contiguous() for name, tensor in stored.items()}, values)

    reference = tiny.write("llama", tmp_path, tiny.Tool(tiny.compressed("pack-quantized", weights), store))
    assert_same(logits_of(tmp_path), expected_of(reference), 2e-5 if symmetric else ROUNDED)


@pytest.mark.parametrize(
    ("forms", "shift"),
    [
        ({}, 1),
        ({"format": "gptq_v2"}, 0),
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, 0),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, 1),  # as transformers takes them
    ],
)
def test_zero_points_of_gptq_are_of_the_form_that_is_named(forms: dict[str, str], shift: int) -> None:
    described = Fields({"quant_method": "gptq", "bits": 4, **forms}, "config.json")
    assert parse_quantisation(described).zero_shift == shift


@pytest.mark.parametrize(("bits", "depth"), [(4, 24), (4, 8), (8, 24), (7, 24)])
def test_rows_so_short_that_other_bits_would_fill_as_many_words(bits: int, depth: int, tmp_path: Path) -> None:
    codes = torch.randint(2**bits, (4, depth), generator=torch.Generator().manual_seed(bits))
    packed = pack_to_int32((codes - 2 ** (bits - 1)).to(torch.int8), bits)
    tensors = {"weight_packed": packed, "weight_scale": torch.ones(4, 1), "weight_shape": torch.tensor(codes.shape)}
    save_file({f"q.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    weights = {"num_bits": bits, "type": "int", "strategy": "channel"}
    stored = parse_quantisation(Fields(tiny.compressed("pack-quantized", weights), "config.json"))
    source = QuantisedSource(SafetensorsSource(tmp_path, codes=kinds_of(stored)), stored)
    assert torch.equal(source.load("q.weight"), codes - 2.0 ** (bits - 1))


def test_groups_of_compressed_tensors_in_an_order(tmp_path: Path) -> None:
    gptq = tiny.gptq(4, 16, symmetric=True, act_order=True, form="gptq_v2")

    def store(matrix: Tensor) -> tiny.Stored:
        stored, values = gptq.store(matrix)
        codes = ((stored["qweight"].T[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(1)
        tensors = {
            "weight_packed": tiny.packed(codes, 4),
            "weight_scale": stored["scales"].T.contiguous(),
            "weight_shape": torch.tensor(matrix.shape),
            "weight_g_idx": stored["g_idx"],
        }
        return tiny.Stored(tensors, values)

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "actorder": "group"}
    reference = tiny.write("llama", tmp_path, tiny.Tool(tiny.compressed("pack-quantized", weights), store))
    assert_same(logits_of(tmp_path), expected_of(reference))


def test_float8_blocks_as_transformers_reads_them(tmp_path: Path) -> None:
    """Which makes bfloat16 of them where there is no GPU."""
    tool = tiny.Tool(FP8 | {"weight_block_size": [32, 32]}, tiny.fp8(32, 32, "weight_scale_inv"))
    tiny.write("llama", tmp_path, tool)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = open_checkpoint(tmp_path).source
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        assert_same(theirs.get_parameter(name).float(), ours.load(name), 2**-8)


# --- what is broken -------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor]], object]
Q = "model.layers.1.self_attn.q_proj"


def changed(directory: Path, tool: str, change: Change) -> Path:
    tiny.write("llama", directory, TOOLS[tool])
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("tool", "change", "message"),
    [
        ("awq", lambda t: t.pop(f"{Q}.qzeros"), f"{Q}.qzeros is missing"),
        ("awq", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:, 1:].clone()}), f"{Q}.scales has shape"),
        ("gptq", lambda t: t.pop(f"{Q}.qweight"), f"{Q}.qzeros is for a matrix in codes, but there is none"),
        ("gptq", lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"][:-8].clone()}), f"{Q}.qweight has 8 words for 56"),
        ("fp8-blocks", lambda t: t.pop(f"{Q}.weight_scale_inv"), f"{Q}.weight_scale is missing"),
        ("fp8-blocks", lambda t: t.update({f"{Q}.weight": torch.zeros(64, 64)}), f"{Q}.weight is F32"),
        ("fp8-tensor", lambda t: t.update({f"{Q}.weight_scale": torch.ones(3, 5)}), "3 groups, which 64 values do not"),
        ("fp8-tensor", lambda t: t.update({f"{Q}.weight_scale": torch.ones(1, 1, 4)}), "nor by row, group or block"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tool: str, change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        open_checkpoint(changed(tmp_path, tool, change))


@pytest.mark.parametrize(
    ("tool", "change", "message"),
    [
        ("gptq-act-order", lambda t: t[f"{Q}.g_idx"].fill_(9), f"{Q}.g_idx is not the groups, 0 to 7, of 64 columns"),
        ("fp8-tensor", lambda t: t[f"{Q}.weight_scale"].fill_(torch.nan), f"{Q}.weight_scale has scales that are no"),
        (
            "int8",
            lambda t: t.update({f"{Q}.weight_zero_point": torch.zeros(3, dtype=torch.int8)}),
            "zero_point has shape",
        ),
        ("packed", lambda t: t.update({f"{Q}.weight_zero_point": torch.zeros(8, 1, dtype=torch.int32)}), "zero points"),
    ],
)
def test_numbers_that_cannot_be_are_named(tool: str, change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(changed(tmp_path, tool, change))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (
            {"quant_method": "awq", "version": "gemv"},
            "quantization_config: version = 'gemv' is not supported, but gemm",
        ),
        ({"quant_method": "awq", "bits": 8}, "bits = 8 is not supported, but 4"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point = False is not supported"),
        ({"quant_method": "gptq", "bits": 1}, "bits = 1 is not supported, but 2 to 8"),
        ({"quant_method": "gptq"}, "quantization_config lacks bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format = True"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "format = 'marlin'"),
        ({"quant_method": "awq", "format": "gemv_fast"}, "format = 'gemv_fast' is not supported, but gemm"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend = 'llm-awq' is not supported, but autoawq"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2' is not supported, but e4m3"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4' is not supported, but FP8"),
        (tiny.compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "format = 'nvfp4-pack-quantized'"),
        (tiny.compressed("pack-quantized", {"num_bits": 4, "type": "float"}), "weights: num_bits = 4 is not supp"),
        (tiny.compressed("int-quantized", {"strategy": "tensor_group"}), "strategy = 'tensor_group'"),
        (tiny.compressed("dense", {}, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format = "),
        (
            tiny.compressed("dense", {}, transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
            "transform_config = '…' is not supported, but empty",
        ),
    ],
)
def test_layouts_that_are_not_read_are_named(
    described: dict[str, Any], message: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    values = json.loads((tiny_model("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": described}))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)
