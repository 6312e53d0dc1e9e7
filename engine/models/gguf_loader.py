"""Tensors of a GGUF file under the names of Hugging Face checkpoints: as float32, or in the codes of the file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import gguf.quants
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from bequest.engine.formats.gguf_file import GGUFFile, GGUFTensor
from bequest.engine.kernels.cpu_weights import STORED_CODES, QuantisedRows, StoredType
from bequest.engine.layers.codes import Codes
from bequest.engine.models import gguf_gemma4, gguf_hybrids
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.families.decoders import layer_prefix
from bequest.engine.models.file_names import name_by_others
from bequest.engine.models.gguf_experts import LAYER_NAMES as EXPERT_NAMES
from bequest.engine.models.gguf_experts import expert_tensors
from bequest.engine.models.gguf_registry import GGUFVariant, find_gguf_variant
from bequest.engine.models.rope import pair_halves
from bequest.engine.models.style import LayerStyle

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **gguf_gemma4.GLOBAL_NAMES,
}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Whose names have neither weight nor bias behind them in checkpoints.
VECTORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_EXPERT = re.compile(r"(?:mlp\.)?experts\.\d+\.(gate|up|down)_proj\.(weight|bias)")
READ_ELSEWHERE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # by gguf_config.py

# Values that are dequantised at once: temporaries stay in the cache, and the calls are still long enough for threads
# to run side by side.
VALUES_AT_ONCE = 65536
CODES: dict[GGMLQuantizationType, StoredType] = {GGMLQuantizationType[name]: name for name in STORED_CODES}
UNQUANTISED = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.F64)


class GGUFSource:
    """A WeightSource."""

    def __init__(self, file: GGUFFile, config: DecoderConfig) -> None:
        self.description = str(file.path)
        variant = find_gguf_variant(file.architecture)
        names = layer_names(config.style, variant)
        named = _named_by_gemma4 if variant.gemma4 else _named
        num_layers = config.num_layers if "nextn_predict_layers" in variant.defaults else None
        read = {name: tensor for name, tensor in file.tensors.items() if not _is_left_out(name, num_layers)}
        self._tensors: dict[str, GGUFTensor] = {}
        self._stored: dict[str, str] = {}  # our name → that in the file
        for name, whole in read.items():
            parts = dict(named(name, whole, names))
            self._tensors |= parts
            self._stored |= dict.fromkeys(parts, name)
        self._names = names | gguf_gemma4.LAYER_NAMES if variant.gemma4 else EXPERT_NAMES | names
        self._config = config
        self._interleaved_rope = variant.interleaved_rope

    @property
    def dtype(self) -> torch.dtype:
        kinds = {tensor.type for tensor in self._tensors.values() if len(tensor.shape) == 2}
        return torch.bfloat16 if kinds == {GGMLQuantizationType.BF16} else torch.float32

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def load(self, name: str) -> Tensor:
        return self._in_our_order(name, torch.from_numpy(dequantise(self._tensors[name])))

    def load_codes(self, name: str) -> Codes | None:
        tensor = self._tensors[name]
        stored = CODES.get(tensor.type)
        if stored is None:
            return None
        return QuantisedRows(stored, self._in_our_order(name, torch.from_numpy(tensor.packed().copy())))

    def name_in_file(self, name: str) -> str:
        return gguf_name(name_by_others(name, self._stored), self._names)

    def _in_our_order(self, name: str, rows: Tensor) -> Tensor:
        heads = {"q": self._config.num_heads, "k": self._config.num_kv_heads}
        of = next((heads[kind] for kind in heads if f".{kind}_proj." in name or f".{kind}_norm." in name), None)
        if not self._interleaved_rope or of is None:
            return rows
        if rows.shape[0] == of:  # a norm's weight of each head
            return pair_halves(rows.flatten(), of, self._config.rotary_dim).view(rows.shape)
        return pair_halves(rows, of, self._config.rotary_dim)


def _is_left_out(name: str, num_layers: int | None) -> bool:
    """Read elsewhere, or of a layer that drafts tokens: they follow the `num_layers` others. None: there are none."""
    if name in READ_ELSEWHERE:
        return True
    layer = name.split(".")[1] if name.startswith("blk.") else ""
    return num_layers is not None and layer.isdigit() and int(layer) >= num_layers


def layer_names(style: LayerStyle, variant: GGUFVariant) -> dict[str, str]:
    """Parts of a layer as GGUF files of an architecture call them, and as a style's checkpoints do."""
    norms = {
        "attn_norm": style.before_attention,
        "post_attention_norm": style.behind_attention,
        variant.norm_before_mlp: style.before_mlp,
        "post_ffw_norm": style.behind_mlp,
    }
    matrices = {"attn_qkv": "self_attn.qkv_proj"} if "qkv_proj" in variant.joined else {}
    matrices |= {"ffn_up": "mlp.gate_up_proj"} if "gate_up_proj" in variant.joined else {}
    matrices |= gguf_hybrids.LAYER_NAMES if variant.recurrent != "no" else {}
    return LAYER_NAMES | matrices | {theirs: ours for theirs, ours in norms.items() if ours is not None}


def _named(name: str, tensor: GGUFTensor, names: Mapping[str, str]) -> list[tuple[str, GGUFTensor]]:
    """What a stored tensor is by our names: itself, or one matrix of each expert."""
    match name.split(".", 2):
        case ["blk", layer, part] if layer.isdigit() and part in VECTORS:
            return [(f"{layer_prefix(int(layer))}{VECTORS[part]}", tensor)]
    stem, _, kind = name.rpartition(".")
    match stem.split(".", 2):
        case ["blk", layer, part] if layer.isdigit() and kind in ("weight", "bias"):
            if found := list(expert_tensors(layer_prefix(int(layer)), part, kind, tensor)):
                return found
    return [(hf_name(name, names), tensor)]


def _named_by_gemma4(name: str, tensor: GGUFTensor, names: Mapping[str, str]) -> list[tuple[str, GGUFTensor]]:
    """The same of its files, which call other things by the names that files have for experts."""
    match name.split(".", 2):
        case ["blk", layer, part] if layer.isdigit():
            if found := list(gguf_gemma4.gemma4_tensors(layer_prefix(int(layer)), part, tensor)):
                return found
    return [(hf_name(name, names), tensor)]


def hf_name(name: str, names: Mapping[str, str] = LAYER_NAMES) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; an unknown name stays, for the error to show."""
    stem, _, kind = name.rpartition(".")
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{kind}"
    match stem.split("."):
        case ["blk", layer, part] if layer.isdigit() and part in names:
            return f"{layer_prefix(int(layer))}{names[part]}.{kind}"
    return name


def gguf_name(name: str, names: Mapping[str, str] = LAYER_NAMES) -> str:
    """The way back, of a tensor that no layer has; a name that is the file's own stays."""
    for theirs, ours in GLOBAL_NAMES.items():
        if name.startswith(f"{ours}."):
            return theirs + name.removeprefix(ours)
    match name.split(".", 3):
        case ["model", "layers", layer, rest]:
            return f"blk.{layer}.{_gguf_part(rest, names)}"
    return name


def _gguf_part(name: str, names: Mapping[str, str]) -> str:
    for theirs, ours in (VECTORS | gguf_gemma4.VECTORS).items():
        if name == ours:
            return theirs
    if found := _EXPERT.fullmatch(name):
        return f"ffn_{found[1]}_exps.{found[2]}"
    stem, _, kind = name.rpartition(".")
    return next((f"{theirs}.{kind}" for theirs, ours in names.items() if ours == stem), name)


def dequantise(tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """[*shape], in memory of its own. As tensor.load(), which is slower for quantised types: it works in groups of a
    few rows and so hardly ever lets another thread run."""
    if tensor.type in UNQUANTISED or not hasattr(gguf.quants, tensor.type.name):
        return tensor.load()
    kind: Any = getattr(gguf.quants, tensor.type.name)
    kind.init_grid()
    blocks = tensor.data.reshape(-1, kind.type_size)
    values = np.empty((len(blocks), kind.block_size), dtype=np.float32)
    step = max(VALUES_AT_ONCE // kind.block_size, 1)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        values[part] = kind.dequantize_blocks(blocks[part])
    return values.reshape(tensor.shape)
