"""Reads config.json of encoder-decoder models in the Hugging Face format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypedDict

from bequest.engine.errors import ModelError
from bequest.engine.models.config import Activation, parse_activation
from bequest.engine.models.encoder_decoder_config import (
    BartConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    T5Config,
    WhisperConfig,
)
from bequest.engine.models.fields import Fields

LAYER_NORM_EPS = 1e-5  # torch's, which these families leave as it is
# A bias over clamped distances has no longest input; this bounds what a request may ask for.
T5_MAX_LEN = 4096
FRAMES_PER_STATE = 2  # the stride of Whisper's second convolution


# That change what decoder-only models compute, or how weights are stored; here nobody reads them.
_UNSUPPORTED = ("quantization_config", "layer_types", "num_key_value_heads", "head_dim")


def _refuse_unsupported(fields: Fields) -> None:
    if found := [f"{name} = {fields.raw(name)!r}" for name in _UNSUPPORTED if fields.has(name)]:
        raise ModelError(f"{fields.source} asks for what encoder-decoder models do not have: {'; '.join(found)}")


def parse_bart(fields: Fields, architecture: str, *, pre_norm: bool) -> BartConfig:
    hidden_size = fields.integer("d_model")
    max_position = fields.integer("max_position_embeddings")
    scaled = fields.boolean("scale_embedding", False)
    return BartConfig(
        **_decoder_sizes(fields, architecture),
        max_position=max_position,
        encoder=_encoder(fields, max_position, takes="tokens"),
        pre_norm=pre_norm,
        embedding_scale=math.sqrt(hidden_size) if scaled else 1.0,
    )


def parse_whisper(fields: Fields, architecture: str) -> WhisperConfig:
    if not fields.boolean("tie_word_embeddings", True):
        raise ModelError(f"{fields.source}: tie_word_embeddings must be true: Whisper's output is its embedding")
    return WhisperConfig(
        **_decoder_sizes(fields, architecture),
        max_position=fields.integer("max_target_positions"),
        encoder=_encoder(fields, fields.integer("max_source_positions"), takes="audio"),
    )


def parse_t5(fields: Fields, architecture: str, *, multilingual: bool = False) -> T5Config:
    """`multilingual`: mT5, which is version 1.1 whatever its files leave out."""
    _refuse_unsupported(fields)
    hidden_size = fields.integer("d_model")
    num_layers, num_heads, head_dim = (fields.integer(name) for name in ("num_layers", "num_heads", "d_kv"))
    intermediate_size = fields.integer("d_ff")
    gated, activation = _t5_activation(fields, "gated-gelu" if multilingual else "relu")
    # Version 1.0 ties its output matrix to the embedding and scales what it multiplies, which 1.1 gave up with the tie.
    tied = fields.boolean("tie_word_embeddings", True)
    scaled = not multilingual and fields.boolean("scale_decoder_outputs", tied)
    num_buckets, max_distance = _t5_distances(fields)
    return T5Config(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=fields.integer("num_decoder_layers", num_layers),
        num_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=fields.integer("vocab_size"),
        max_position=T5_MAX_LEN,
        norm_eps=fields.number("layer_norm_epsilon", 1e-6),
        activation=activation,
        attention_scale=1.0,
        tie_word_embeddings=tied,
        encoder=EncoderConfig("tokens", num_layers, num_heads, head_dim, intermediate_size, T5_MAX_LEN),
        gated=gated,
        num_buckets=num_buckets,
        max_distance=max_distance,
        output_scale=hidden_size**-0.5 if scaled else 1.0,
    )


def _t5_distances(fields: Fields) -> tuple[int, int]:
    """How many buckets there are, and the distance that the last one begins at."""
    num_buckets = fields.integer("relative_attention_num_buckets", 32)
    max_distance = fields.integer("relative_attention_max_distance", 128)
    if num_buckets < 4:
        raise ModelError(f"{fields.source}: relative_attention_num_buckets must be at least 4, not {num_buckets}")
    exact = num_buckets // 2  # of a decoder: so many distances have a bucket each
    if max_distance <= exact:
        raise ModelError(
            f"{fields.source}: relative_attention_max_distance must be above {exact}, half of "
            f"relative_attention_num_buckets, not {max_distance}"
        )
    return num_buckets, max_distance


def _t5_activation(fields: Fields, default: str) -> tuple[bool, Activation]:
    """Whether there is a gate, and its activation: `relu`, `gated-gelu` (which means the approximation)."""
    name = fields.string("feed_forward_proj", default)
    gated = name.startswith("gated-")
    kind = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    activation = parse_activation(kind, fields.source)
    # Newer files say it twice, and readers differ in which of them they go by.
    if parse_activation(fields.string("dense_act_fn", kind), fields.source) != activation:
        raise ModelError(f"{fields.source}: dense_act_fn is not what feed_forward_proj = {name!r} says")
    if fields.boolean("is_gated_act", gated) != gated:
        raise ModelError(f"{fields.source}: is_gated_act is not what feed_forward_proj = {name!r} says")
    return gated, activation


class _DecoderSizes(TypedDict):
    """Of EncoderDecoderConfig, as BART and Whisper spell them."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    activation: Activation
    attention_scale: float
    tie_word_embeddings: bool


def _decoder_sizes(fields: Fields, architecture: str) -> _DecoderSizes:
    _refuse_unsupported(fields)
    hidden_size, num_heads = fields.integer("d_model"), fields.integer("decoder_attention_heads")
    head_dim = _head_dim(fields, "decoder_attention_heads")
    return {
        "architecture": architecture,
        "hidden_size": hidden_size,
        "num_layers": fields.integer("decoder_layers"),
        "num_heads": num_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("decoder_ffn_dim"),
        "vocab_size": fields.integer("vocab_size"),
        "norm_eps": LAYER_NORM_EPS,
        "activation": parse_activation(fields.string("activation_function", "gelu"), fields.source),
        "attention_scale": head_dim**-0.5,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", True),
    }


def _encoder(fields: Fields, max_len: int, *, takes: Literal["tokens", "audio"]) -> EncoderConfig:
    audio = takes == "audio"
    return EncoderConfig(
        takes,
        num_layers=fields.integer("encoder_layers"),
        num_heads=fields.integer("encoder_attention_heads"),
        head_dim=_head_dim(fields, "encoder_attention_heads"),
        intermediate_size=fields.integer("encoder_ffn_dim"),
        max_len=max_len,
        num_mels=fields.integer("num_mel_bins") if audio else 0,
        frames_per_state=FRAMES_PER_STATE if audio else 1,
    )


def _head_dim(fields: Fields, heads: str) -> int:
    hidden_size, num_heads = fields.integer("d_model"), fields.integer(heads)
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(f"{fields.source}: d_model {hidden_size} cannot be divided into {heads} {num_heads}")
    return hidden_size // num_heads


# By architecture; families/table.py says what each is made of.
PARSERS: Mapping[str, Callable[[Fields, str], EncoderDecoderConfig]] = {
    "BartForConditionalGeneration": partial(parse_bart, pre_norm=False),
    "MBartForConditionalGeneration": partial(parse_bart, pre_norm=True),
    "T5ForConditionalGeneration": parse_t5,
    "MT5ForConditionalGeneration": partial(parse_t5, multilingual=True),
    "WhisperForConditionalGeneration": parse_whisper,
}
