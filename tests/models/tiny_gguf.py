"""Writes a tiny checkpoint of tiny_models as a GGUF file, as the converter of llama.cpp would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

from bequest.engine.models.gguf_loader import GLOBAL_NAMES, LAYER_NAMES
from tests.tiny_models import make_reference

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def write_tiny_gguf(
    name: str,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> PreTrainedModel:
    """Matrices in `kind`, vectors in float32. Returns the reference, its matrices rounded as the file's are."""
    reference = make_reference(name)
    architecture = ARCHITECTURES[reference.config.model_type]
    writer = GGUFWriter(path, architecture)
    _add_metadata(writer, reference)
    for key, value in (metadata or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    for tensor_name, parameter in reference.named_parameters():
        values = parameter.detach().numpy()
        if values.ndim == 2:
            values = gguf.dequantize(gguf.quantize(values, kind), kind)
            parameter.data.copy_(parameter.new_tensor(values))
        if architecture == "llama" and (".q_proj." in tensor_name or ".k_proj." in tensor_name):
            values = _interleave(values, reference.config.head_dim)
        stored = gguf.quantize(np.ascontiguousarray(values), kind) if values.ndim == 2 else values
        writer.add_tensor(gguf_name(tensor_name), stored, raw_dtype=kind if values.ndim == 2 else None)
    for tensor_name, values in (extra_tensors or {}).items():
        writer.add_tensor(tensor_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference


def gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight → blk.3.attn_q.weight"""
    stem, kind = name.rsplit(".", 1)
    for ours, theirs in GLOBAL_NAMES.items():
        if stem == theirs:
            return f"{ours}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    ours = next(ours for ours, theirs in LAYER_NAMES.items() if theirs == part)
    return f"blk.{layer}.{ours}.{kind}"


def _interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from halves (0, 1, …, D/2, …) to neighbours (0, D/2, 1, D/2 + 1, …)."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _add_metadata(writer: GGUFWriter, reference: PreTrainedModel) -> None:
    config = reference.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
