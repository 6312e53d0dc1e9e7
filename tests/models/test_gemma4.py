"""Gemma 4 beside transformers, field by field: a change of config.json is computed as there, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from bequest.engine.errors import ModelError
from bequest.engine.models.cutting import Cutting
from bequest.engine.models.hf_config import parse_hf_config
from bequest.engine.models.load import load_model
from bequest.engine.models.strips import KvHeads, divide
from tests.models.paged import PagedSequences
from tests.tiny_models import GEMMA4, GEMMA4_EXPERTS, GEMMA4_KEYS, GEMMA4_SHARED, VOCAB_SIZE, randomised

LENGTH = 33
FULL, WINDOW = "full_attention", "sliding_attention"
PROPORTIONAL = GEMMA4["rope_parameters"][FULL]


def published(changes: dict[str, Any]) -> dict[str, Any]:
    """As config.json of a published checkpoint spells it, with fields that are None left out."""
    values = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **GEMMA4, **changes}
    return {name: value for name, value in values.items() if value is not None}


def save(directory: Path, changes: dict[str, Any]) -> torch.nn.Module:
    values = published(changes)
    model = randomised(Gemma4ForCausalLM(Gemma4TextConfig(**json.loads(json.dumps(values)))), "gemma4")
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(values))
    return model


def rope(kind: str, **fields: object) -> dict[str, Any]:
    """The rotation of one type of layer, with other fields."""
    changed = {name: value for name, value in (GEMMA4["rope_parameters"][kind] | fields).items() if value is not None}
    return {"rope_parameters": GEMMA4["rope_parameters"] | {kind: changed}}


HONOURED: list[dict[str, Any]] = [
    {},
    {"vocab_size": 300},
    {"hidden_size": 96},
    {"intermediate_size": 40},
    {"num_attention_heads": 6},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"head_dim": 24},
    {"head_dim": 32},
    {"global_head_dim": 48},
    {"global_head_dim": 16},
    {"global_head_dim": 40},
    {"hidden_activation": "silu"},
    {"rms_norm_eps": 0.01},
    {"tie_word_embeddings": False},
    {"attention_bias": True},
    {"sliding_window": 1},
    {"sliding_window": 4000},
    {"layer_types": [FULL] * 3},
    {"layer_types": [FULL, WINDOW, FULL]},
    {"layer_types": [WINDOW] * 3},  # the last one sees all in any case
    {"layer_types": None},
    {"num_hidden_layers": 7, "layer_types": None},
    {"final_logit_softcapping": None},
    {"use_bidirectional_attention": "vision"},
    {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE},
    {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE + 7},
    {"num_global_key_value_heads": 1},  # which counts where keys are values alone
    {"attention_k_eq_v": True},
    {**GEMMA4_KEYS, "num_global_key_value_heads": 4},
    {"num_kv_shared_layers": 1, "layer_types": [WINDOW, FULL, FULL]},
    {"num_kv_shared_layers": 1, "layer_types": [WINDOW, FULL, FULL], **GEMMA4_KEYS, "use_double_wide_mlp": True},
    {"use_double_wide_mlp": True},
    {"num_experts": 4},  # without `enable_moe_block`
    {**GEMMA4_EXPERTS},
    {**GEMMA4_EXPERTS, "top_k_experts": 8},
    {**GEMMA4_EXPERTS, **GEMMA4_SHARED},
    rope(FULL, rope_theta=50.0),
    rope(FULL, partial_rotary_factor=1.0),
    rope(FULL, partial_rotary_factor=0.3),
    rope(FULL, partial_rotary_factor=None),
    rope(FULL, factor=4.0),
    rope(FULL, rope_type="default", partial_rotary_factor=None),
    rope(WINDOW, rope_theta=9.0),
    rope(WINDOW, rope_type="proportional", partial_rotary_factor=0.5),
    {"rope_parameters": {FULL: GEMMA4["rope_parameters"][WINDOW], WINDOW: GEMMA4["rope_parameters"][WINDOW]}},
]


def assert_near(model: torch.nn.Module, directory: Path) -> None:
    tokens = torch.randint(300, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    actual = PagedSequences(load_model(directory).model, 1, LENGTH).run(0, tokens, chunk=7)
    assert (actual - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("changes", HONOURED, ids=str)
def test_a_changed_field_is_what_it_is_in_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_near(save(tmp_path, changes), tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_theta": 5.0}, "rope_theta is not supported; say rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"rope_parameters": {FULL: PROPORTIONAL}}, "rope_parameters lacks sliding_attention"),
        (rope(FULL, rope_type="linear", factor=2.0, partial_rotary_factor=None), "rope type 'linear' is not supported"),
        (rope(WINDOW, partial_rotary_factor=0.5), "partial_rotary_factor is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        ({"query_pre_attn_scalar": 16}, "query_pre_attn_scalar = 16"),
        ({"attention_chunk_size": 16}, "attention_chunk_size = 16"),
        ({"layer_types": [WINDOW, FULL]}, "layer_types are 2, but num_hidden_layers is 3"),
        ({"layer_types": ["linear_attention", WINDOW, FULL]}, "layer_types linear_attention are not supported"),
        (
            {"layer_types": None, "sliding_window_pattern": 2},
            "sliding_window_pattern is not supported; say layer_types",
        ),
        ({"sliding_window": 0}, "sliding_window must be positive, not 0"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3 of 3 layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1 leaves no full_attention layer"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads evenly"),
        (GEMMA4_KEYS | {"num_global_key_value_heads": 3}, "4 query heads cannot share 3 KV heads evenly"),
        ({"global_head_dim": 0}, "global_head_dim must be positive, not 0"),
        ({"global_head_dim": 33}, "cannot rotate 33 of 33 dimensions"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, "does not cover vocab_size = 320"),
        ({"hidden_activation": "mish"}, "activation 'mish' is not supported"),
        (GEMMA4_EXPERTS | {"num_experts": None}, "lacks num_experts"),
        (GEMMA4_EXPERTS | {"top_k_experts": 9}, "top_k_experts = 9: a token can take 8 experts at most"),
        (
            {"per_layer_config": {"2": {"intermediate_size": 8}}},
            "per_layer_config: 2: intermediate_size is not supported",
        ),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "layers with a window have the heads"),
        ({"per_layer_config": {"7": {"head_dim": 8}}}, "there is no layer 7"),
        (
            {"layer_types": [FULL] * 3, "per_layer_config": {"0": {"head_dim": 8}}},
            "all layers with full_attention must have the same heads",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError) as error:
        parse_hf_config(published(changes))
    assert told in str(error.value)


def test_the_text_of_a_model_with_other_parts(tmp_path: Path) -> None:
    """Its tensors have longer names, and those of the other parts are not read."""
    model = save(tmp_path, GEMMA4_SHARED)
    tensors = load_file(tmp_path / "model.safetensors")
    longer = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = ("model.vision_tower.a", "model.audio_tower.b", "model.embed_vision.c", "model.embed_audio.d")
    save_file(longer | {name: torch.ones(2) for name in others}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert_near(model, tmp_path)
    notes = " ".join(load_model(tmp_path).notes)
    assert all(f"model.{part}.* is no part of the decoder" in notes for part in ("vision_tower", "embed_audio"))


def test_the_library_numbers_many_layers_with_zeros_before(tmp_path: Path) -> None:
    values = published({"num_hidden_layers": 12, "layer_types": None})
    model = randomised(Gemma4ForCausalLM(Gemma4TextConfig(**values)), "gemma4")
    model.save_pretrained(tmp_path)
    assert "05" in json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    assert_near(model, tmp_path)


def test_layers_that_share_keys_may_have_matrices_of_their_own(tmp_path: Path) -> None:
    """Published checkpoints hold them; nobody reads them."""
    model = save(tmp_path, GEMMA4_SHARED)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
        tensors[f"model.layers.6.self_attn.{name}.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_near(model, tmp_path)


def test_blocks_hold_as_many_layers_of_each_kind_as_fill_them() -> None:
    """The 31B: 50 layers of 16 heads of 256 with a window, 10 of 4 heads of 512."""
    windows = [1024 if layer % 6 else 0 for layer in range(1, 61)]
    strips = divide(windows, [KvHeads(16, 256) if window else KvHeads(4, 512) for window in windows])
    assert strips.units == (10, *[5] * 10) and strips.windows == (0, *[1024] * 10)
    assert strips.shapes(16)[0] == (10, 2, 4, 16, 512) and strips.shapes(16)[1] == (5, 2, 16, 16, 256)
    assert len({*strips.places}) == 60


def test_ranks_refuse_it_by_name() -> None:
    with pytest.raises(ModelError, match="tensor_parallel_size=2: Gemma4ForCausalLM is not cut into parts"):
        Cutting(parse_hf_config(published({})), 0, 2)
