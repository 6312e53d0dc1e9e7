"""Which layers have a window and which know no positions, as a config.json of Hugging Face says. No torch."""

from __future__ import annotations

from bequest.engine.errors import ModelError
from bequest.engine.models.fields import Fields
from bequest.engine.models.registry import HFVariant


def unrotated_layers(fields: Fields, variant: HFVariant, windows: tuple[int, ...]) -> frozenset[int]:
    """Those whose attention knows no positions."""
    match variant.rope.skipped:
        case "listed":
            return _listed_layers(fields)
        case "full":
            return frozenset(layer for layer, window in enumerate(windows) if not window)
        case "never":
            return frozenset()


def _listed_layers(fields: Fields) -> frozenset[int]:
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


def sliding_windows(fields: Fields, variant: HFVariant) -> tuple[int, ...]:
    """[L] window of each layer, 0 for none."""
    num_layers = fields.integer("num_hidden_layers")
    full = (0,) * num_layers
    if not variant.recurrent:
        _check_types(fields, variant, num_layers)
    if variant.sliding_window == "never":
        return full
    if variant.sliding_window not in ("all_layers", "by_type") and not fields.boolean("use_sliding_window", False):
        return full  # the size may be anything then: the transformers library writes a 0 for Qwen2-MoE
    if fields.has("sliding_window") and fields.integer("sliding_window") < 1:
        raise ModelError(f"{fields.source}: sliding_window must be positive, not {fields.integer('sliding_window')}")
    if variant.sliding_window == "by_type":
        return _windows_by_type(fields, variant)
    if not fields.has("sliding_window"):
        return full
    window = fields.integer("sliding_window")
    if variant.sliding_window == "all_layers":
        _refuse_other_types(fields)
        return (window,) * num_layers
    if variant.sliding_window == "all_if_used":
        return (window,) * num_layers
    if not fields.has("layer_types") and variant.rope.skipped == "listed":
        unrotated = _listed_layers(fields)
        return tuple(window if layer in unrotated else 0 for layer in range(num_layers))
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28)
        if variant.sliding_window == "every_other":
            return tuple(window if layer < first and layer % 2 == 0 else 0 for layer in range(num_layers))
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    return _windows_by_type(fields, variant)


def _check_types(fields: Fields, variant: HFVariant, num_layers: int) -> None:
    types = [str(kind) for kind in fields.list_of("layer_types")]
    if not types:
        return
    if len(types) != num_layers:
        raise ModelError(f"{fields.source}: layer_types are {len(types)}, but num_hidden_layers is {num_layers}")
    if unknown := sorted({*types} - {"full_attention", "sliding_attention"}):
        raise ModelError(f"{fields.source}: layer_types {', '.join(unknown)} are not supported")
    if "sliding_attention" not in types:
        return
    if variant.sliding_window == "never":
        raise ModelError(f"{fields.source}: layer_types has sliding_attention, and this architecture has no windows")
    if not fields.has("sliding_window"):
        raise ModelError(f"{fields.source} lacks sliding_window, which layer_types ask for")
    if variant.sliding_window not in ("all_layers", "by_type") and not fields.boolean("use_sliding_window", False):
        raise ModelError(f"{fields.source}: use_sliding_window is false, but layer_types has sliding_attention")


def _refuse_other_types(fields: Fields) -> None:
    """The transformers library overlooks the types of such a model."""
    if others := sorted({str(kind) for kind in fields.list_of("layer_types")} - {"sliding_attention"}):
        raise ModelError(
            f"{fields.source}: layer_types {', '.join(others)} beside a sliding_window are not supported: all layers "
            "of this architecture have the window"
        )


def _windows_by_type(fields: Fields, variant: HFVariant) -> tuple[int, ...]:
    """As `layer_types` says, or each `sliding_window_pattern`-th layer sees all."""
    types = [str(kind) for kind in fields.list_of("layer_types")]
    if not types:
        count = fields.integer("num_hidden_layers")
        implied = variant.defaults.get("sliding_window_pattern")
        if implied is None and not fields.has("sliding_window"):
            return (0,) * count
        given = fields.raw("sliding_window_pattern")
        if given != implied and "sliding_window_pattern" not in variant.honoured:
            raise ModelError(f"{fields.source}: sliding_window_pattern is not supported; say layer_types")
        every = fields.integer("sliding_window_pattern", count + 1)  # without one every layer has the window
        if every < 1:
            raise ModelError(f"{fields.source}: sliding_window_pattern must be positive, not {every}")
        types = ["sliding_attention" if layer % every else "full_attention" for layer in range(1, count + 1)]
    window = fields.integer("sliding_window") if "sliding_attention" in types else 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
