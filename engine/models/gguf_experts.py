"""Experts of a GGUF file: what its metadata and its tensors say of them, and each expert's matrices by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from bequest.engine.errors import ModelError
from bequest.engine.formats.gguf_file import GGUFFile, GGUFTensor
from bequest.engine.models.experts_config import ExpertsConfig, WrongExperts
from bequest.engine.models.fields import Fields
from bequest.engine.models.gguf_registry import GGUFVariant
from bequest.engine.types.scoring import Scoring

LAYER_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Of each expert: in one tensor [E, rows, columns], or, in older files, one by one with the number behind the name.
_MATRICES = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_NAMES = {
    "num_experts": "expert_count",
    "top_k": "expert_used_count",
    "intermediate_size": "expert_feed_forward_length",
    "factor": "expert_weights_scale",
}
_ROUTER = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight")
_SCORINGS: dict[int, Scoring] = {0: "softmax", 1: "softmax", 2: "sigmoid"}  # 0: it is not said


def parse_gguf_experts(file: GGUFFile, fields: Fields, variant: GGUFVariant) -> ExpertsConfig | None:
    """None: no layer has experts."""
    count = fields.integer("expert_count", 0)
    if count == 0 or variant.renormalises_experts is None:
        return None
    scoring = fields.integer("expert_gating_func", 0)
    if scoring not in _SCORINGS:
        raise ModelError(f"{fields.source}: expert_gating_func {scoring} is not supported; 1 and 2 are")
    num_layers = fields.integer("block_count") - fields.integer("nextn_predict_layers", 0)  # which draft tokens
    numbers = (int(found[1]) for name in file.tensors if (found := _ROUTER.fullmatch(name)))
    layers = frozenset(number for number in numbers if number < num_layers)
    if not layers:
        raise ModelError(f"{file.path} lacks the tensors ffn_gate_inp, which choose experts")
    shared = _rows_of(file, f"blk.{min(layers)}.ffn_gate_shexp.weight", 0)
    try:
        return ExpertsConfig(
            num_experts=count,
            top_k=fields.integer("expert_used_count"),
            intermediate_size=_expert_size(file, fields, min(layers)),
            layers=layers,
            scoring=_SCORINGS[scoring],
            choice_bias=f"blk.{min(layers)}.exp_probs_b.bias" in file.tensors,
            renormalises=fields.boolean("expert_weights_norm", variant.renormalises_experts),
            factor=fields.number("expert_weights_scale", 0.0) or 1.0,  # 0: there is none
            shared_size=shared,
            shared_gate=f"blk.{min(layers)}.ffn_gate_inp_shexp.weight" in file.tensors,
            router_bias=f"blk.{min(layers)}.ffn_gate_inp.bias" in file.tensors,
            bias=f"blk.{min(layers)}.ffn_down_exps.bias" in file.tensors,
        )
    except WrongExperts as error:
        raise error.named(fields.source, _NAMES) from None


def _expert_size(file: GGUFFile, fields: Fields, layer: int) -> int:
    """By the tensors: some writers leave the key out, others mean something else by it."""
    size = _rows_of(file, f"blk.{layer}.ffn_gate_exps.weight", 1) or _rows_of(file, f"blk.{layer}.ffn_gate.0.weight", 0)
    return size or fields.integer("expert_feed_forward_length")


def _rows_of(file: GGUFFile, name: str, dim: int) -> int:
    tensor = file.tensors.get(name)
    return 0 if tensor is None or len(tensor.shape) <= dim else tensor.shape[dim]


def expert_tensors(layer_prefix: str, part: str, kind: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """The names of one tensor of a layer, blk.N.PART.KIND, and what each name stands for; none if it is not one of
    experts. A kind is weight or bias."""
    stem, _, number = part.partition(".")
    if stem in LAYER_NAMES:
        # The gate of a shared expert is one row, which is stored as a vector.
        row = stem == "ffn_gate_inp_shexp" and len(tensor.shape) == 1
        yield f"{layer_prefix}{LAYER_NAMES[stem]}.{kind}", replace(tensor, shape=(1, *tensor.shape)) if row else tensor
    elif stem in _MATRICES and number.isdigit():
        yield f"{layer_prefix}mlp.experts.{number}.{_MATRICES[stem]}.{kind}", tensor
    elif (matrix := _MATRICES.get(stem.removesuffix("_exps"))) and stem.endswith("_exps") and len(tensor.shape) > 1:
        num_experts, *shape = tensor.shape
        rows = tensor.data.reshape(num_experts, -1)
        for expert in range(num_experts):
            name = f"{layer_prefix}mlp.experts.{expert}.{matrix}.{kind}"
            yield name, replace(tensor, shape=tuple(shape), data=rows[expert])
