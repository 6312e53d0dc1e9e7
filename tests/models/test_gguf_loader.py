"""GGUF files: names, the order of rotated rows, quantised types, rope scaling, and refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bequest.engine.errors import ModelError
from bequest.engine.formats.gguf_file import GGUFFile, GGUFTensor
from bequest.engine.models.families.decoders import check_tensors
from bequest.engine.models.gguf_config import parse_gguf_config
from bequest.engine.models.gguf_loader import GGUFSource, dequantise, hf_name, pair_halves
from bequest.engine.models.load import load_model, open_checkpoint
from bequest.engine.models.respelled import respelled_gguf
from tests.models.paged import PagedSequences
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import LLAMA3, SHAPE

F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
TOKENS = list(range(3, 40))


def assert_same_logits(path: Path, reference: Any) -> None:
    loaded = load_model(path)
    actual = PagedSequences(loaded.model, 1, len(TOKENS)).run(0, TOKENS, chunk=len(TOKENS))
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    assert (actual - expected).abs().max() / expected.abs().max() < 2e-5


@pytest.mark.parametrize("kind", [F32, F16, Q4_1, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3-moe", "olmoe"])
def test_round_trip(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    reference = write_tiny_gguf(name, tmp_path / "model.gguf", kind)
    assert_same_logits(tmp_path / "model.gguf", reference)


@pytest.mark.parametrize("kind", [Q4_1, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama", "llama-biases-tied-mha-gelu", "mixtral", "qwen3-moe"])
def test_codes_of_the_file_give_the_bits_of_its_values(
    name: str, kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(name, tmp_path / "model.gguf", kind)
    in_codes = load_model(tmp_path / "model.gguf")
    monkeypatch.setattr(GGUFSource, "load_codes", lambda source, tensor: None)
    in_values = load_model(tmp_path / "model.gguf")
    assert in_codes.weight_bytes < in_values.weight_bytes / 3
    assert in_codes.formats == (f"codes of {4 if kind is Q4_1 else 8} bits",) and in_values.formats == ("float32",)
    logits = [PagedSequences(it.model, 1, len(TOKENS)).run(0, TOKENS, chunk=7) for it in (in_codes, in_values)]
    assert torch.equal(*logits)


def test_biases_of_rotated_rows_and_tied_output(tmp_path: Path) -> None:
    reference = write_tiny_gguf("llama-biases-tied-mha-gelu", tmp_path / "model.gguf")
    loaded = load_model(tmp_path / "model.gguf")
    assert loaded.config.attention_bias and loaded.config.attention_output_bias and loaded.config.mlp_bias
    assert loaded.config.tie_word_embeddings
    # GGUF has no field for the activation: architecture `llama` means SiLU.
    for layer in reference.model.layers:
        layer.mlp.act_fn = torch.nn.SiLU()
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_window_of_all_layers(tmp_path: Path) -> None:
    reference = write_tiny_gguf("mistral", tmp_path / "model.gguf", metadata={"attention.sliding_window": 8})
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_qwen2_without_windows(tmp_path: Path) -> None:
    reference = write_tiny_gguf("qwen2", tmp_path / "model.gguf", metadata={"attention.sliding_window": 0})
    reference.config.layer_types = ["full_attention"] * 3
    for layer in reference.model.layers:
        layer.attention_type = layer.self_attn.layer_type = "full_attention"
        layer.self_attn.sliding_window = None
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_rope_divisors_stand_for_llama3_scaling(tmp_path: Path) -> None:
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**SHAPE, rope_parameters=LLAMA3))
    plain = 1.0 / LLAMA3["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    divisors = {"rope_freqs.weight": (plain / scaled).numpy()}
    reference = write_tiny_gguf("llama-llama3", tmp_path / "model.gguf", extra_tensors=divisors)
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_yarn(tmp_path: Path) -> None:
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    reference = write_tiny_gguf("llama-yarn", tmp_path / "model.gguf", metadata=scaling)
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_names() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.12.ffn_down.bias") == "model.layers.12.mlp.down_proj.bias"
    assert hf_name("blk.12.ssm_in.weight") == "blk.12.ssm_in.weight"


def test_halves_of_a_partly_rotated_head() -> None:
    """Heads of 6, of which 4 dimensions turn."""
    rows = torch.arange(12)[:, None]
    assert pair_halves(rows, num_heads=2, rotary_dim=4)[:, 0].tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@pytest.mark.parametrize("kind", [Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.BF16], ids=lambda k: k.name)
def test_dequantise_equals_the_gguf_library(kind: GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).standard_normal((70, 2048), dtype=np.float32)  # more than is done at once
    data = gguf.quantize(values, kind)
    tensor = GGUFTensor("x", values.shape, kind, data.reshape(-1))
    np.testing.assert_array_equal(dequantise(tensor), gguf.dequantize(data, kind))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, "expert_count = 8"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        ({"attention.value_length": 8}, "attention.value_length"),
    ],
)
def test_refused_metadata(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf("qwen2", path, metadata=metadata)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_unsupported_architecture(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf("llama", path)
    file = GGUFFile(path)
    file.architecture = "mamba"
    with pytest.raises(
        ModelError, match="architecture mamba is not supported; supported are llama, mistral3, qwen2, qwen3"
    ):
        parse_gguf_config(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split.count", 2, "model.gguf is one of 2 parts of a model"),
        ("llama.attention.causal", False, "attention.causal = False"),
        ("llama.use_parallel_residual", True, "use_parallel_residual = True"),
        ("llama.attention.clamp_kqv", 8.0, "attention.clamp_kqv = 8.0"),
        ("llama.block_count", 1 << 31, "block_count must be from 1 to 10000, not 2147483648"),
        ("llama.block_count", 0, "block_count must be from 1"),
    ],
)
def test_what_would_compute_something_else(key: str, value: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf("llama", path)
    file = GGUFFile(path)
    file.metadata[key] = value
    with pytest.raises(ModelError, match=message):
        parse_gguf_config(file)


def test_unexpected_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf("llama", path, extra_tensors={"blk.0.ssm_in.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_in\.weight is not a tensor of this architecture"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "left_out", "told"),
    [
        ("llama", "blk.1.attn_q.weight", "blk.1.attn_q.weight is missing"),
        ("qwen3", "attn_q_norm", "blk.0.attn_q_norm.weight is missing; blk.1.attn_q_norm.weight is missing"),
        ("llama", "output_norm.weight", "output_norm.weight is missing"),
        ("qwen3-moe", "blk.1.ffn_gate_exps", "blk.1.ffn_gate_exps.weight is missing"),
        ("qwen3-moe", "ffn_up_exps", "blk.1.ffn_up_exps.weight is missing"),
        ("gpt-oss", "blk.2.attn_sinks", "blk.2.attn_sinks.weight is missing"),
        ("phi3", "attn_qkv", "blk.0.attn_qkv.weight is missing; blk.1.attn_qkv.weight is missing"),
        ("qwen3.5", "attn_q.weight", "blk.1.attn_q.weight is missing"),
        ("gemma4-experts", "blk.1.ffn_gate_up_exps", "blk.1.ffn_gate_up_exps.weight is missing"),
        ("gemma4-experts", "layer_output_scale", "blk.0.layer_output_scale.weight is missing"),
    ],
)
def test_errors_name_tensors_as_the_file_does(name: str, left_out: str, told: str, tmp_path: Path) -> None:
    write_tiny_gguf(name, tmp_path / "model.gguf")
    file = GGUFFile(tmp_path / "model.gguf")
    config = parse_gguf_config(file)
    for stored in [stored for stored in file.tensors if left_out in stored]:
        del file.tensors[stored]
    with pytest.raises(ModelError, match=re.escape(f"as configured: {told}")) as raised:
        check_tensors(respelled_gguf(GGUFSource(file, config), config), config)
    assert str(tmp_path / "model.gguf") in str(raised.value) and "model.layers" not in str(raised.value)


def test_a_shape_is_that_of_a_tensor_of_the_file(tmp_path: Path) -> None:
    write_tiny_gguf("phi3", tmp_path / "model.gguf")
    file = GGUFFile(tmp_path / "model.gguf")
    config = parse_gguf_config(file)
    for stored in ("blk.0.attn_qkv.weight", "blk.1.ffn_down.weight"):
        file.tensors[stored] = replace(file.tensors[stored], shape=(60, 64))
    joined = "blk.0.attn_qkv.weight (as model.layers.0.self_attn.q_proj.weight) has shape [60, 64], not [64, 64]"
    alone = "blk.1.ffn_down.weight has shape [60, 64], not [64, 96]"
    with pytest.raises(ModelError, match=f"{re.escape(joined)}.*{re.escape(alone)}"):
        check_tensors(respelled_gguf(GGUFSource(file, config), config), config)
