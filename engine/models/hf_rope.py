"""The rotary embedding as a config.json of Hugging Face describes it, in its old and new spellings. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from bequest.engine.errors import ModelError
from bequest.engine.models.config import ROPE_KINDS, RopeConfig, parse_rope_kind
from bequest.engine.models.fields import Fields
from bequest.engine.models.registry import HFVariant

_OLD_ROPE_KINDS = {"su": "longrope"}


def parse_hf_ropes(fields: Fields, max_position: int, variant: HFVariant) -> tuple[RopeConfig, RopeConfig | None]:
    """That of layers that see all, and that of layers with a window, where it is another one.

    Newer files hold one `rope_parameters` object, or one for each type of layer; older ones `rope_theta` beside
    `rope_scaling`, and perhaps `rope_local_base_freq` for layers with a window. Of a file with both objects the older
    one counts, as in the transformers library."""
    is_new = fields.has("rope_parameters") and (variant.rope.by_type or not fields.raw("rope_scaling", None))
    if variant.rope.by_type:  # each says its own
        fields = Fields({**fields.values, "original_max_position_embeddings": None}, fields.source)
    scaling = fields.section("rope_parameters" if is_new else "rope_scaling")
    ropes: tuple[RopeConfig, RopeConfig | None]
    if not variant.rope.by_type:
        if variant.rope.named and not scaling.values:
            raise ModelError(f"{fields.source} lacks rope_parameters")
        ropes = _parse_rope(fields, scaling, max_position), None
    elif is_new:
        if not (scaling.has("full_attention") or scaling.has("sliding_attention")):
            raise ModelError(f"{scaling.source} must have full_attention and sliding_attention")
        ropes = (
            _parse_rope(fields, scaling.section("full_attention"), max_position),
            _parse_rope(fields, scaling.section("sliding_attention"), max_position, is_local=True),
        )
    else:
        _refuse_other_theta(fields, variant)
        local = Fields({}, fields.source)  # what is scaled are the other layers
        ropes = (
            _parse_rope(fields, scaling, max_position),
            _parse_rope(fields, local, max_position, is_local=True),
        )
    for rope in ropes:
        if rope is not None:
            _refuse_unknown_to(variant, rope, scaling.source)
    return ropes


def _refuse_unknown_to(variant: HFVariant, rope: RopeConfig, source: str) -> None:
    """What other architectures have, and this one's code overlooks."""
    is_named = rope.kind in variant.rope.kinds
    if rope.partial_factor != 1.0 and not (variant.rope.partial or (is_named and rope.kind == "proportional")):
        raise ModelError(f"{source}: partial_rotary_factor is not supported: this architecture turns whole heads")
    if rope.query_growth and not variant.rope.grows:
        raise ModelError(f"{source}: llama_4_scaling_beta is not supported: this architecture's queries do not grow")
    if variant.rope.by_type and not rope.truncate:  # transformers looks for it beside the objects, not in them
        raise ModelError(f"{source}: truncate must be true: this architecture's ramps end at whole dimensions")
    if not is_named and (variant.rope.kinds or rope.kind == "proportional"):
        kinds = ", ".join(variant.rope.kinds or (kind for kind in ROPE_KINDS if kind != "proportional"))
        raise ModelError(f"{source}: rope type {rope.kind!r} is not supported; this architecture has {kinds}")


def _refuse_other_theta(fields: Fields, variant: HFVariant) -> None:
    """An old file has one for all layers; newer readers take it for those that see all alone."""
    usual = variant.defaults.get("rope_theta")
    if "rope_local_base_freq" not in variant.defaults and fields.raw("rope_theta") != usual:
        raise ModelError(f"{fields.source}: rope_theta must be {usual}; say rope_parameters for each type of layer")


def _parse_rope(fields: Fields, scaling: Fields, max_position: int, *, is_local: bool = False) -> RopeConfig:
    """Of one object `scaling`; `is_local`: of layers with a window."""
    rope = _parse_turning(fields, scaling, max_position, is_local)
    growth = scaling.number("llama_4_scaling_beta", 0.0)
    if not growth:
        return rope
    original = scaling.integer("original_max_position_embeddings", 0)
    if original < 1 or rope.original_max_position not in (0, original):
        needed = "llama_4_scaling_beta needs one positive original_max_position_embeddings"
        raise ModelError(f"{scaling.source}: {needed}, not {original}")
    return replace(rope, query_growth=growth, original_max_position=original)


def _parse_turning(fields: Fields, scaling: Fields, max_position: int, is_local: bool) -> RopeConfig:
    """The object's `rope_type` was once called `type`."""
    theta = scaling.number("rope_theta", _outer_theta(fields, is_local))
    partial_factor = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    named = scaling.string("rope_type", scaling.string("type", "default"))
    kind = parse_rope_kind(_OLD_ROPE_KINDS.get(named, named), scaling.source)
    _refuse_unsupported(scaling)
    if kind == "default":
        return RopeConfig(theta, partial_factor=partial_factor)
    if kind == "proportional":
        return RopeConfig(theta, kind, partial_factor, factor=scaling.number("factor", 1.0))
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
    # Where both lengths are said, their ratio is the factor.
    is_said = kind == "longrope" or original != max_position
    factor = scaling.number("factor", max_position / original) if is_said else scaling.number("factor")
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


def _outer_theta(fields: Fields, is_local: bool) -> float:
    """Beside the object, which may have none."""
    theta = fields.number("rope_theta", 10000.0)
    return fields.number("rope_local_base_freq", theta) if is_local else theta


def _refuse_unsupported(scaling: Fields) -> None:
    for name in ("mrope_section", "full_attention", "sliding_attention"):
        if scaling.has(name):
            raise ModelError(f"{scaling.source}: {name} is not supported; all layers must rotate alike")


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
