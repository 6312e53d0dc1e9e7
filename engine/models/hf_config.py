"""config.json of a Hugging Face checkpoint → DecoderConfig, with the defaults of the transformers library."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bequest.engine.errors import ModelError
from bequest.engine.models.config import (
    Activation,
    DecoderConfig,
    RopeConfig,
    extended_max_position,
    parse_activation,
)
from bequest.engine.models.experts_config import ExpertsConfig
from bequest.engine.models.fields import Fields
from bequest.engine.models.hf_experts import COUNT_NAMES, parse_hf_experts
from bequest.engine.models.hf_gemma4 import gemma4_fields, parse_gemma4, parse_gemma4_experts
from bequest.engine.models.hf_layer_types import sliding_windows, unrotated_layers
from bequest.engine.models.hf_recurrent import parse_recurrent, text_part
from bequest.engine.models.hf_rope import parse_hf_ropes
from bequest.engine.models.quantised.described import Quantisation, parse_quantisation
from bequest.engine.models.registry import HFVariant, find_hf_variant

# Fields that change what a model computes in ways this decoder does not, with the values that change nothing. A variant
# may honour some.
UNSUPPORTED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "query_pre_attn_scalar": (),
    "logit_scale": (1,),
    "attention_chunk_size": (),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "num_kv_shared_layers": (0,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "clip_qkv": (),
    "parallel_attn": (False,),
    "use_parallel_block": (True,),
    "use_gated_activation": (True,),
    "rotary_pct": (1,),
    "rope_interleaved": (False,),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "swiglu_alpha": (),
    "swiglu_limit": (),
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
    fields = _with_defaults(fields, variant)
    _refuse_unsupported(fields, variant)
    if variant.rope.skipped != "listed" and fields.raw("no_rope_layers", None):
        raise ModelError(f"{source} asks for what {architecture} has not: no_rope_layers")

    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if num_heads < 1:
        raise ModelError(f"{source}: num_attention_heads must be positive, not {num_heads}")
    max_position = fields.integer("max_position_embeddings")
    rope, window_rope = _ropes(fields, max_position, variant, hidden_size // num_heads)
    windows = sliding_windows(fields, variant)
    biased = fields.boolean("attention_bias", False) and variant.attention_bias == "as_config"
    qkv_biased = variant.attention_bias == "qkv_as_config" and fields.boolean("attention_bias", True)
    qkv_biased |= variant.attention_bias == "qkv_bias" and fields.boolean("qkv_bias", True)
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        # A model all of whose layers have experts may say nothing of others.
        intermediate_size=fields.integer("intermediate_size", fields.integer("moe_intermediate_size", 0) or None),
        vocab_size=fields.integer("vocab_size"),
        max_position=max_position if window_rope is not None else extended_max_position(max_position, rope),
        rms_norm_eps=fields.number("layer_norm_eps" if variant.style.centred else "rms_norm_eps", 1e-6),
        rope=rope,
        window_rope=window_rope,
        sliding_windows=windows,
        activation=_activation(fields, variant),
        attention_bias=biased or qkv_biased or variant.attention_bias == "qkv",
        attention_output_bias=biased,
        mlp_bias=fields.boolean("mlp_bias", False) and variant.mlp_bias == "as_config",
        qk_norm=variant.qk_norm or ("use_qk_norm" in variant.honoured and fields.boolean("use_qk_norm", False)),
        style=variant.style,
        attention_cap=fields.number("attn_logit_softcapping", 0.0),
        logits_cap=fields.number("final_logit_softcapping", 0.0),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        embedding_factor=hidden_size**0.5 if variant.scales_embedding else fields.number("embedding_multiplier", 1.0),
        rounds_embedding_factor=variant.scales_embedding,
        residual_factor=fields.number("residual_multiplier", 1.0),
        logits_divisor=_logits_divisor(fields),
        score_scale=_score_scale(fields, variant),
        sinks=variant.sinks,
        unrotated_layers=unrotated_layers(fields, variant, windows),
        experts=_experts(fields, variant),
        attention_gate=variant.recurrent,
        recurrent=parse_recurrent(fields) if variant.recurrent else None,
        quantisation=_quantisation(fields, variant),
        gemma4=parse_gemma4(fields, windows) if variant.gemma4 else None,
    )


def _ropes(fields: Fields, max_position: int, variant: HFVariant, share: int) -> tuple[RopeConfig, RopeConfig | None]:
    """`share`: dimensions of a head, where config.json does not say."""
    rope, window_rope = parse_hf_ropes(fields, max_position, variant)
    head_dim = fields.integer("head_dim", share)
    turned = rope.turned(head_dim)
    if rope.partial_factor != 1.0 and (turned < 2 or turned % 2):
        raise ModelError(
            f"{fields.source}: partial_rotary_factor = {rope.partial_factor:g} turns {turned} of head_dim = {head_dim} "
            "dimensions, which must be an even number above 0"
        )
    return rope, window_rope


def _experts(fields: Fields, variant: HFVariant) -> ExpertsConfig | None:
    if variant.gemma4:
        return parse_gemma4_experts(fields)
    return None if variant.experts is None else parse_hf_experts(fields, variant.experts)


def _with_defaults(fields: Fields, variant: HFVariant) -> Fields:
    """Of the text model alone, where config.json is of one with other parts."""
    given = _text_values(fields, variant) if variant.part_of else fields.values
    whole = Fields({**variant.defaults, **given}, fields.source)
    return gemma4_fields(whole) if variant.gemma4 else whole


def _text_values(fields: Fields, variant: HFVariant) -> dict[str, object]:
    section, types = fields.section("text_config"), variant.part_of
    kind = section.string("model_type", next(iter(types)))
    if kind not in types:
        raise ModelError(f"{section.source}: model_type {kind!r} is not supported here; {', '.join(types)} are")
    # What the whole model says of these, or leaves out, counts more: its section has the defaults of a text model that
    # stands alone.
    whole = {"tie_word_embeddings": fields.raw("tie_word_embeddings", True)}
    if fields.has("quantization_config"):
        whole["quantization_config"] = fields.raw("quantization_config")
    return {**types[kind], **section.values, **whole}


def _activation(fields: Fields, variant: HFVariant) -> Activation:
    if variant.experts is not None and variant.experts.interleaved:
        return _clamped(fields)
    if "hidden_activation" in variant.defaults:
        return parse_activation(fields.string("hidden_activation"), fields.source)
    name = fields.string("hidden_act", "silu")
    if name == "gelu" and variant.scales_embedding:
        name = "gelu_pytorch_tanh"  # which the first Gemma's files mean
    return parse_activation(name, fields.source)


def _clamped(fields: Fields) -> Activation:
    """Gpt-oss', whose kernels have these numbers."""
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if (given := fields.number(name, value)) != value:
            raise ModelError(
                f"{fields.source}: {name} must be {value}, not {given}; model_impl=transformers may run it"
            )
    return "clamped_swish"


def _score_scale(fields: Fields, variant: HFVariant) -> float | None:
    """None: by the size of a head."""
    if variant.gemma4:
        return 1.0
    if "attention_multiplier" in variant.honoured:
        return fields.number("attention_multiplier", 1.0)
    if "query_pre_attn_scalar" in variant.honoured:
        scalar = fields.number("query_pre_attn_scalar")
        if scalar <= 0:
            raise ModelError(f"{fields.source}: query_pre_attn_scalar must be positive, not {scalar}")
        return float(scalar**-0.5)
    return None


def _logits_divisor(fields: Fields) -> float:
    scale = fields.number("logit_scale", 1.0)
    if scale <= 0:
        raise ModelError(f"{fields.source}: logit_scale must be positive, not {scale}")
    return fields.number("logits_scaling", 1.0) / scale


def _refuse_unsupported(fields: Fields, variant: HFVariant) -> None:
    refused = {name: UNSUPPORTED_FIELDS[name] for name in UNSUPPORTED_FIELDS if name not in variant.honoured}
    refused |= {} if variant.experts else _EXPERTS
    found = [
        f"{name} = {fields.raw(name)!r}"
        for name, harmless in refused.items()
        if fields.has(name) and fields.raw(name) not in harmless
    ]
    if found:
        asked = "; ".join(found)
        raise ModelError(f"{fields.source} asks for what is not supported: {asked}. model_impl=transformers may run it")


def _quantisation(fields: Fields, variant: HFVariant) -> Quantisation | None:
    """How matrices are stored in codes; None: they are in numbers, or in MXFP4 as gpt-oss has it."""
    described = fields.section("quantization_config")
    in_mxfp4 = variant.experts is not None and variant.experts.interleaved
    if in_mxfp4 and described.raw("quant_method") == "mxfp4":
        return None
    if not described.values or _quantises_only_the_cache(described.values):
        return None
    return parse_quantisation(described)


def _quantises_only_the_cache(description: Mapping[str, object]) -> bool:
    """Whether a config.json's `quantization_config` leaves the weights alone and has an fp8 cache of static scales."""
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
