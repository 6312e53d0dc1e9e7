"""GGUF files of families whose layers are made otherwise than Llama's, as the converter of llama.cpp writes them."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from bequest.engine.errors import ModelError
from bequest.engine.formats.gguf_file import GGUFFile
from bequest.engine.models.config import DecoderConfig, RopeConfig
from bequest.engine.models.fields import Fields
from bequest.engine.models.gguf_config import parse_gguf_config
from bequest.engine.models.gguf_hybrids import parse_gguf_recurrent
from bequest.engine.models.gguf_loader import layer_names
from bequest.engine.models.gguf_registry import GGUF_ARCHITECTURES
from bequest.engine.models.load import load_model, open_checkpoint
from tests.models.test_gguf_loader import assert_same_logits
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import (
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_KEYS,
    GEMMA4_SHARED,
    SHAPE,
    TINY_MODELS,
    YARN,
    make_reference,
    randomised,
)

FOUR, SIX = SHAPE | {"num_hidden_layers": 4}, SHAPE | {"num_hidden_layers": 6}
F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0

NAMES = ["olmo2", "gemma2", "gemma3", "granite", "smollm3", "cohere", "cohere2", "phi3", "phi3-long", "glm4"]
NAMES += ["gemma", "olmo3", "gpt-oss", "qwen3-next", "qwen3.5", "qwen3.5-moe"]
NAMES += ["gemma4", "gemma4-keys", "gemma4-shared", "gemma4-experts", "glm4-moe", "cohere-plus", "ministral3"]
# Every other layer is recurrent, and groups of codes are of one head.
HYBRID = FOUR | {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "head_dim": 32,
    "pad_token_id": 1,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


def make(name: str) -> PreTrainedModel:
    """With what the name of an architecture implies in a GGUF file, where transformers has a field for it."""
    heads = {"head_dim": 32, "query_pre_attn_scalar": 32, "pad_token_id": 1}
    match name:
        case "gemma2":
            caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
            return randomised(Gemma2ForCausalLM(Gemma2Config(**SHAPE, **heads, **caps, sliding_window=9)), name)
        case "gemma3":
            rope = {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
            config = Gemma3TextConfig(**SIX, **heads, sliding_window=7, rope_parameters=rope)
            return randomised(Gemma3ForCausalLM(config), name)
        case "glm4-moe":  # files have no groups of experts
            _, config = TINY_MODELS[name]
            own = Glm4MoeConfig(**config.to_dict() | {"n_group": 1, "topk_group": 1})
            return randomised(Glm4MoeForCausalLM(own), name)
        case "gemma4-shared":  # codes come in blocks of 32
            shared = GEMMA4 | GEMMA4_SHARED | {"hidden_size_per_layer_input": 32}
            return randomised(Gemma4ForCausalLM(Gemma4TextConfig(**shared)), name)
        case "gemma4-experts":
            experts = GEMMA4 | GEMMA4_KEYS | GEMMA4_EXPERTS | {"moe_intermediate_size": 32}
            return randomised(Gemma4ForCausalLM(Gemma4TextConfig(**experts)), name)
        case "ministral3":
            rope = YARN | {"original_max_position_embeddings": 13, "mscale": 1.0, "mscale_all_dim": 0.5}
            rope |= {"factor": 8.0, "llama_4_scaling_beta": 0.1}
            return randomised(Ministral3ForCausalLM(Ministral3Config(**SHAPE, head_dim=32, rope_parameters=rope)), name)
        case "olmo3":  # files have one theta for all layers
            plain = {"rope_type": "default", "rope_theta": YARN["rope_theta"]}
            kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
            rope = {"full_attention": YARN, "sliding_attention": plain}
            config = Olmo3Config(**FOUR, sliding_window=7, layer_types=kinds, rope_parameters=rope)
            return randomised(Olmo3ForCausalLM(config), name)
        case "qwen3-next":
            return randomised(Qwen3NextForCausalLM(Qwen3NextConfig(**HYBRID, **EXPERTS, norm_topk_prob=True)), name)
        case "qwen3.5":
            return randomised(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID)), name)
        case "qwen3.5-moe":
            return randomised(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**HYBRID, **EXPERTS)), name)
        case "smollm3":
            return randomised(SmolLM3ForCausalLM(SmolLM3Config(**FOUR, pad_token_id=1)), name)
        case "cohere2":
            config = Cohere2Config(**FOUR, sliding_window=8, logit_scale=0.25, pad_token_id=1)
            return randomised(Cohere2ForCausalLM(config), name)
    return make_reference(name)


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    reference = write_tiny_gguf(make(name), tmp_path / "model.gguf", kind)
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """As its files have it: experts in codes of four bits."""
    reference = write_tiny_gguf(make("gpt-oss"), tmp_path / "model.gguf", GGMLQuantizationType.MXFP4)
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_hybrids_stay_in_codes(tmp_path: Path) -> None:
    reference = write_tiny_gguf(make("qwen3.5"), tmp_path / "model.gguf", Q8_0)
    assert load_model(tmp_path / "model.gguf").formats == ("codes of 8 bits",)
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_layers_of_a_hybrid_that_draft_are_left_out(tmp_path: Path) -> None:
    reference = make("qwen3.5")
    reference.config.num_hidden_layers = 5  # in the description alone
    path, drafts = tmp_path / "model.gguf", {"blk.4.nextn.eh_proj.weight": np.zeros((4, 4), np.float32)}
    write_tiny_gguf(reference, path, metadata={"nextn_predict_layers": 1}, extra_tensors=drafts)
    reference.config.num_hidden_layers = 4
    assert_same_logits(path, reference)


def test_heads_of_a_hybrid_that_cannot_be_shared() -> None:
    values = {"ssm.time_step_rank": 6, "ssm.inner_size": 192, "ssm.group_count": 4, "ssm.state_size": 16}
    with pytest.raises(ModelError, match=r"model\.gguf: ssm\.inner_size = 192, .* do not divide each other"):
        parse_gguf_recurrent(Fields({**values, "ssm.conv_kernel": 4}, "model.gguf"), 4)
    with pytest.raises(ModelError, match=r"ssm\.group_count must be positive, not 0"):
        parse_gguf_recurrent(Fields({**values, "ssm.conv_kernel": 4, "ssm.group_count": 0}, "model.gguf"), 4)


def test_queries_that_grow(tmp_path: Path) -> None:
    """Ministral 3's do behind the length in training, which a file must have then."""
    path = tmp_path / "model.gguf"
    write_tiny_gguf(make("ministral3"), path)
    config = open_checkpoint(path).config
    assert isinstance(config, DecoderConfig) and config.max_position == 256
    assert (config.rope.query_growth, config.rope.original_max_position) == (pytest.approx(0.1), 13)
    write_tiny_gguf(make("ministral3"), path, metadata={"rope.scaling.original_context_length": 0})
    with pytest.raises(ModelError, match=r"rope\.scaling\.original_context_length must be positive, not 0"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_layers_with_a_window_have_a_theta_of_their_own_where_a_file_says_so(name: str, tmp_path: Path) -> None:
    config = copy.deepcopy(make(name).config)
    config.rope_parameters["sliding_attention"]["rope_theta"] = 300.0
    model = (Gemma3ForCausalLM if name == "gemma3" else Olmo3ForCausalLM)(config)
    path = tmp_path / "model.gguf"
    reference = write_tiny_gguf(randomised(model, name), path, metadata={"rope.freq_base_swa": 300.0})
    assert_same_logits(path, reference)


def test_a_theta_of_windows_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(make("cohere2"), path, metadata={"rope.freq_base_swa": 300.0})
    config = open_checkpoint(path).config
    assert isinstance(config, DecoderConfig) and config.window_rope == RopeConfig(300.0)


def test_windows_of_olmo_without_a_pattern(tmp_path: Path) -> None:
    write_tiny_gguf("olmo2", tmp_path / "model.gguf", metadata={"attention.sliding_window": 5})
    assert parse_gguf_config(GGUFFile(tmp_path / "model.gguf")).sliding_windows == (5, 5, 5)
    write_tiny_gguf("olmo2", tmp_path / "model.gguf")
    assert parse_gguf_config(GGUFFile(tmp_path / "model.gguf")).sliding_windows == (0, 0, 0)


def test_a_pattern_that_does_not_fit_the_layers(tmp_path: Path) -> None:
    reference = make("olmo3")
    reference.config.layer_types = reference.config.layer_types[1:]  # in the description alone
    write_tiny_gguf(reference, tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"sliding_window_pattern must have true or false for each layer"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.shared_kv_layers", 3, "attention.shared_kv_layers = 3 leaves no layer to share with"),
        ("rope.dimension_count", 16, "rope.dimension_count other than attention.key_length is not supported"),
        ("rope.scaling.type", "yarn", "rope.scaling.type = 'yarn' is not supported"),
        ("attention.value_length", 16, "attention.value_length other than attention.key_length"),
        ("attention.head_count_kv", 0, "must be positive"),
        ("attention.head_count_kv", 1.5, "attention.head_count_kv must be a whole number, or one for each of 3 layers"),
    ],
)
def test_a_gemma4_that_is_not_supported(key: str, value: object, message: str, tmp_path: Path) -> None:
    write_tiny_gguf(make("gemma4"), tmp_path / "model.gguf", metadata={key: value})
    with pytest.raises(ModelError, match=re.escape(message)):
        open_checkpoint(tmp_path / "model.gguf")


def test_frequencies_of_gemma4_that_are_not_supported(tmp_path: Path) -> None:
    write_tiny_gguf(make("gemma4"), tmp_path / "model.gguf")
    file = GGUFFile(tmp_path / "model.gguf")
    stored = np.array([1.0, 2.0, *[1e30] * 14], dtype=np.float32)
    file.tensors["rope_freqs.weight"] = replace(file.tensors["rope_freqs.weight"], data=stored.view(np.uint8))
    with pytest.raises(ModelError, match=r"rope_freqs.weight must have 16 values: ones, then huge ones"):
        parse_gguf_config(file)


def test_the_largest_gemma_scales_scores_by_its_hidden_size(tmp_path: Path) -> None:
    reference = make("gemma2")
    reference.config.num_hidden_layers = 46  # in the description alone
    write_tiny_gguf(reference, tmp_path / "model.gguf")
    config = parse_gguf_config(GGUFFile(tmp_path / "model.gguf"))
    assert config.attention_scale == (64 / 4) ** -0.5 != 32**-0.5


def test_scales_of_other_families_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf("qwen3", tmp_path / "model.gguf", metadata={"logit_scale": 0.5, "final_logit_softcapping": 30.0})
    with pytest.raises(ModelError, match=r"final_logit_softcapping = 30\.0; logit_scale = 0\.5"):
        open_checkpoint(tmp_path / "model.gguf")
    write_tiny_gguf("qwen3", tmp_path / "model.gguf", metadata={"rope.scaling.yarn_ext_factor": 0.5})
    with pytest.raises(ModelError, match=r"rope\.scaling\.yarn_ext_factor = 0\.5"):
        open_checkpoint(tmp_path / "model.gguf")


def test_names_are_those_of_the_gguf_package() -> None:
    """Every tensor that we read is one that the package lists for the architecture."""
    kinds = {gguf.MODEL_ARCH_NAMES[arch]: tensors for arch, tensors in gguf.MODEL_TENSORS.items()}
    for name in (
        "mistral3",
        "phi3",
        "glm4",
        "olmo2",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma4",
        "granite",
        "smollm3",
        "cohere2",
        "gpt-oss",
    ):
        listed = {gguf.TENSOR_NAMES[kind].format(bid=0) for kind in kinds[name]}
        variant = GGUF_ARCHITECTURES[name]
        read = [part for part in layer_names(variant.style, variant) if part.endswith("norm")]
        norms = {part for part in read if part not in ("attn_q_norm", "attn_k_norm")}
        assert {f"blk.0.{part}" for part in norms} <= listed, name
