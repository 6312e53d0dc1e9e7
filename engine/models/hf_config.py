"""config.json of a Hugging Face checkpoint → DecoderConfig, with the defaults of the transformers library."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from bequest.engine.errors import ModelError
from bequest.engine.models.config import (
    DecoderConfig,
    RopeConfig,
    extended_max_position,
    parse_activation,
    parse_rope_kind,
)
from bequest.engine.models.fields import Fields
from bequest.engine.models.hf_experts import COUNT_NAMES, parse_hf_experts
from bequest.engine.models.hf_recurrent import parse_recurrent, text_part
from bequest.engine.models.registry import HFVariant, find_hf_variant

_OLD_ROPE_KINDS = {"su": "longrope"}

# Fields that change what a model computes in ways this decoder does not, with the values that change nothing.
UNSUPPORTED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "query_pre_attn_scalar": (),
    "logit_scale": (1,),
    "attention_chunk_size": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "parallel_attn": (False,),
    "rope_interleaved": (False,),
}

# The same of variants without multipliers.
_MULTIPLIERS: Mapping[str, tuple[object, ...]] = {
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
}


# The same of variants without experts.
_EXPERTS: Mapping[str, tuple[object, ...]] = dict.fromkeys(COUNT_NAMES, (0,))


def parse_hf_config(
    values: Mapping[str, object], source: str = "config.json", *, others: Collection[str] = ()
) -> DecoderConfig:
    """`others` are the architectures that somebody else parses; an error names them too."""
    fields = Fields(values, source)
    architecture, variant = find_hf_variant([str(name) for name in fields.list_of("architectures")], others)
    if variant.recurrent:
        fields = text_part(values, source)
    _refuse_unsupported(fields, variant)
    if not variant.skips_rope and fields.raw("no_rope_layers", None):
        raise ModelError(f"{source} asks for what {architecture} has not: no_rope_layers")

    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if num_heads < 1:
        raise ModelError(f"{source}: num_attention_heads must be positive, not {num_heads}")
    max_position = fields.integer("max_position_embeddings")
    rope = parse_hf_rope(fields, max_position, variant.default_theta, variant.default_partial)
    unrotated = _unrotated_layers(fields) if variant.skips_rope else frozenset()
    biased = fields.boolean("attention_bias", False) and variant.attention_bias == "as_config"
    qkv_biased = variant.attention_bias == "qkv_as_config" and fields.boolean("attention_bias", True)
    qkv_biased |= variant.attention_bias == "qkv_bias" and fields.boolean("qkv_bias", True)
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", variant.default_head_dim or hidden_size // num_heads),
        # A model all of whose layers have experts may say nothing of others.
        intermediate_size=fields.integer("intermediate_size", fields.integer("moe_intermediate_size", 0) or None),
        vocab_size=fields.integer("vocab_size"),
        max_position=extended_max_position(max_position, rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        sliding_windows=_sliding_windows(fields, variant, unrotated),
        activation=parse_activation(fields.string("hidden_act", "silu"), source),
        attention_bias=biased or qkv_biased or variant.attention_bias == "qkv",
        attention_output_bias=biased,
        mlp_bias=fields.boolean("mlp_bias", False) and variant.mlp_bias == "as_config",
        qk_norm=variant.qk_norm,
        norms_behind=variant.norms_behind,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", variant.default_tied),
        embedding_factor=fields.number("embedding_multiplier", 1.0),
        residual_factor=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
        score_scale=fields.number("attention_multiplier", 1.0) if variant.multipliers else None,
        unrotated_layers=unrotated,
        experts=None if variant.experts is None else parse_hf_experts(fields, variant.experts),
        attention_gate=variant.recurrent,
        recurrent=parse_recurrent(fields) if variant.recurrent else None,
    )


def parse_hf_rope(
    fields: Fields, max_position: int, default_theta: float = 10000.0, default_partial: float = 1.0
) -> RopeConfig:
    """Newer files hold one `rope_parameters` object; older ones `rope_theta` beside `rope_scaling`, whose `rope_type`
    was once called `type`."""
    scaling = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = scaling.number("rope_theta", fields.number("rope_theta", default_theta))
    partial_factor = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", default_partial))
    named = scaling.string("rope_type", scaling.string("type", "default"))
    kind = parse_rope_kind(_OLD_ROPE_KINDS.get(named, named), scaling.source)
    for name in ("mrope_section", "full_attention", "sliding_attention"):
        if scaling.has(name):
            raise ModelError(f"{scaling.source}: {name} is not supported; all layers must rotate alike")
    if kind == "default":
        return RopeConfig(theta, partial_factor=partial_factor)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta, kind, partial_factor, factor=scaling.number("factor"))

    # A length beside the rope object wins over the one inside it: a few models were saved with both.
    original = fields.integer(
        "original_max_position_embeddings", scaling.integer("original_max_position_embeddings", max_position)
    )
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            partial_factor,
            factor=scaling.number("factor"),
            original_max_position=original,
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
        )
    factor = scaling.number("factor", max_position / original)
    if kind == "longrope":
        return RopeConfig(
            theta,
            kind,
            partial_factor,
            factor=factor,
            original_max_position=original,
            attention_factor=_longrope_attention_factor(scaling, factor, original),
            short_divisors=scaling.numbers("short_factor"),
            long_divisors=scaling.numbers("long_factor"),
        )
    return RopeConfig(
        theta,
        kind,
        partial_factor,
        factor=factor,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
        truncate=scaling.boolean("truncate", True),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _longrope_attention_factor(scaling: Fields, factor: float, original: int) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    numerator, denominator = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if numerator and denominator:
        return magnitude(numerator) / magnitude(denominator)
    return magnitude(1.0)


def _unrotated_layers(fields: Fields) -> frozenset[int]:
    """Those that `no_rope_layers` has a 0 for, or every fourth."""
    num_layers = fields.integer("num_hidden_layers")
    flags = fields.raw("no_rope_layers", None)
    if flags is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        if interval < 1:
            raise ModelError(f"{fields.source}: no_rope_layer_interval must be positive, not {interval}")
        return frozenset(range(interval - 1, num_layers, interval))
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise ModelError(f"{fields.source}: no_rope_layers must be a list of {num_layers} zeros and ones")
    return frozenset(layer for layer, flag in enumerate(flags) if not flag)


def _sliding_windows(fields: Fields, variant: HFVariant, unrotated: frozenset[int]) -> tuple[int, ...]:
    """[L] window of each layer, 0 for none."""
    num_layers = fields.integer("num_hidden_layers")
    full = (0,) * num_layers
    if variant.sliding_window == "never" or not fields.has("sliding_window"):
        return full
    window = fields.integer("sliding_window")
    if variant.sliding_window == "all_layers":
        return (window,) * num_layers
    if not fields.boolean("use_sliding_window", False):
        return full
    if variant.sliding_window == "all_if_used":
        return (window,) * num_layers
    if not fields.has("layer_types") and variant.skips_rope:
        return tuple(window if layer in unrotated else 0 for layer in range(num_layers))
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28)
        if variant.sliding_window == "every_other":
            return tuple(window if layer < first and layer % 2 == 0 else 0 for layer in range(num_layers))
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    window_of = {"full_attention": 0, "sliding_attention": window}
    types = [str(kind) for kind in fields.list_of("layer_types")]
    if unknown := sorted({*types} - window_of.keys()):
        raise ModelError(f"{fields.source}: layer_types {', '.join(unknown)} are not supported")
    return tuple(window_of[kind] for kind in types)


def _refuse_unsupported(fields: Fields, variant: HFVariant) -> None:
    refused = dict(UNSUPPORTED_FIELDS)
    refused |= {} if variant.multipliers else _MULTIPLIERS
    refused |= {} if variant.experts else _EXPERTS
    found = [
        f"{name} = {fields.raw(name)!r}"
        for name, harmless in refused.items()
        if fields.has(name) and fields.raw(name) not in harmless
    ]
    if found:
        raise ModelError(f"{fields.source} asks for what is not supported: {'; '.join(found)}")
    described = fields.raw("quantization_config", None)
    if described and not _quantises_only_the_cache(described):
        raise ModelError(
            f"{fields.source}: the weights are quantised ({_method(described)}), which is not supported in this "
            "format; take the model's original weights, or a .gguf file of it"
        )


def _method(described: object) -> str:
    """What a `quantization_config` calls itself, and to how many bits."""
    if not isinstance(described, Mapping):
        return "by an unknown method"
    name = described.get("quant_method") or described.get("quant_algo") or "by an unknown method"
    bits = described.get("bits") or described.get("w_bit")
    return f"{name}, {bits} bits" if isinstance(bits, int) else str(name)


def _quantises_only_the_cache(description: object) -> bool:
    """Whether a config.json's `quantization_config` leaves the weights alone and has an fp8 cache of static scales."""
    if not isinstance(description, Mapping):
        return False
    if description.get("config_groups") or description.get("quant_algo") not in (None, "", "NO_QUANT"):
        return False
    scheme = description.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return (
            scheme.get("type") == "float"
            and scheme.get("num_bits") == 8
            and scheme.get("strategy", "tensor") == "tensor"
            and not scheme.get("dynamic")
            and scheme.get("symmetric", True) is True
        )
    return description.get("kv_cache_quant_algo") == "FP8"
