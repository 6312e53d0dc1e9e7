"""Writes a tiny checkpoint of tiny_models as a GGUF file, as the converter of llama.cpp would."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

from bequest.engine.models import gguf_gemma4
from bequest.engine.models.gguf_experts import LAYER_NAMES as EXPERT_LAYER_NAMES
from bequest.engine.models.gguf_hybrids import LAYER_NAMES as RECURRENT_NAMES
from bequest.engine.models.gguf_loader import GLOBAL_NAMES, layer_names
from bequest.engine.models.gguf_registry import GGUF_ARCHITECTURES
from tests.models.k_quants import quantise
from tests.tiny_models import make_reference

# Of configurations, by the type of their model.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "granite": "granite",
    "smollm3": "smollm3",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "phi3": "phi3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
PERMUTED = ("llama", "mistral3", "granite", "smollm3")  # rows of queries and keys: from halves to neighbours
WITHOUT_WINDOWS = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")  # files have no key for them
HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
SHIFTED = ("gemma", "gemma2", "gemma3", *HYBRIDS)  # norms: by the 1 that transformers adds to them
EXPERT_NAMES = {theirs: ours for ours, theirs in EXPERT_LAYER_NAMES.items()}


def write_tiny_gguf(
    name: str | PreTrainedModel,
    path: Path,
    kind: GGMLQuantizationType | Callable[[str], GGMLQuantizationType] = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> PreTrainedModel:
    """Matrices in `kind`, which may depend on their names, vectors in float32. Returns the reference, its matrices
    rounded as the file's are."""
    reference = make_reference(name) if isinstance(name, str) else name
    architecture = ARCHITECTURES[reference.config.model_type]
    writer = GGUFWriter(path, architecture)
    _add_metadata(writer, reference)
    for key, value in (metadata or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    for tensor_name, parameter in reference.named_parameters():
        own = kind if isinstance(kind, GGMLQuantizationType) else kind(tensor_name)
        values = parameter.detach().numpy()
        vectors = ("shared_expert_gate.weight", "_bias", "conv1d.weight", "norm.weight")
        is_matrix = values.ndim > 1 and not tensor_name.endswith(vectors)
        if is_matrix:
            # Files have rows of what is summed, gpt-oss' parameters columns.
            turned = architecture == "gpt-oss" and ".experts." in tensor_name
            values = np.ascontiguousarray(values.swapaxes(-1, -2) if turned else values)
            values = gguf.dequantize(quantise(values, own), own)
            parameter.data.copy_(parameter.new_tensor(values.swapaxes(-1, -2) if turned else values))
        if architecture in PERMUTED and (".q_proj." in tensor_name or ".k_proj." in tensor_name):
            values = _interleave(values, head_dim_of(reference))
        if architecture in SHIFTED and tensor_name.endswith("norm.weight") and "linear_attn" not in tensor_name:
            values = values + 1
        for stored_name, part in _stored(tensor_name, values, architecture, reference.config):
            stored = quantise(np.ascontiguousarray(part), own) if is_matrix else part
            writer.add_tensor(stored_name, stored, raw_dtype=own if is_matrix else None)
    if architecture == "gemma4":
        _add_gemma4_tensors(writer, reference)
    for tensor_name, buffer in reference.named_buffers():
        if tensor_name.endswith("e_score_correction_bias"):
            writer.add_tensor(f"blk.{tensor_name.split('.')[2]}.exp_probs_b.bias", buffer.numpy())
    for tensor_name, values in (extra_tensors or {}).items():
        writer.add_tensor(tensor_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference


def _stored(name: str, values: np.ndarray, architecture: str, config: Any) -> list[tuple[str, np.ndarray]]:
    """What a parameter becomes in the file: experts have a tensor of all gates and one of all ups."""
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    if architecture == "gpt-oss" and ("experts" in name or name.endswith((".sinks", "router.weight", "router.bias"))):
        return [(f"blk.{layer}.{part}", part_values) for part, part_values in _stored_by_gpt_oss(name, values)]
    if architecture == "gemma4" and (stored := _stored_by_gemma4(name)):
        return [(f"blk.{layer}.{stored}", values)]
    if "linear_attn" in name:
        return [(f"blk.{layer}.{part}", values) for part, values in _stored_recurrent(name, values, config)]
    if name.endswith("experts.gate_up_proj"):
        gates, ups = np.split(values, 2, axis=1)
        return [(f"blk.{layer}.ffn_gate_exps.weight", gates), (f"blk.{layer}.ffn_up_exps.weight", ups)]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.weight", values)]
    return [(gguf_name(name, architecture), values.reshape(-1) if "shared_expert_gate" in name else values)]


def _stored_by_gpt_oss(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Gates and ups are in turns in its parameters, matrices of all experts in one."""
    stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    if stem.endswith("gate_up_proj"):
        return [(f"ffn_{part}_exps.{kind}", values[:, first::2]) for first, part in enumerate(("gate", "up"))]
    if stem.endswith("down_proj"):
        return [(f"ffn_down_exps.{kind}", values)]
    if name.endswith(".sinks"):
        return [("attn_sinks.weight", values)]
    return [(f"ffn_gate_inp.{name.rsplit('.', 1)[1]}", values)]


def _stored_by_gemma4(name: str) -> str | None:
    """What its files alone have; gates and ups of experts are in one tensor."""
    part = name.split(".", 3)[3] if name.startswith("model.layers.") else ""
    if part.startswith("experts."):
        return {"gate_up_proj": "ffn_gate_up_exps", "down_proj": "ffn_down_exps"}[part.split(".")[1]] + ".weight"
    vectors = {ours: stored for stored, ours in gguf_gemma4.VECTORS.items()}
    matrices = {f"{ours}.weight": f"{stored}.weight" for stored, ours in gguf_gemma4.LAYER_NAMES.items()}
    return (vectors | matrices).get(part)


def _add_gemma4_tensors(writer: GGUFWriter, reference: PreTrainedModel) -> None:
    for name, buffer in reference.named_buffers():
        if name.endswith("layer_scalar"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.layer_output_scale.weight", buffer.numpy())
    config = reference.config
    pairs = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
    turned = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    divisors = np.array([1.0] * turned + [1e30] * (pairs - turned), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def _stored_recurrent(name: str, values: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """Value heads of Qwen3.5 in turns; of Qwen3-Next queries, keys and values apart from z."""
    part = name.split(".linear_attn.")[1]
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys = groups * config.linear_key_head_dim
    in_turns = config.model_type != "qwen3_next"

    def turned(rows: np.ndarray, axis: int = 0) -> np.ndarray:
        if not in_turns:
            return rows
        shape = rows.shape
        split = rows.reshape(*shape[:axis], groups, heads // groups, -1, *shape[axis + 1 :])
        return split.swapaxes(axis, axis + 1).reshape(shape)

    match part.removesuffix(".weight"):
        case "in_proj_qkvz":
            of_group = values.reshape(groups, -1, values.shape[-1])
            sizes = np.cumsum([config.linear_key_head_dim] * 2 + [heads // groups * config.linear_value_head_dim])
            q, k, v, z = (rows.reshape(-1, values.shape[-1]) for rows in np.split(of_group, sizes, axis=1))
            return [("attn_qkv.weight", np.concatenate([q, k, v])), ("attn_gate.weight", z)]
        case "in_proj_qkv":
            return [("attn_qkv.weight", np.concatenate([values[: 2 * keys], turned(values[2 * keys :])]))]
        case "conv1d":
            taps = values[:, 0]
            return [("ssm_conv1d.weight", np.concatenate([taps[: 2 * keys], turned(taps[2 * keys :])]))]
        case "A_log":
            return [("ssm_a", turned(-np.exp(values)))]
        case "dt_bias":
            return [("ssm_dt.bias", turned(values))]
        case "norm":
            return [("ssm_norm.weight", values)]
        case "out_proj":
            return [("ssm_out.weight", turned(values, 1))]
        case other:
            stored = next(stored for stored, ours in RECURRENT_NAMES.items() if ours == f"linear_attn.{other}")
            return [(f"{stored}.weight", turned(values))]


def gguf_name(name: str, architecture: str) -> str:
    """model.layers.3.self_attn.q_proj.weight → blk.3.attn_q.weight"""
    stem, kind = name.rsplit(".", 1)
    for ours, theirs in GLOBAL_NAMES.items():
        if stem == theirs:
            return f"{ours}.{kind}"
    _, _, layer, part = stem.replace(".shared_experts.", ".shared_expert.").split(".", 3)
    variant = GGUF_ARCHITECTURES[architecture]
    names = layer_names(variant.style, variant)
    ours = EXPERT_NAMES.get(part) or next(ours for ours, theirs in names.items() if theirs == part)
    return f"blk.{layer}.{ours}.{kind}"


def _interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from halves (0, 1, …, D/2, …) to neighbours (0, D/2, 1, D/2 + 1, …)."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _add_metadata(writer: GGUFWriter, reference: PreTrainedModel) -> None:
    config = reference.config
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4: what its layers with a window have
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if config.model_type != "qwen3_5_moe_text":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    _add_eps(writer, config)
    writer.add_eos_token_id(2)
    _add_rope(writer, config)
    _add_scales(writer, config)
    head_dim = head_dim_of(reference)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    partial = getattr(config, "rope_parameters", {}).get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * partial))
    if config.model_type not in (*WITHOUT_WINDOWS, "mistral") and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("olmo3", "gemma4_text"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if hasattr(config, "num_experts_per_tok"):
        _add_experts(writer, config)
    if hasattr(config, "linear_num_key_heads"):
        _add_recurrent(writer, config)
    if config.model_type == "gemma4_text":
        _add_gemma4(writer, config)


def _add_gemma4(writer: GGUFWriter, config: Any) -> None:
    """Over what is written of all models: the last value of a key counts."""
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    full, window = (layers[config.layer_types.index(kind)] for kind in ("full_attention", "sliding_attention"))
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_key_length_swa(window.head_dim)
    writer.add_value_length_swa(window.head_dim)
    writer.add_rope_dimension_count_swa(window.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.use_double_wide_mlp:
        own, inner = len(layers) - config.num_kv_shared_layers, config.intermediate_size
        writer.add_feed_forward_length([inner if layer < own else 2 * inner for layer in range(len(layers))])
    if config.attention_k_eq_v:
        writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_recurrent(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(2)
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([2, 1, 1, 0])


def _add_experts(writer: GGUFWriter, config: Any) -> None:
    counts = (getattr(config, name, None) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    writer.add_expert_count(next(count for count in counts if count))
    if hasattr(config, "routed_scaling_factor"):
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def head_dim_of(reference: PreTrainedModel) -> int:
    config = reference.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_eps(writer: GGUFWriter, config: Any) -> None:
    if hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_rope(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        growth = math.log(config.max_position_embeddings / original) / math.log(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + growth))
        for name in ("short", "long"):
            factors = np.array(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_scales(writer: GGUFWriter, config: Any) -> None:
    for name, add in {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
    }.items():
        if getattr(config, name, None) is not None:
            add(getattr(config, name))
