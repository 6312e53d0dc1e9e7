"""Metadata of a GGUF file → DecoderConfig, read as llama.cpp reads it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from bequest.engine.errors import ModelError
from bequest.engine.formats.gguf_file import GGUFFile
from bequest.engine.models.config import DecoderConfig, RopeConfig, extended_max_position, parse_rope_kind
from bequest.engine.models.fields import Fields
from bequest.engine.models.gguf_experts import parse_gguf_experts
from bequest.engine.models.gguf_gemma4 import gemma4_fields, parse_gguf_gemma4, parse_gguf_gemma4_ropes
from bequest.engine.models.gguf_hybrids import parse_gguf_recurrent
from bequest.engine.models.gguf_registry import GGUFVariant, find_gguf_variant

# Keys below the architecture's name that change what a model computes in ways this decoder does not, unless 0 or 1.
UNSUPPORTED_KEYS = (
    "expert_group_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "attention.sliding_window_pattern",
    "attention.temperature_scale",
    "attention.max_alibi_bias",
    "router_logit_softcapping",
    "rope.dimension_sections",
    "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
)

# The same of keys for which 0 or 1 is not the usual value.
_USUAL = {
    "attention.causal": True,
    "use_parallel_residual": False,
    "attention.clamp_kqv": 0,
    "rope.scaling.yarn_ext_factor": 1,
}

_MOST_LAYERS = 10_000  # a file that says more is broken


def parse_gguf_config(file: GGUFFile) -> DecoderConfig:
    architecture = file.architecture
    _refuse_parts(file)
    variant = find_gguf_variant(architecture)
    prefix = architecture + "."
    given = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    stored = Fields({**variant.defaults, **given}, f"{file.path}: {architecture}")
    fields = gemma4_fields(stored) if variant.gemma4 else stored
    _refuse_unsupported(fields, variant)
    experts = parse_gguf_experts(file, fields, variant)

    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    if num_heads < 1:
        raise ModelError(f"{fields.source}: attention.head_count must be positive, not {num_heads}")
    num_layers = _num_layers(fields)
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{fields.source}: attention.value_length other than attention.key_length is not supported")
    windows = _windows(fields, variant, num_layers)
    rope, window_rope = (
        parse_gguf_gemma4_ropes(file, stored) if variant.gemma4 else _parse_ropes(file, fields, head_dim, variant)
    )
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length", experts.intermediate_size if experts else None),
        experts=experts,
        vocab_size=_vocab_size(file),
        max_position=_max_position(fields, rope, scales=window_rope is None),
        rms_norm_eps=fields.number(f"attention.layer_norm_{'' if variant.style.centred else 'rms_'}epsilon"),
        rope=rope,
        window_rope=window_rope,
        sliding_windows=windows,
        activation=variant.activation,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=variant.qk_norm or "blk.0.attn_q_norm.weight" in file.tensors,
        style=variant.style,
        attention_cap=fields.number("attn_logit_softcapping", 0.0),
        logits_cap=fields.number("final_logit_softcapping", 0.0),
        embedding_factor=hidden_size**0.5 if variant.scales_embedding else fields.number("embedding_scale", 1.0),
        rounds_embedding_factor=variant.scales_embedding,
        residual_factor=fields.number("residual_scale", 1.0),
        logits_divisor=_logits_divisor(fields, variant),
        score_scale=_score_scale(fields, variant, hidden_size / num_heads),
        sinks=variant.sinks,
        unrotated_layers=_unrotated_layers(variant, windows),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_gate=variant.recurrent != "no",
        recurrent=None if variant.recurrent == "no" else parse_gguf_recurrent(fields, num_layers),
        gemma4=parse_gguf_gemma4(file, stored) if variant.gemma4 else None,
    )


def _max_position(fields: Fields, rope: RopeConfig, *, scales: bool) -> int:
    context_length = fields.integer("context_length")
    return extended_max_position(context_length, rope) if scales else context_length


def _windows(fields: Fields, variant: GGUFVariant, num_layers: int) -> tuple[int, ...]:
    if not variant.full_every:
        return (fields.integer("attention.sliding_window", 0),) * num_layers
    window = fields.integer("attention.sliding_window")
    if not fields.has("attention.sliding_window_pattern"):
        return tuple(window if layer % variant.full_every else 0 for layer in range(1, num_layers + 1))
    pattern = np.asarray(fields.raw("attention.sliding_window_pattern"))
    if pattern.shape != (num_layers,) or not set(pattern.tolist()) <= {0, 1}:
        raise ModelError(f"{fields.source}: attention.sliding_window_pattern must have true or false for each layer")
    return tuple(window if has_window else 0 for has_window in pattern.tolist())


def _parse_ropes(
    file: GGUFFile, fields: Fields, head_dim: int, variant: GGUFVariant
) -> tuple[RopeConfig, RopeConfig | None]:
    rope = _growing(_parse_rope(file, fields, head_dim, fields.integer("context_length"), variant), fields)
    return rope, _window_rope(rope, fields, variant)


def _growing(rope: RopeConfig, fields: Fields) -> RopeConfig:
    """With queries that grow behind the length in training, if the file says so."""
    growth = fields.number("attention.temperature_scale", 0.0)
    if not growth:
        return rope
    original = fields.integer("rope.scaling.original_context_length")
    if original < 1:
        raise ModelError(f"{fields.source}: rope.scaling.original_context_length must be positive, not {original}")
    return replace(rope, query_growth=growth, original_max_position=original)


def _window_rope(rope: RopeConfig, fields: Fields, variant: GGUFVariant) -> RopeConfig | None:
    """None: layers with a window turn as the others do."""
    theta = fields.number("rope.freq_base_swa", variant.rope.window_theta or rope.theta)
    if variant.rope.window_theta:
        return RopeConfig(theta)
    if variant.rope.unscaled_windows and rope.kind != "default":
        return RopeConfig(theta, partial_factor=rope.partial_factor)
    return None if theta == rope.theta else replace(rope, theta=theta)


def _unrotated_layers(variant: GGUFVariant, windows: tuple[int, ...]) -> frozenset[int]:
    match variant.rope.skipped:
        case "fourth":
            return frozenset(range(3, len(windows), 4))
        case "full":
            return frozenset(layer for layer, window in enumerate(windows) if not window)
        case "never":
            return frozenset()


def _logits_divisor(fields: Fields, variant: GGUFVariant) -> float:
    """Granite's logits are divided by their scale, Cohere's multiplied."""
    scale = fields.number("logit_scale", 1.0)
    if scale <= 0:
        raise ModelError(f"{fields.source}: logit_scale must be positive, not {scale}")
    return 1.0 / scale if variant.style.parallel else scale


def _score_scale(fields: Fields, variant: GGUFVariant, share: float) -> float | None:
    """None: by the size of a head. A model may leave a head more dimensions than its `share` of the hidden size."""
    if variant.shared_scale_layers == fields.integer("block_count"):
        return float(share**-0.5)
    return fields.number("attention.scale") if fields.has("attention.scale") else None


def _vocab_size(file: GGUFFile) -> int:
    """The embedding's rows: `vocab_size` is left out by many writers, and the matrix is what is looked up."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight")
    return embedding.shape[0]


def _parse_rope(file: GGUFFile, fields: Fields, head_dim: int, context_length: int, variant: GGUFVariant) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    partial_factor = fields.integer("rope.dimension_count", head_dim) / head_dim
    divisors: tuple[float, ...] = ()
    if (tensor := file.tensors.get("rope_freqs.weight")) is not None:
        divisors = tuple(tensor.load().tolist())
        if len(divisors) != int(head_dim * partial_factor) // 2:
            raise ModelError(f"{file.path}: rope_freqs.weight has {len(divisors)} values for heads of {head_dim}")
    if "rope_factors_long.weight" in file.tensors:
        return _parse_longrope(file, fields, RopeConfig(theta, "longrope", partial_factor))
    # The first writers had one key for linear scaling.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    name = fields.string("rope.scaling.type", "linear" if fields.has("rope.scale_linear") else "none")
    kind = "default" if name == "none" else parse_rope_kind(name, fields.source)
    if kind == "default":
        return RopeConfig(theta, partial_factor=partial_factor, frequency_divisors=divisors)
    if kind == "linear":
        return RopeConfig(theta, kind, partial_factor, factor=factor, frequency_divisors=divisors)
    if kind != "yarn":
        raise ModelError(f"{fields.source}: rope.scaling.type {kind!r} is not known in a GGUF file")
    return RopeConfig(
        theta,
        kind,
        partial_factor,
        factor=factor,
        original_max_position=fields.integer("rope.scaling.original_context_length", context_length),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        truncate=variant.rope.truncates_yarn,
        attention_factor=_yarn_attention_factor(fields, factor, variant),
        frequency_divisors=divisors,
    )


def _yarn_attention_factor(fields: Fields, factor: float, variant: GGUFVariant) -> float:
    def magnitude_of(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    # A multiplier of 0 is none, and the divisor 1.
    magnitude = magnitude_of(1.0) / magnitude_of(fields.number("rope.scaling.yarn_log_multiplier", 0.0))
    names = ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor")
    given = next((fields.number(name) for name in names if fields.has(name)), None)
    if given is None:
        return magnitude
    return given if variant.rope.whole_yarn_factor else given * magnitude


def _parse_longrope(file: GGUFFile, fields: Fields, rope: RopeConfig) -> RopeConfig:
    """By two tensors, for contexts up to the length in training and for longer ones."""
    short, long = (file.tensors.get(f"rope_factors_{name}.weight") for name in ("short", "long"))
    if short is None or long is None:
        raise ModelError(f"{file.path} lacks the tensor rope_factors_short.weight")
    return replace(
        rope,
        original_max_position=fields.integer("rope.scaling.original_context_length"),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
        short_divisors=tuple(short.load().tolist()),
        long_divisors=tuple(long.load().tolist()),
    )


def _num_layers(fields: Fields) -> int:
    """Without those that draft tokens."""
    count = fields.integer("block_count")
    if not 0 < count <= _MOST_LAYERS:
        raise ModelError(f"{fields.source}: block_count must be from 1 to {_MOST_LAYERS}, not {count}")
    return count - fields.integer("nextn_predict_layers", 0)


def _refuse_unsupported(fields: Fields, variant: GGUFVariant) -> None:
    names = UNSUPPORTED_KEYS if variant.renormalises_experts is not None else (*UNSUPPORTED_KEYS, "expert_count")
    found = [
        f"{name} = {fields.raw(name)!r}"
        for name in names
        if name not in variant.defaults
        and fields.has(name)
        and not (isinstance(fields.raw(name), (int, float)) and fields.raw(name) in (0, 1))
    ]
    found += [f"{name} = {fields.raw(name)!r}" for name, usual in _USUAL.items() if fields.raw(name, usual) != usual]
    if found:
        raise ModelError(f"{fields.source} asks for what is not supported: {'; '.join(found)}")


def _refuse_parts(file: GGUFFile) -> None:
    count = Fields(file.metadata, str(file.path)).integer("split.count", 1)
    if count > 1:
        raise ModelError(
            f"{file.path} is one of {count} parts of a model (split.count): join them first, as llama-gguf-split "
            "--merge does"
        )
