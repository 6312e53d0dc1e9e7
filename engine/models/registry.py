"""Which architectures Hugging Face checkpoints have, and how the variants of the decoder family differ; those of GGUF
files are in gguf_registry.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bequest.engine.errors import ModelError
from bequest.engine.models.style import COHERE, GEMMA, GEMMA2, GEMMA4, GLM4, LLAMA, OLMO2, OLMOE, LayerStyle
from bequest.engine.types.scoring import Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class HFExperts:
    """What the name implies for experts. Sizes are those of the transformers library where config.json has none."""

    num_experts: int
    top_k: int
    inner_size: int = 0  # 0: `intermediate_size` is the experts'; else they have a field of their own
    renormalises: Literal["always", "if_config", "unless_config"] = "if_config"
    scoring: Scoring = "softmax"
    choice_bias: bool = False
    grouped: bool = False  # config.json has groups and a factor
    shared: Literal["none", "gated", "counted"] = "none"  # gated: of a size of its own; counted: so many experts' size
    shared_size: int = 0
    dense_first: int = 0  # layers without experts before the others
    biased: bool = False  # the router, and all matrices
    # gpt-oss' own: rows of gates and ups are in turns, matrices of all experts in one tensor, and gates are clamped.
    interleaved: bool = False
    drafts: bool = False  # checkpoints have layers behind the last that draft tokens; they are not read


@dataclass(frozen=True, slots=True, kw_only=True)
class HFRope:
    """What the name implies for the rotary embedding."""

    interleaved: bool = False  # rotation pairs neighbours, not halves
    by_type: bool = False  # layers with a window turn otherwise than those that see all
    # Layers without positions. listed: as `no_rope_layers` or `no_rope_layer_interval` says; full: those that see all
    skipped: Literal["never", "listed", "full"] = "never"
    partial: bool = False  # config.json may have a `partial_rotary_factor`; others turn whole heads
    kinds: tuple[str, ...] = ()  # the types of scaling that it has; empty: any
    named: bool = False  # a file without any description of it means another one than the others'
    grows: bool = False  # queries may grow with their position


@dataclass(frozen=True, slots=True)
class HFVariant:
    """What the name of a Hugging Face architecture implies beyond its config.json."""

    # as_config: Q, K, V and the output, if `attention_bias`; qkv_as_config: the former alone, unless it is false
    # qkv_bias: the former alone, unless `qkv_bias` is false
    attention_bias: Literal["never", "qkv", "as_config", "qkv_as_config", "qkv_bias"]
    mlp_bias: Literal["never", "as_config"]
    qk_norm: bool
    # by_layer: if `use_sliding_window`, as `layer_types` or `max_window_layers` says; by_type: as `layer_types` says,
    # or all but each `sliding_window_pattern`-th layer
    sliding_window: Literal["never", "all_layers", "all_if_used", "by_layer", "by_type", "every_other"]
    defaults: Mapping[str, object] = field(default_factory=dict)  # of fields that config.json leaves out
    style: LayerStyle = LLAMA
    rope: HFRope = HFRope()
    joined: tuple[str, ...] = ()  # matrices that hold several of ours (respelled.py)
    honoured: frozenset[str] = frozenset()  # fields of config.json that other variants would be refused with
    scales_embedding: bool = False  # by the root of the hidden size
    # Beside an encoder of images, say: config.json has it as `text_config`, of one of these types. What each implies
    # for fields that are left out comes before `defaults`.
    part_of: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    experts: HFExperts | None = None  # in place of MLPs
    recurrent: bool = False  # `layer_types` has linear ones, and attention a gate
    sinks: bool = False  # heads have a score that takes its share of attention and gives nothing
    gemma4: bool = False  # config.json has what Gemma 4 alone has (hf_gemma4.py)


MULTIPLIERS = frozenset({"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"})
SOFT_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"})

_GLM = HFVariant(
    "qkv_as_config",
    "never",
    qk_norm=False,
    sliding_window="never",
    defaults={"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07},
    joined=("gate_up_proj",),
    rope=HFRope(interleaved=True, partial=True),
)

_OLMO2 = HFVariant(
    "as_config", "never", qk_norm=True, sliding_window="never", style=OLMO2, defaults={"rms_norm_eps": 1e-5}
)

# Of Gemma's config classes; published files leave out what is as it is there.
_GEMMA_DEFAULTS: dict[str, object] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
}

_GEMMA = HFVariant(
    "as_config",
    "never",
    qk_norm=False,
    sliding_window="never",
    defaults=_GEMMA_DEFAULTS | {"hidden_act": "gelu_pytorch_tanh"},
    style=GEMMA,
    scales_embedding=True,
)

_GEMMA3 = replace(
    _GEMMA,
    qk_norm=True,
    sliding_window="by_type",
    defaults=_GEMMA_DEFAULTS
    | {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
    style=GEMMA2,
    rope=HFRope(by_type=True),
    # transformers has attn_logit_softcapping in its config, and leaves it alone
    honoured=SOFT_CAPS - {"attn_logit_softcapping"} | {"sliding_window_pattern"},
)

_GEMMA4 = HFVariant(
    "as_config",
    "never",
    qk_norm=True,
    sliding_window="by_type",
    defaults=_GEMMA_DEFAULTS
    | {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 30,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 512,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    style=GEMMA4,
    rope=HFRope(by_type=True, kinds=("default", "proportional")),
    honoured=frozenset({"final_logit_softcapping", "num_kv_shared_layers"}),
    scales_embedding=True,
    experts=HFExperts(num_experts=0, top_k=0),  # beside MLPs, if `enable_moe_block`
    gemma4=True,
)

_COHERE_DEFAULTS: dict[str, object] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}

_COHERE = HFVariant(
    "as_config",
    "never",
    qk_norm=False,
    sliding_window="never",
    defaults=_COHERE_DEFAULTS,
    style=COHERE,
    rope=HFRope(interleaved=True),
    honoured=frozenset({"logit_scale"}),
)

_HYBRID = HFVariant(
    "as_config",
    "never",
    qk_norm=True,
    sliding_window="never",
    style=GEMMA,
    defaults={"head_dim": 256, "partial_rotary_factor": 0.25},
    rope=HFRope(partial=True),
    recurrent=True,
)

_HYBRID_EXPERTS = HFExperts(
    num_experts=512, top_k=10, inner_size=512, renormalises="unless_config", shared="gated", shared_size=512
)
_ALWAYS_NORMED = replace(_HYBRID_EXPERTS, num_experts=256, top_k=8, renormalises="always")

_MISTRAL = HFVariant("never", "never", qk_norm=False, sliding_window="all_layers", defaults={"sliding_window": 4096})

_MINISTRAL3 = replace(
    _MISTRAL,
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    rope=HFRope(grows=True),
)

HF_ARCHITECTURES: Mapping[str, HFVariant] = {
    "LlamaForCausalLM": HFVariant("as_config", "as_config", qk_norm=False, sliding_window="never"),
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": HFVariant(
        "never", "never", qk_norm=False, sliding_window="by_type", defaults={"sliding_window": 4096}
    ),
    "Ministral3ForCausalLM": _MINISTRAL3,
    # Mistral Small 3's, Ministral 3's and Devstral 2's text alone.
    "Mistral3ForConditionalGeneration": replace(
        _MINISTRAL3, defaults={}, part_of={"mistral": _MISTRAL.defaults, "ministral3": _MINISTRAL3.defaults}
    ),
    "Qwen2ForCausalLM": HFVariant("qkv", "never", qk_norm=False, sliding_window="by_layer"),
    "Qwen3ForCausalLM": HFVariant(
        "as_config", "never", qk_norm=True, sliding_window="by_layer", defaults={"head_dim": 128}
    ),
    "SmolLM3ForCausalLM": HFVariant(
        "as_config",
        "as_config",
        qk_norm=False,
        sliding_window="by_layer",
        defaults={"rope_theta": 2000000.0, "tie_word_embeddings": True},
        rope=HFRope(skipped="listed"),
    ),
    "GraniteForCausalLM": HFVariant(
        "as_config", "as_config", qk_norm=False, sliding_window="never", honoured=MULTIPLIERS
    ),
    "Phi3ForCausalLM": HFVariant(  # Phi-4's too
        "never",
        "never",
        qk_norm=False,
        sliding_window="all_layers",
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        joined=("qkv_proj", "gate_up_proj"),
        rope=HFRope(partial=True, kinds=("default", "longrope")),
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, style=GLM4),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        sliding_window="by_type",
        rope=HFRope(by_type=True),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": replace(
        _GEMMA,
        sliding_window="by_type",
        defaults=_GEMMA_DEFAULTS
        | {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
        style=GEMMA2,
        honoured=SOFT_CAPS,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, part_of={"gemma3_text": {}}),  # its text alone
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, part_of={"gemma4_text": {}}),  # its text alone
    "CohereForCausalLM": replace(_COHERE, honoured=_COHERE.honoured | {"use_qk_norm"}),  # Command R+ has them
    "Cohere2ForCausalLM": replace(
        _COHERE,
        sliding_window="by_type",
        defaults=_COHERE_DEFAULTS | {"rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        rope=HFRope(interleaved=True, skipped="full"),
        honoured=_COHERE.honoured | {"sliding_window_pattern"},
    ),
    "Glm4MoeForCausalLM": HFVariant(
        "qkv_as_config",
        "never",
        qk_norm=False,
        sliding_window="never",
        defaults={"attention_bias": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        rope=HFRope(partial=True),
        honoured=frozenset({"use_qk_norm"}),
        experts=HFExperts(
            num_experts=128,
            top_k=8,
            inner_size=1408,
            renormalises="unless_config",
            scoring="sigmoid",
            choice_bias=True,
            grouped=True,
            shared="counted",
            dense_first=1,
            drafts=True,
        ),
    ),
    "GptOssForCausalLM": HFVariant(
        "as_config",
        "never",
        qk_norm=False,
        sliding_window="by_type",
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        rope=HFRope(named=True),
        honoured=frozenset({"swiglu_alpha", "swiglu_limit"}),
        experts=HFExperts(num_experts=128, top_k=4, renormalises="always", biased=True, interleaved=True),
        sinks=True,
    ),
    "MixtralForCausalLM": HFVariant(
        "never",
        "never",
        qk_norm=False,
        sliding_window="all_layers",
        defaults={"rope_theta": 1000000.0, "rms_norm_eps": 1e-5},
        experts=HFExperts(num_experts=8, top_k=2, renormalises="always"),
    ),
    "OlmoeForCausalLM": HFVariant(
        "as_config",
        "never",
        qk_norm=True,
        sliding_window="never",
        style=OLMOE,
        defaults={"rms_norm_eps": 1e-5},
        experts=HFExperts(num_experts=64, top_k=8),
    ),
    "Qwen2MoeForCausalLM": HFVariant(
        "qkv_bias",
        "never",
        qk_norm=False,
        sliding_window="every_other",
        experts=HFExperts(num_experts=60, top_k=4, inner_size=1408, shared="gated", shared_size=5632),
    ),
    "Qwen3MoeForCausalLM": HFVariant(
        "as_config",
        "never",
        qk_norm=True,
        sliding_window="all_if_used",
        experts=HFExperts(num_experts=128, top_k=8, inner_size=768),
    ),
    "Qwen3NextForCausalLM": replace(_HYBRID, experts=_HYBRID_EXPERTS),
    "Qwen3_5ForCausalLM": _HYBRID,
    "Qwen3_5ForConditionalGeneration": _HYBRID,  # its text alone
    "Qwen3_5MoeForCausalLM": replace(_HYBRID, experts=_ALWAYS_NORMED),
    "Qwen3_5MoeForConditionalGeneration": replace(_HYBRID, experts=_ALWAYS_NORMED),  # its text alone
}


def find_hf_variant(names: Sequence[str], others: Collection[str] = ()) -> tuple[str, HFVariant]:
    """The first supported architecture of config.json's list, and its variant. `others` are supported elsewhere."""
    for name in names:
        if name in HF_ARCHITECTURES:
            return name, HF_ARCHITECTURES[name]
    told = unsupported(", ".join(map(str, names)) or "(none is named)", [*HF_ARCHITECTURES, *others])
    raise ModelError(f"{told}. model_impl=transformers may run others")


def unsupported(name: str, supported: Collection[str]) -> ModelError:
    return ModelError(f"architecture {name} is not supported; supported are {', '.join(dict.fromkeys(supported))}")
