"""Tiny random encoder-decoder checkpoints, to be compared with the transformers library."""

from __future__ import annotations

import copy
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.tiny_models import unset

VOCAB_SIZE = 320

T5_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "d_kv": 16,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
STACKS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
BART_SHAPE = STACKS | {"max_position_embeddings": 64}
WHISPER_SHAPE = STACKS | {"max_source_positions": 41, "max_target_positions": 64, "num_mel_bins": 10}

# name → (model class, its configuration)
TINY_ENCODER_DECODERS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "bart": (BartForConditionalGeneration, BartConfig(**BART_SHAPE)),
    "bart-scaled-relu-untied": (
        BartForConditionalGeneration,
        BartConfig(**BART_SHAPE, scale_embedding=True, activation_function="relu"),
    ),
    "mbart": (MBartForConditionalGeneration, MBartConfig(**BART_SHAPE, scale_embedding=True)),
    # Each stack has an embedding of its own.
    "mbart-apart-untied": (MBartForConditionalGeneration, MBartConfig(**BART_SHAPE, tie_word_embeddings=False)),
    "whisper": (WhisperForConditionalGeneration, WhisperConfig(**WHISPER_SHAPE)),
    "t5": (T5ForConditionalGeneration, T5Config(**T5_SHAPE)),
    "t5-gated-untied": (
        T5ForConditionalGeneration,
        T5Config(**T5_SHAPE, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "mt5-untied": (MT5ForConditionalGeneration, MT5Config(**T5_SHAPE, eos_token_id=2)),
}


def make_encoder_decoder(name: str) -> PreTrainedModel:
    """The model in transformers, float32, the same weights on every call."""
    model_class, config = TINY_ENCODER_DECODERS[name]
    model = unset(lambda: model_class(copy.deepcopy(config)))  # a test may change it
    if name.endswith("untied"):
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Wide enough that a mistake anywhere shows in the logits; norms and biases are not left at 1 and 0.
            centre = 1.0 if "norm" in parameter_name and parameter_name.endswith("weight") else 0.0
            width = 1.0 if "relative_attention_bias" in parameter_name else 0.15
            parameter.copy_(centre + width * torch.randn(parameter.shape, generator=random))
        if name == "bart-scaled-relu-untied":
            model.final_logits_bias.normal_(generator=random)
    return model.eval()


def save_encoder_decoder(name: str, directory: Path) -> Path:
    """Writes config.json and the weights, as the model has them (save_pretrained would drop what it takes for tied)."""
    model = make_encoder_decoder(name)
    model.config.architectures = [type(model).__name__]
    config = model.config.to_dict()
    config.pop("scale_decoder_outputs", None)  # files of older versions say it by the tie alone
    config["tie_word_embeddings"] = not name.endswith("untied")
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    if name in ("t5", "whisper"):  # the others hold tied tensors twice, as some checkpoints do
        for key in ("lm_head.weight", "proj_out.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            tensors.pop(key, None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
