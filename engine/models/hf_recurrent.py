"""What config.json of a hybrid says beyond that of other decoders: recurrent layers among those with an attention."""

from __future__ import annotations

from collections.abc import Mapping

from bequest.engine.errors import ModelError
from bequest.engine.models.config import RecurrentConfig
from bequest.engine.models.fields import Fields
from bequest.engine.types.recurrent import DeltaSizes

# Of positions in a picture. Those of a text are the same on all three axes, and turn a head as any other's.
_AXES = ("mrope_section", "mrope_interleaved")


def text_part(values: Mapping[str, object], source: str) -> Fields:
    """The description of the decoder, which lies deeper in a model that sees pictures, too."""
    deeper = values.get("text_config")
    if isinstance(deeper, Mapping):
        shared = ("architectures", "tie_word_embeddings", "quantization_config")
        outer = {name: values[name] for name in shared if name in values}
        values, source = {**deeper, **outer}, f"{source}: text_config"
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping):
        values = {**values, "rope_parameters": {name: value for name, value in rope.items() if name not in _AXES}}
    return Fields(values, source)


def parse_recurrent(fields: Fields) -> RecurrentConfig:
    sizes = DeltaSizes(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_width=fields.integer("linear_conv_kernel_dim", 4),
    )
    for name, size in (
        ("linear_num_key_heads", sizes.key_heads),
        ("linear_num_value_heads", sizes.value_heads),
        ("linear_key_head_dim", sizes.key_dim),
        ("linear_value_head_dim", sizes.value_dim),
        ("linear_conv_kernel_dim", sizes.conv_width),
    ):
        if size < 1:
            raise ModelError(f"{fields.source}: {name} must be positive, not {size}")
    if sizes.value_heads % sizes.key_heads:
        raise ModelError(
            f"{fields.source}: linear_num_value_heads = {sizes.value_heads} cannot share "
            f"linear_num_key_heads = {sizes.key_heads} evenly"
        )
    if fields.string("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(
            f"{fields.source}: hidden_act = {fields.raw('hidden_act')!r} is not supported in recurrent layers; "
            "supported is silu"
        )
    return RecurrentConfig(sizes, _recurrent_layers(fields))


def _recurrent_layers(fields: Fields) -> frozenset[int]:
    num_layers = fields.integer("num_hidden_layers")
    if not fields.has("layer_types"):
        interval = fields.integer("full_attention_interval", 4)
        if interval < 1:
            raise ModelError(f"{fields.source}: full_attention_interval must be positive, not {interval}")
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval)
    types = [str(kind) for kind in fields.list_of("layer_types")]
    if unknown := sorted({*types} - {"linear_attention", "full_attention"}):
        raise ModelError(f"{fields.source}: layer_types {', '.join(unknown)} are not supported")
    if len(types) != num_layers:
        raise ModelError(f"{fields.source}: layer_types are {len(types)}, but num_hidden_layers is {num_layers}")
    return frozenset(layer for layer, kind in enumerate(types) if kind == "linear_attention")
