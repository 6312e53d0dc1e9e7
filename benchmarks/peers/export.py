"""Writes the model of a GGUF file of the Llama family as a Hugging Face directory in float32, for the engines that read
no GGUF. Without a tokenizer: the benchmark speaks in tokens."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from bequest.engine.models.load import open_checkpoint
from bequest.engine.text import load_text


def export_model(source: Path, target: Path) -> None:
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    if config.architecture != "llama":
        raise SystemExit(f"{source}: cannot export {config.architecture}, only llama")
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    target.mkdir()
    (target / "config.json").write_text(json.dumps(description))
    tensors = {name: checkpoint.source.load(name) for name in checkpoint.source.names()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def export_tokenizer(source: Path, target: Path) -> None:
    """For engines that insist on one."""
    text = load_text(source)
    text.tokenizer.backend.save(str(target / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
