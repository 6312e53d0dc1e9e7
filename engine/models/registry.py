"""Which architectures there are, and how the variants of the decoder family differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bequest.engine.errors import ModelError
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


@dataclass(frozen=True, slots=True)
class HFVariant:
    """What the name of a Hugging Face architecture implies beyond its config.json."""

    # as_config: Q, K, V and the output, if `attention_bias`; qkv_as_config: the former alone, unless it is false
    # qkv_bias: the former alone, unless `qkv_bias` is false
    attention_bias: Literal["never", "qkv", "as_config", "qkv_as_config", "qkv_bias"]
    mlp_bias: Literal["never", "as_config"]
    qk_norm: bool
    sliding_window: Literal["never", "all_layers", "all_if_used", "by_layer", "every_other"]
    default_head_dim: int | None = None  # None: hidden size / heads
    default_theta: float = 10000.0  # of the rotary embedding
    default_tied: bool = False  # the output matrix is the embedding
    default_partial: float = 1.0  # the rotated share of a head
    norms_behind: bool = False  # norms around sublayers, not only before them
    joined: tuple[str, ...] = ()  # matrices that hold several of ours (respelled.py)
    interleaved_rope: bool = False  # rotation pairs neighbours, not halves
    multipliers: bool = False  # config.json has some for embedding, attention, residual and logits
    experts: HFExperts | None = None  # in place of MLPs
    recurrent: bool = False  # `layer_types` has linear ones, attention a gate, and norms are stored less one
    skips_rope: bool = False  # in the layers that `no_rope_layers` or `no_rope_layer_interval` says


@dataclass(frozen=True, slots=True)
class GGUFVariant:
    """What the name of a GGUF architecture implies. Biases are where the file has tensors for them."""

    qk_norm: bool
    interleaved_rope: bool  # rows of Q and K are stored for a rotation of neighbours, not of halves


_GLM = HFVariant(
    "qkv_as_config",
    "never",
    qk_norm=False,
    sliding_window="never",
    default_head_dim=128,
    default_partial=0.5,
    joined=("gate_up_proj",),
    interleaved_rope=True,
)

_HYBRID = HFVariant(
    "as_config",
    "never",
    qk_norm=True,
    sliding_window="never",
    default_head_dim=256,
    default_partial=0.25,
    recurrent=True,
)

_HYBRID_EXPERTS = HFExperts(
    num_experts=512, top_k=10, inner_size=512, renormalises="unless_config", shared="gated", shared_size=512
)
_ALWAYS_NORMED = replace(_HYBRID_EXPERTS, num_experts=256, top_k=8, renormalises="always")

HF_ARCHITECTURES: Mapping[str, HFVariant] = {
    "LlamaForCausalLM": HFVariant("as_config", "as_config", qk_norm=False, sliding_window="never"),
    "MistralForCausalLM": HFVariant("never", "never", qk_norm=False, sliding_window="all_layers"),
    "Qwen2ForCausalLM": HFVariant("qkv", "never", qk_norm=False, sliding_window="by_layer"),
    "Qwen3ForCausalLM": HFVariant("as_config", "never", qk_norm=True, sliding_window="by_layer", default_head_dim=128),
    "SmolLM3ForCausalLM": HFVariant(
        "as_config",
        "as_config",
        qk_norm=False,
        sliding_window="by_layer",
        default_theta=2000000.0,
        default_tied=True,
        skips_rope=True,
    ),
    "GraniteForCausalLM": HFVariant("as_config", "as_config", qk_norm=False, sliding_window="never", multipliers=True),
    "Phi3ForCausalLM": HFVariant(  # Phi-4's too
        "never", "never", qk_norm=False, sliding_window="all_layers", joined=("qkv_proj", "gate_up_proj")
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms_behind=True),
    "MixtralForCausalLM": HFVariant(
        "never",
        "never",
        qk_norm=False,
        sliding_window="all_layers",
        default_theta=1000000.0,
        experts=HFExperts(num_experts=8, top_k=2, renormalises="always"),
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

GGUF_ARCHITECTURES: Mapping[str, GGUFVariant] = {
    "llama": GGUFVariant(qk_norm=False, interleaved_rope=True),  # Mistral's too
    "qwen2": GGUFVariant(qk_norm=False, interleaved_rope=False),
    "qwen3": GGUFVariant(qk_norm=True, interleaved_rope=False),
}


def find_hf_variant(names: Sequence[str], others: Collection[str] = ()) -> tuple[str, HFVariant]:
    """The first supported architecture of config.json's list, and its variant. `others` are supported elsewhere."""
    for name in names:
        if name in HF_ARCHITECTURES:
            return name, HF_ARCHITECTURES[name]
    unsupported = _unsupported(", ".join(map(str, names)) or "(none is named)", [*HF_ARCHITECTURES, *others])
    raise ModelError(f"{unsupported}. --model-impl transformers may run others")


def find_gguf_variant(name: str) -> GGUFVariant:
    if name not in GGUF_ARCHITECTURES:
        raise _unsupported(name, GGUF_ARCHITECTURES)
    return GGUF_ARCHITECTURES[name]


def _unsupported(name: str, supported: Collection[str]) -> ModelError:
    return ModelError(f"architecture {name} is not supported; supported are {', '.join(supported)}")
