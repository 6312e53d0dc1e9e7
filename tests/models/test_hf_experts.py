"""Experts of Hugging Face directories: what config.json says of them, and the names that checkpoints have for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bequest.engine.errors import ModelError
from bequest.engine.models.experts_config import ExpertsConfig
from bequest.engine.models.hf_config import parse_hf_config
from bequest.engine.models.load import load_model
from tests.models.paged import PagedSequences
from tests.tiny_models import make_reference, save_tiny_model

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
TOKENS = list(range(3, 40))


def experts_of(architecture: str, **fields: Any) -> ExpertsConfig:
    experts = parse_hf_config(BASE | {"architectures": [architecture]} | fields).experts
    assert experts is not None
    return experts


def test_what_is_not_said_is_as_transformers_has_it() -> None:
    mixtral = experts_of("MixtralForCausalLM")
    assert (mixtral.num_experts, mixtral.top_k, mixtral.intermediate_size) == (8, 2, 96)
    assert mixtral.renormalises and mixtral.shared_size == 0 and mixtral.layers == frozenset(range(6))
    qwen2 = experts_of("Qwen2MoeForCausalLM")
    assert (qwen2.num_experts, qwen2.top_k, qwen2.intermediate_size) == (60, 4, 1408)
    assert (qwen2.renormalises, qwen2.shared_size, qwen2.shared_gate) == (False, 5632, True)
    qwen3 = experts_of("Qwen3MoeForCausalLM", norm_topk_prob=True)
    assert (qwen3.num_experts, qwen3.top_k, qwen3.intermediate_size) == (128, 8, 768)
    assert (qwen3.renormalises, qwen3.shared_size) == (True, 0)
    olmoe = experts_of("OlmoeForCausalLM")
    assert (olmoe.num_experts, olmoe.top_k, olmoe.intermediate_size, olmoe.renormalises) == (64, 8, 96, False)
    glm = experts_of("Glm4MoeForCausalLM")
    assert (glm.scoring, glm.choice_bias, glm.renormalises, glm.shared_size) == ("sigmoid", True, True, 1408)
    assert glm.layers == {1, 2, 3, 4, 5} and not glm.shared_gate


def test_the_number_of_experts_has_several_names() -> None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        assert experts_of("Qwen3MoeForCausalLM", **{name: 10}).num_experts == 10


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"decoder_sparse_step": 2}, {1, 3, 5}),
        ({"decoder_sparse_step": 4}, {3}),
        ({"mlp_only_layers": [0, 5]}, {1, 2, 3, 4}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {1, 5}),
        ({"first_k_dense_replace": 2}, {2, 3, 4, 5}),
        ({"decoder_sparse_step": 3, "first_k_dense_replace": 3}, {5}),
    ],
)
def test_dense_layers_among_those_with_experts(fields: dict[str, Any], layers: set[int]) -> None:
    assert experts_of("Qwen3MoeForCausalLM", **fields).layers == layers


@pytest.mark.parametrize("fields", [{"num_experts": 0}, {"decoder_sparse_step": 7}, {"first_k_dense_replace": 6}])
def test_a_model_whose_layers_are_all_dense(fields: dict[str, Any]) -> None:
    config = parse_hf_config(BASE | {"architectures": ["Qwen3MoeForCausalLM"]} | fields)
    assert config.experts is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts_per_tok": 0}, "config.json: num_experts_per_tok must be positive, not 0"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok = 200: a token can take 128 experts at most"),
        ({"n_group": 3}, "n_group = 3: 128 experts cannot form so many groups"),
        ({"n_group": 4, "topk_group": 5}, "topk_group = 5: there are 4 groups of experts"),
        ({"n_group": 64, "topk_group": 3}, "num_experts_per_tok = 8: a token can take 6 experts of 3 groups at most"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be positive, not 0"),
        ({"n_shared_experts": -1}, "n_shared_experts must not be negative"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be positive"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be positive, not 0"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be a whole number or a list"),
    ],
)
def test_numbers_that_cannot_be_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        experts_of("Glm4MoeForCausalLM", **fields)


def test_clipped_queries_are_refused() -> None:
    with pytest.raises(ModelError, match=r"clip_qkv = 8\.0"):
        experts_of("OlmoeForCausalLM", clip_qkv=8.0)


def test_experts_of_a_model_that_has_none_are_refused() -> None:
    with pytest.raises(ModelError, match="num_local_experts = 8"):
        parse_hf_config(BASE | {"architectures": ["LlamaForCausalLM"], "num_local_experts": 8})


def logits(directory: Path) -> torch.Tensor:
    return PagedSequences(load_model(directory).model, 1, len(TOKENS)).run(0, TOKENS, chunk=len(TOKENS))


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe", "olmoe"])
def test_all_experts_of_a_layer_in_one_tensor(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """As transformers saves what it does not turn back: the same weights, the same bits."""
    save_tiny_model(name, tmp_path, save_original_format=False)
    fused = load_file(tmp_path / "model.safetensors")
    single = load_file(tiny_model(name) / "model.safetensors")
    assert any(tensor.dim() == 3 for tensor in fused.values())
    assert all(tensor.dim() < 3 for tensor in single.values())
    assert torch.equal(logits(tmp_path), logits(tiny_model(name)))


def test_an_expert_that_is_missing_is_named(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = load_file(tiny_model("qwen3-moe") / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny_model("qwen3-moe") / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.7\.up_proj\.weight is missing"):
        load_model(tmp_path)


def test_layers_that_draft_tokens_are_left_out(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = load_file(tiny_model("glm4-moe") / "model.safetensors")
    tensors |= {name.replace(".2.", ".3.", 1): value.clone() for name, value in tensors.items() if "layers.2." in name}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny_model("glm4-moe") / "config.json").read_bytes())
    assert torch.equal(logits(tmp_path), logits(tiny_model("glm4-moe")))


def test_random_weights_of_a_description_alone(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    values = json.loads((tiny_model("qwen2-moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded = load_model(tmp_path, dummy=True)
    assert loaded.num_parameters == sum(p.numel() for p in make_reference("qwen2-moe").parameters())
    made = PagedSequences(loaded.model, 1, len(TOKENS)).run(0, TOKENS, chunk=7)
    assert made.isfinite().all()
