"""The decoder architectures of GGUF files: what the name of each implies beyond the file's metadata. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from bequest.engine.models.registry import unsupported
from bequest.engine.models.style import COHERE, GEMMA, GEMMA2, GEMMA4, GLM4, LLAMA, OLMO2, OLMOE, LayerStyle
from bequest.engine.types.activation import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFRope:
    """What the name of a GGUF architecture implies for the rotary embedding."""

    skipped: Literal["never", "fourth", "full"] = "never"  # layers without it: every fourth, or those that see all
    window_theta: float | None = None  # of layers with a window; None: that of the others
    unscaled_windows: bool = False  # layers with a window turn as if positions were not scaled
    truncates_yarn: bool = True  # to whole dimensions, at the ends of its ramp
    whole_yarn_factor: bool = False  # the factor of a file is all that cos and sin are multiplied by


@dataclass(frozen=True, slots=True)
class GGUFVariant:
    """What the name of a GGUF architecture implies. Biases are where the file has tensors for them."""

    qk_norm: bool
    interleaved_rope: bool  # rows of Q and K are stored for a rotation of neighbours, not of halves
    style: LayerStyle = LLAMA
    activation: Activation = "silu"
    scales_embedding: bool = False  # by the root of the hidden size
    full_every: int = 0  # every so many layers see all, the others have a window; 0: all layers are alike
    rope: GGUFRope = GGUFRope()
    shared_scale_layers: int = 0  # with so many layers scores are scaled by the hidden size's share of a head
    joined: tuple[str, ...] = ()  # matrices that hold several of ours (respelled.py)
    defaults: Mapping[str, object] = field(default_factory=dict)  # of keys that others may not have
    renormalises_experts: bool | None = None  # None: it has no experts
    norm_before_mlp: str = "ffn_norm"  # its name; some files call it after the attention that it follows
    sinks: bool = False  # heads have a score that takes its share of attention and gives nothing
    # Some layers are recurrent: their value heads are in the order of checkpoints, or in turns (gguf_hybrids.py).
    recurrent: Literal["no", "in_order", "in_turns"] = "no"
    gemma4: bool = False  # its files have what Gemma 4's alone have (gguf_gemma4.py)


_GGUF_GEMMA = replace(GEMMA2, norm_offset=0.0)  # the converter has added it

_GGUF_HYBRID = GGUFVariant(
    qk_norm=True,
    interleaved_rope=False,
    norm_before_mlp="post_attention_norm",
    recurrent="in_turns",
    # Of positions in a picture: those of a text are the same on all axes.
    defaults={"rope.dimension_sections": None, "nextn_predict_layers": 0},
)

GGUF_ARCHITECTURES: Mapping[str, GGUFVariant] = {
    # Mistral's and Mixtral's too
    "llama": GGUFVariant(qk_norm=False, interleaved_rope=True, renormalises_experts=True),
    # Ministral 3's
    "mistral3": GGUFVariant(
        qk_norm=False,
        interleaved_rope=True,
        renormalises_experts=True,
        defaults={"attention.temperature_scale": 0.0, "rope.scaling.yarn_log_multiplier": 0.0},
    ),
    "qwen2": GGUFVariant(qk_norm=False, interleaved_rope=False),
    "qwen3": GGUFVariant(qk_norm=True, interleaved_rope=False),
    "phi3": GGUFVariant(qk_norm=False, interleaved_rope=False, joined=("qkv_proj", "gate_up_proj")),  # Phi-4's too
    "glm4": GGUFVariant(qk_norm=False, interleaved_rope=True, style=GLM4, joined=("gate_up_proj",)),
    # GLM-4.5's; norms of queries and keys are where the file has tensors for them
    "glm4moe": GGUFVariant(
        qk_norm=False,
        interleaved_rope=False,
        norm_before_mlp="post_attention_norm",
        renormalises_experts=True,
        defaults={"expert_gating_func": 2, "nextn_predict_layers": 0},
    ),
    # OLMo 3's too, which has windows
    "olmo2": GGUFVariant(
        qk_norm=True,
        interleaved_rope=False,
        style=OLMO2,
        full_every=4,
        rope=GGUFRope(unscaled_windows=True, whole_yarn_factor=True),
        defaults={"attention.sliding_window": 0, "attention.sliding_window_pattern": None},
    ),
    "gemma": GGUFVariant(
        qk_norm=False,
        interleaved_rope=False,
        style=replace(GEMMA, norm_offset=0.0),
        activation="gelu_tanh",
        scales_embedding=True,
    ),
    "gemma2": GGUFVariant(
        qk_norm=False,
        interleaved_rope=False,
        style=_GGUF_GEMMA,
        activation="gelu_tanh",
        scales_embedding=True,
        full_every=2,
        shared_scale_layers=46,  # the 27B
        defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096},
    ),
    "gemma3": GGUFVariant(
        qk_norm=True,
        interleaved_rope=False,
        style=_GGUF_GEMMA,
        activation="gelu_tanh",
        scales_embedding=True,
        full_every=6,
        rope=GGUFRope(window_theta=10000.0),
        shared_scale_layers=62,  # the 27B
        defaults={"final_logit_softcapping": 0.0, "rope.freq_base": 1000000.0},
    ),
    "gemma4": GGUFVariant(
        qk_norm=True,
        interleaved_rope=False,
        style=GEMMA4,
        activation="gelu_tanh",
        scales_embedding=True,
        full_every=6,
        renormalises_experts=True,
        defaults={"attention.scale": 1.0, "attention.sliding_window_pattern": None, "final_logit_softcapping": 30.0},
        gemma4=True,
    ),
    "granite": GGUFVariant(
        qk_norm=False,
        interleaved_rope=True,
        defaults={"attention.scale": None, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0},
    ),
    "smollm3": GGUFVariant(qk_norm=False, interleaved_rope=True, rope=GGUFRope(skipped="fourth")),
    "command-r": GGUFVariant(qk_norm=False, interleaved_rope=True, style=COHERE, defaults={"logit_scale": 1.0}),
    "cohere2": GGUFVariant(
        qk_norm=False,
        interleaved_rope=True,
        style=COHERE,
        full_every=4,
        rope=GGUFRope(skipped="full"),
        defaults={"logit_scale": 1.0},
    ),
    "gpt-oss": GGUFVariant(
        qk_norm=False,
        interleaved_rope=False,
        activation="clamped_swish",
        full_every=2,
        renormalises_experts=True,
        norm_before_mlp="post_attention_norm",
        sinks=True,
        rope=GGUFRope(truncates_yarn=False),
    ),
    "qwen2moe": GGUFVariant(qk_norm=False, interleaved_rope=False, renormalises_experts=False),
    "olmoe": GGUFVariant(qk_norm=True, interleaved_rope=False, renormalises_experts=False, style=OLMOE),
    "qwen3next": replace(_GGUF_HYBRID, recurrent="in_order", renormalises_experts=True),
    "qwen35": _GGUF_HYBRID,
    "qwen35moe": replace(_GGUF_HYBRID, renormalises_experts=True),
    "qwen3moe": GGUFVariant(qk_norm=True, interleaved_rope=False, renormalises_experts=True),
}


def find_gguf_variant(name: str) -> GGUFVariant:
    if name not in GGUF_ARCHITECTURES:
        raise unsupported(name, GGUF_ARCHITECTURES)
    return GGUF_ARCHITECTURES[name]
