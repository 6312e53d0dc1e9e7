"""Models that are measured with random weights: a config.json of a real shape and a tokenizer that decodes anything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True, slots=True)
class Shape:
    config: dict[str, Any]
    load: tuple[int, int, int]  # requests, prompt tokens, output tokens


SHAPES = {
    "qwen3-0.6b": Shape(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "dtype": "bfloat16",
            "eos_token_id": 0,
        },
        load=(1024, 512, 256),
    ),
    # So small that what is measured is everything but the model.
    "llama-tiny": Shape(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 2048,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": "float32",
            "eos_token_id": 0,
        },
        load=(256, 100, 100),
    ),
    "qwen3-8b": Shape(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "dtype": "bfloat16",
            "eos_token_id": 0,
        },
        load=(256, 550, 64),
    ),
    "llama-3.1-8b": Shape(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": "bfloat16",
            "eos_token_id": 0,
        },
        load=(256, 1000, 1000),
    ),
    "qwen3-30b-a3b": Shape(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "dtype": "bfloat16",
            "eos_token_id": 0,
        },
        load=(256, 512, 128),
    ),
    "mixtral-8x7b": Shape(
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "dtype": "bfloat16",
            "eos_token_id": 0,
        },
        load=(256, 512, 128),
    ),
    # Published as Qwen3_5MoeForConditionalGeneration; what is left out here is of pictures and of drafts.
    "qwen3.6-35b-a3b": Shape(
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "tie_word_embeddings": False,
            "eos_token_id": 0,
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                "hidden_size": 2048,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 40,
                "full_attention_interval": 4,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4,
                "vocab_size": 248320,
                "max_position_embeddings": 262144,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000000,
                    "partial_rotary_factor": 0.25,
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                },
                "hidden_act": "silu",
                "attention_bias": False,
                "dtype": "bfloat16",
            },
        },
        load=(256, 512, 128),
    ),
    # Its experts in bfloat16, as they are once MXFP4 is read.
    "gpt-oss-20b": Shape(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": True,
            "dtype": "bfloat16",
            "eos_token_id": 0,
        },
        load=(256, 1000, 1000),
    ),
}

_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
# As it is published.
SHAPES["gpt-oss-20b-mxfp4"] = Shape(SHAPES["gpt-oss-20b"].config | _MXFP4, SHAPES["gpt-oss-20b"].load)

# What the benchmarks of a GPU run unless told otherwise.
GPU_SHAPES = ["qwen3-0.6b", "llama-3.1-8b"]


def write_model(shape: str, directory: Path) -> Path:
    """A directory that `bequest serve --load-format dummy` takes."""
    return write_config(SHAPES[shape].config, directory)


def write_config(config: dict[str, Any], directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    # Every token of the vocabulary is a word of its own, so that text streams at its usual size.
    size = config.get("text_config", config)["vocab_size"]
    vocabulary = {f"<{i}>" if i < 256 else f"Ġw{i}": i for i in range(size)}
    for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        del vocabulary[f"<{i}>"]
        vocabulary[character] = i
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As the tokenizers of real checkpoints have it: an end token is no text.
    if "eos_token_id" in config:
        tokenizer.add_special_tokens([tokenizer.id_to_token(config["eos_token_id"])])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
