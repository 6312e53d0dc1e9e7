"""config.json in its old and new spellings, and what it may not ask for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bequest.engine.errors import ModelError
from bequest.engine.models.config import RopeConfig
from bequest.engine.models.hf_config import parse_hf_config

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 100,
}
QWEN2 = MINIMAL | {"architectures": ["Qwen2ForCausalLM"]}
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}


def test_defaults() -> None:
    config = parse_hf_config(MINIMAL)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.q_size, config.kv_size, config.rotary_dim) == (64, 64, 16)
    assert config.rope.theta == 10000.0
    assert not config.tie_word_embeddings
    assert config.strips.windows == (0,)
    assert config.kv_shape(16) == (3, 2, 4, 16, 16)


def test_null_is_absent() -> None:
    explicit_nulls = {"head_dim": None, "rope_scaling": None, "num_key_value_heads": None, "sliding_window": None}
    assert parse_hf_config(MINIMAL | explicit_nulls) == parse_hf_config(MINIMAL)


@pytest.mark.parametrize(
    ("architecture", "biases"),  # (QKV, output, MLP) when the file asks for all of them
    [
        ("LlamaForCausalLM", (True, True, True)),
        ("MistralForCausalLM", (False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False)),
        ("Qwen3ForCausalLM", (True, True, False)),
    ],
)
def test_biases(architecture: str, biases: tuple[bool, bool, bool]) -> None:
    config = parse_hf_config(MINIMAL | {"architectures": [architecture], "attention_bias": True, "mlp_bias": True})
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == biases
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (MINIMAL | {"sliding_window": 16}, (0, 0, 0)),
        (MINIMAL | {"architectures": ["MistralForCausalLM"], "sliding_window": 16}, (16, 16, 16)),
        (MINIMAL | {"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0)),
        (MINIMAL | {"architectures": ["MinistralForCausalLM"], "sliding_window": None}, (0, 0, 0)),
        (QWEN2 | SLIDING | {"use_sliding_window": False}, (0, 0, 0)),
        # As the transformers library saves a model that uses none.
        (QWEN2 | {"architectures": ["Qwen2MoeForCausalLM"], "sliding_window": 0}, (0, 0, 0)),
        (QWEN2 | SLIDING, (0, 0, 16)),
        (QWEN2 | SLIDING | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, (16, 0, 0)),
    ],
)
def test_sliding_windows(values: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_hf_config(values).sliding_windows == windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; .*LlamaForCausalLM, Mi",
        ),
        ({"architectures": None}, "none is named"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"hidden_size": "big"}, "hidden_size must be a whole number, not 'big'"),
        ({"vocab_size": 0}, "vocab_size must be positive, not 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be positive"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "cannot rotate 15 of 15"),
        ({"hidden_act": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        (
            {"num_local_experts": 8, "final_logit_softcapping": 30.0},
            "final_logit_softcapping = 30.0; num_local_experts",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantization_config: quant_method 'hqq' is not supp"),
        ({"quantization_config": {"sym": True}}, r"quant_method 'unknown' is not supported"),
        ({"quantization_config": "fp8"}, r"quantization_config must be an object"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope type 'spiral' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor must be a list of numbers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling lacks factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling lacks factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "all layers must rotate alike"),
        ({"rope_parameters": {"mrope_section": [8, 4, 4]}}, "mrope_section is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        # What other architectures have: the transformers library overlooks it, or fails.
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters: partial_rotary_factor is not supported",
        ),
        ({"is_causal": False}, "is_causal = False"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types are 4, but num_hidden_layers is 3"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_hf_config(MINIMAL | change)


def test_layer_types_must_be_known_and_complete() -> None:
    with pytest.raises(ModelError, match=re.escape("layer_types chunked_attention are not supported")):
        parse_hf_config(QWEN2 | SLIDING | {"layer_types": ["chunked_attention"] * 3})
    with pytest.raises(ModelError, match="layer_types are 2, but num_hidden_layers is 3"):
        parse_hf_config(QWEN2 | SLIDING | {"layer_types": ["full_attention"] * 2})


def test_fields_at_their_neutral_values_are_fine() -> None:
    neutral = {"num_experts": 0, "embedding_multiplier": 1.0, "logit_scale": 1, "attn_logit_softcapping": None}
    assert parse_hf_config(MINIMAL | neutral) == parse_hf_config(MINIMAL)


GEMMA3 = {  # what the published files of Gemma 3 4B have for their text
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def test_a_description_that_leaves_out_most_has_the_defaults_of_its_class() -> None:
    config = parse_hf_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA3})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.max_position == 131072  # which counts the scaling already
    assert config.rope == RopeConfig(1e6, "linear", factor=8.0)
    assert config.window_rope == RopeConfig(1e4)
    assert [layer for layer, window in enumerate(config.sliding_windows) if not window] == [5, 11, 17, 23, 29]
    assert (config.activation, config.tie_word_embeddings) == ("gelu_tanh", True)
    assert config.attention_scale == 256**-0.5 and config.embedding_factor == 2560**0.5


def test_rotation_by_type_in_both_spellings() -> None:
    old = GEMMA3 | {"architectures": ["Gemma3ForCausalLM"], "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    new = GEMMA3 | {"architectures": ["Gemma3ForCausalLM"], "rope_scaling": None, "rope_parameters": by_type}
    assert parse_hf_config(old) == parse_hf_config(new)


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [
        ("Olmo3ForCausalLM", (4096, 4096, 4096, 0, 4096)),
        ("Gemma2ForCausalLM", (4096, 0, 4096, 0, 4096)),
        ("Cohere2ForCausalLM", (4096, 4096, 4096, 0, 4096)),
        ("Gemma3ForCausalLM", (4096, 4096, 4096, 4096, 4096)),
        ("MinistralForCausalLM", (4096, 4096, 4096, 4096, 4096)),
        ("MistralForCausalLM", (4096, 4096, 4096, 4096, 4096)),
    ],
)
def test_windows_of_a_description_without_types(architecture: str, windows: tuple[int, ...]) -> None:
    config = parse_hf_config(MINIMAL | {"architectures": [architecture], "num_hidden_layers": 5})
    assert config.sliding_windows == windows


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive, not 0"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, "attention_cap must not be negative"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "config.json lacks sliding_window"),
        ("Gemma2ForCausalLM", {"sliding_window_pattern": 3}, "sliding_window_pattern is not supported; say layer_"),
        ("Olmo3ForCausalLM", {"sliding_window_pattern": 2}, "sliding_window_pattern is not supported"),
        ("MinistralForCausalLM", {"sliding_window_pattern": 2}, "sliding_window_pattern is not supported"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern must be positive, not 0"),
        ("Cohere2ForCausalLM", {"use_qk_norm": True}, "use_qk_norm = True"),
        ("CohereForCausalLM", {"logit_scale": 0.0}, "logit_scale must be positive, not 0.0"),
        ("Cohere2ForCausalLM", {"use_parallel_block": False}, "use_parallel_block = False"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 3}, "layer_types full_attention beside a sliding"),
        ("MistralForCausalLM", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be positive, not 0"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 3}, "lacks sliding_window, which layer_types"),
        (
            "SmolLM3ForCausalLM",
            {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3},
            "use_sliding_window is false, but layer_types has",
        ),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_theta": 5.0}}, "must have full_attention and sliding"),
        ("Olmo3ForCausalLM", {"rope_theta": 5.0}, "rope_theta must be 500000.0"),
        (
            "Olmo3ForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "truncate must be true",
        ),
        (
            "GlmForCausalLM",
            {"head_dim": 10},
            "partial_rotary_factor = 0.5 turns 5 of head_dim = 10 dimensions, which must be an even number",
        ),
        ("GptOssForCausalLM", {}, "config.json lacks rope_parameters"),
        ("OlmoeForCausalLM", {"num_experts": 8, "num_local_experts": 4}, "names of one number, and differ"),
        (
            "Ministral3ForCausalLM",
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "needs one positive",
        ),
        ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "llama"}}, "'llama' is not supported here"),
        ("Gemma3ForConditionalGeneration", {"text_config": 3}, "text_config must be an object"),
        (
            "Gemma3ForConditionalGeneration",
            {"text_config": GEMMA3, "quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method 'bitsandbytes' is not supported",
        ),
    ],
)
def test_refused_of_a_family(architecture: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_hf_config(MINIMAL | {"architectures": [architecture]} | change)


def test_a_cap_that_is_null_is_none() -> None:
    gemma2 = MINIMAL | {"architectures": ["Gemma2ForCausalLM"]}
    assert (parse_hf_config(gemma2).attention_cap, parse_hf_config(gemma2).logits_cap) == (50.0, 30.0)
    without = parse_hf_config(gemma2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (without.attention_cap, without.logits_cap) == (0.0, 0.0)


def test_gelu_of_the_first_gemma_is_its_approximation() -> None:
    config = parse_hf_config(MINIMAL | {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"})
    assert config.activation == "gelu_tanh"
