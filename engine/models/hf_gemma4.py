"""What config.json of a Gemma 4 says beyond that of other decoders. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from bequest.engine.errors import ModelError
from bequest.engine.models.experts_config import ExpertsConfig, WrongExperts
from bequest.engine.models.fields import Fields
from bequest.engine.models.gemma4_config import Gemma4Config
from bequest.engine.models.strips import KvHeads

_FULL, _WINDOW = "full_attention", "sliding_attention"
_FULL_EVERY = 6  # where config.json does not list the types of layers
# Of rotation, which `rope_parameters` describes for each type of layer; the transformers library overlooks these.
_ELSEWHERE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")


def gemma4_fields(fields: Fields) -> Fields:
    """With the types of layers, and without what is the same for a text as if it were not there."""
    for name in _ELSEWHERE:
        if fields.has(name):
            raise ModelError(f"{fields.source}: {name} is not supported; say rope_parameters for each type of layer")
    if fields.raw("use_bidirectional_attention", False) not in (False, "vision"):
        raise ModelError(
            f"{fields.source} asks for what is not supported: use_bidirectional_attention = "
            f"{fields.raw('use_bidirectional_attention')!r}"
        )
    types = _layer_types(fields)
    ropes = fields.section("rope_parameters")
    for kind in sorted({*types} & {_FULL, _WINDOW}):
        if not ropes.section(kind).values:
            raise ModelError(f"{ropes.source} lacks {kind}")
    return Fields({**fields.values, "layer_types": types, "use_bidirectional_attention": None}, fields.source)


def _layer_types(fields: Fields) -> list[str]:
    """The last layer sees all, whatever its type is said to be."""
    count = fields.integer("num_hidden_layers")
    types = [str(kind) for kind in fields.list_of("layer_types")]
    if not types:
        if fields.integer("sliding_window_pattern", _FULL_EVERY) != _FULL_EVERY:
            raise ModelError(f"{fields.source}: sliding_window_pattern is not supported; say layer_types")
        types = [_WINDOW if layer % _FULL_EVERY else _FULL for layer in range(1, count + 1)]
    return [*types[:-1], _FULL]


def parse_gemma4(fields: Fields, windows: Sequence[int]) -> Gemma4Config:
    """`windows`: of the layers, 0 for those that see all."""
    keys_are_values = fields.boolean("attention_k_eq_v", False)
    shared = fields.integer("num_kv_shared_layers", 0)
    num_own = len(windows) - shared
    if shared < 0 or num_own < 1:
        raise ModelError(f"{fields.source}: num_kv_shared_layers = {shared} of {len(windows)} layers")
    if missing := {*windows} - {*windows[:num_own]}:
        kind = _WINDOW if max(missing) else _FULL
        raise ModelError(f"{fields.source}: num_kv_shared_layers = {shared} leaves no {kind} layer to share with")
    size = fields.integer("hidden_size_per_layer_input", 0)
    vocab = fields.integer("vocab_size_per_layer_input", fields.integer("vocab_size"))
    if size < 0 or (size and vocab < fields.integer("vocab_size")):
        raise ModelError(
            f"{fields.source}: hidden_size_per_layer_input = {size} with vocab_size_per_layer_input = {vocab} "
            f"does not cover vocab_size = {fields.integer('vocab_size')}"
        )
    return Gemma4Config(
        full_heads=_full_heads(fields, windows, keys_are_values),
        keys_are_values=keys_are_values,
        num_shared=shared,
        wide_shared=fields.boolean("use_double_wide_mlp", False),
        input_size=size,
        input_vocab=vocab if size else 0,
    )


def _full_heads(fields: Fields, windows: Sequence[int], keys_are_values: bool) -> KvHeads:
    """Of layers that see all: as published files say it, or layer by layer as newer ones of the library do."""
    own = KvHeads(fields.integer("num_key_value_heads"), fields.integer("head_dim"))
    if fields.has("per_layer_config"):
        return _listed_heads(fields.section("per_layer_config"), windows, own)
    count = fields.integer("num_global_key_value_heads", own.count) if keys_are_values else own.count
    heads = KvHeads(count, fields.integer("global_head_dim", 512))
    for name, value in (("num_global_key_value_heads", heads.count), ("global_head_dim", heads.size)):
        if value < 1:
            raise ModelError(f"{fields.source}: {name} must be positive, not {value}")
    return heads


def _listed_heads(listed: Fields, windows: Sequence[int], own: KvHeads) -> KvHeads:
    """Layers are numbers in strings, which may begin with zeros."""
    if others := sorted(name for name in listed.values if not name.isdigit() or int(name) >= len(windows)):
        raise ModelError(f"{listed.source}: there is no layer {', '.join(others)}")
    listed = Fields({str(int(name)): value for name, value in listed.values.items()}, listed.source)
    found = set()
    for layer, window in enumerate(windows):
        of_layer = listed.section(str(layer))
        if others := sorted({*of_layer.values} - {"head_dim", "num_key_value_heads"}):
            raise ModelError(f"{of_layer.source}: {', '.join(others)} is not supported")
        count, size = (of_layer.integer(*said) for said in (("num_key_value_heads", own.count), ("head_dim", own.size)))
        if count < 1 or size < 1:
            raise ModelError(f"{of_layer.source}: heads must be positive")
        if not window:
            found.add(KvHeads(count, size))
        elif KvHeads(count, size) != own:
            raise ModelError(f"{of_layer.source}: layers with a window have the heads that the file has for all")
    if len(found) > 1:
        raise ModelError(f"{listed.source}: all layers with full_attention must have the same heads")
    return found.pop()


def parse_gemma4_experts(fields: Fields) -> ExpertsConfig | None:
    """Beside the MLP of every layer."""
    if not fields.boolean("enable_moe_block", False):
        return None
    try:
        return ExpertsConfig(
            num_experts=fields.integer("num_experts"),
            top_k=fields.integer("top_k_experts"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            layers=frozenset(range(fields.integer("num_hidden_layers"))),
            renormalises=True,
        )
    except WrongExperts as error:
        names = {"top_k": "top_k_experts", "intermediate_size": "moe_intermediate_size"}
        raise error.named(fields.source, names) from None
