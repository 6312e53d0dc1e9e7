"""GGUF files of Gemma 4: what their metadata says beyond that of other decoders, and their tensors by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bequest.engine.errors import ModelError
from bequest.engine.formats.gguf_file import GGUFFile, GGUFTensor
from bequest.engine.models.config import RopeConfig
from bequest.engine.models.fields import Fields
from bequest.engine.models.gemma4_config import Gemma4Config
from bequest.engine.models.strips import KvHeads

GLOBAL_NAMES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LAYER_NAMES = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
# Whose names have no weight behind them in checkpoints.
VECTORS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
# Of all experts, [E, rows, columns]: what the rows of one are.
_EXPERTS = {
    "ffn_gate_up_exps.weight": ("gate_proj", "up_proj"),
    "ffn_gate_exps.weight": ("gate_proj",),
    "ffn_up_exps.weight": ("up_proj",),
    "ffn_down_exps.weight": ("down_proj",),
}
_STILL = 1e29  # a frequency that is divided by more than that turns nothing


def gemma4_fields(fields: Fields) -> Fields:
    """As files of other models say it: one number for all layers, here that of layers with a window."""
    windows = _windows(fields)
    counts = _by_layer(fields, "attention.head_count_kv", len(windows))
    plain = {
        "attention.head_count_kv": next((count for count, has in zip(counts, windows, strict=True) if has), counts[0]),
        "feed_forward_length": _by_layer(fields, "feed_forward_length", len(windows))[0],
        "attention.key_length": fields.integer("attention.key_length_swa"),
        "attention.value_length": fields.integer("attention.value_length_swa"),
    }
    return Fields({**fields.values, **plain}, fields.source)


def _windows(fields: Fields) -> list[bool]:
    """Which layers have a window."""
    pattern = np.asarray(fields.raw("attention.sliding_window_pattern"))
    if pattern.shape != (fields.integer("block_count"),) or not {*pattern.tolist()} <= {0, 1}:
        raise ModelError(f"{fields.source}: attention.sliding_window_pattern must have true or false for each layer")
    return [bool(has_window) for has_window in pattern.tolist()]


def _by_layer(fields: Fields, name: str, num_layers: int) -> list[int]:
    """What a file says once, or of each layer."""
    values = np.asarray(fields.raw(name))
    if not np.issubdtype(values.dtype, np.integer) or values.shape not in ((), (num_layers,)):
        raise ModelError(f"{fields.source}: {name} must be a whole number, or one for each of {num_layers} layers")
    return [int(value) for value in np.broadcast_to(values, (num_layers,))]


def parse_gguf_gemma4(file: GGUFFile, fields: Fields) -> Gemma4Config:
    """`fields`: as they are in the file."""
    windows = _windows(fields)
    shared = fields.integer("attention.shared_kv_layers", 0)
    own = windows[: max(len(windows) - shared, 0)]
    if shared < 0 or not {*windows} <= {*own}:
        raise ModelError(f"{fields.source}: attention.shared_kv_layers = {shared} leaves no layer to share with")
    size = fields.integer("embedding_length_per_layer_input", 0)
    table = file.tensors.get("per_layer_token_embd.weight")
    if size and table is None:
        raise ModelError(f"{file.path} lacks the tensor per_layer_token_embd.weight")
    return Gemma4Config(
        full_heads=_full_heads(fields, windows),
        keys_are_values=False in own and f"blk.{own.index(False)}.attn_v.weight" not in file.tensors,
        num_shared=shared,
        wide_shared=_is_wide(_by_layer(fields, "feed_forward_length", len(windows)), len(own), fields.source),
        input_size=size,
        input_vocab=table.shape[0] if size and table is not None else 0,
    )


def _full_heads(fields: Fields, windows: Sequence[bool]) -> KvHeads:
    """Of layers that see all."""
    counts = _by_layer(fields, "attention.head_count_kv", len(windows))
    kinds = {*zip(windows, counts, strict=True)}
    if len(kinds) > len({*windows}):
        raise ModelError(f"{fields.source}: attention.head_count_kv differs among layers of one kind: {counts}")
    size = fields.integer("attention.key_length")
    if fields.integer("attention.value_length", size) != size:
        raise ModelError(f"{fields.source}: attention.value_length other than attention.key_length is not supported")
    heads = KvHeads(dict(kinds).get(False, counts[0]), size)
    if heads.count < 1 or heads.size < 1:
        raise ModelError(f"{fields.source}: attention.head_count_kv and attention.key_length must be positive")
    return heads


def _is_wide(sizes: Sequence[int], num_own: int, source: str) -> bool:
    """Whether the MLPs of layers that share keys are twice as wide as the others'."""
    own, shared = {*sizes[:num_own]}, {*sizes[num_own:]}
    if len(own) == 1 and shared <= own:
        return False
    if len(own) != 1 or shared != {2 * size for size in own}:
        raise ModelError(f"{source}: feed_forward_length that differs among layers so is not supported: {sizes}")
    return True


def parse_gguf_gemma4_ropes(file: GGUFFile, fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see all, and of those with a window. For the former the file has by what frequencies are divided:
    by one, and behind these by a huge number."""
    if fields.string("rope.scaling.type", "none") != "none":
        raise ModelError(f"{fields.source}: rope.scaling.type = {fields.raw('rope.scaling.type')!r} is not supported")
    theta, size = fields.number("rope.freq_base", 10000.0), fields.integer("attention.key_length")
    if fields.integer("rope.dimension_count", size) != size:
        raise ModelError(f"{fields.source}: rope.dimension_count other than attention.key_length is not supported")
    tensor = file.tensors.get("rope_freqs.weight")
    divisors = [1.0] * (size // 2) if tensor is None else tensor.load().tolist()
    num_turned = sum(divisor == 1.0 for divisor in divisors)
    if len(divisors) != size // 2 or any(not divisor > _STILL for divisor in divisors[num_turned:]):
        raise ModelError(f"{file.path}: rope_freqs.weight must have {size // 2} values: ones, then huge ones")
    full = RopeConfig(theta, "proportional", num_turned / len(divisors)) if num_turned < len(divisors) else None
    window_size = fields.integer("attention.key_length_swa")
    partial_factor = fields.integer("rope.dimension_count_swa", window_size) / window_size
    window = RopeConfig(fields.number("rope.freq_base_swa"), partial_factor=partial_factor)
    return full or RopeConfig(theta), window


def gemma4_tensors(layer_prefix: str, part: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """The names of one tensor of a layer, blk.N.PART, and what each name stands for; none if it is one that other
    decoders have, too."""
    stem, _, kind = part.rpartition(".")
    names = _EXPERTS.get(part, ())
    if part in VECTORS:
        yield f"{layer_prefix}{VECTORS[part]}", tensor
    elif stem in LAYER_NAMES:
        yield f"{layer_prefix}{LAYER_NAMES[stem]}.{kind}", tensor
    elif names and len(tensor.shape) == 3 and tensor.shape[1] % len(names) == 0:
        num_experts, rows, columns = tensor.shape
        matrices = tensor.data.reshape(num_experts * len(names), -1)
        for number, data in enumerate(matrices):
            expert, matrix = divmod(number, len(names))
            own = replace(tensor, shape=(rows // len(names), columns), data=data)
            yield f"{layer_prefix}experts.{expert}.{names[matrix]}.weight", own
