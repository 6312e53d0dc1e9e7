"""BART, and mBART's variant of it: learned positions, layer norms, biases everywhere.

BART norms behind each sublayer; mBART before it, with one more norm at the end of each stack. Whisper's layers
(whisper.py) are mBART's under the same names, but for one bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bequest.engine.models.backend import CpuBackend
from bequest.engine.models.batch import EncoderInputs, ModelInput
from bequest.engine.models.encoder_decoder import EncoderDecoder, PostNorm, PreNorm, load_layers, tap_at
from bequest.engine.models.encoder_decoder_config import BartConfig, EncoderConfig, EncoderDecoderConfig
from bequest.engine.models.layers import Embedding, LayerNorm, Linear, Loader, RowTable
from bequest.engine.models.sublayers import CrossAttention, CrossLayer, EncoderLayer, FeedForward, SelfAttention

FIRST_POSITION = 2  # the row of position 0: the first two are left over from a padding token
FINAL_BIAS = "final_logits_bias"


class Bart(EncoderDecoder):
    def __init__(self, config: BartConfig, loader: Loader) -> None:
        """The loader's source has passed check_tensors."""
        self.config = config
        self.stream = PreNorm if config.pre_norm else PostNorm
        self._scale = config.embedding_scale
        self._embedding = Embedding.load(loader, "model.shared")
        self._encoder_positions = position_table(loader, "model.encoder.embed_positions", FIRST_POSITION)
        self._decoder_positions = position_table(loader, "model.decoder.embed_positions", FIRST_POSITION)
        self._encoder_start = LayerNorm.load(loader, "model.encoder.layernorm_embedding", config.norm_eps)
        self._decoder_start = LayerNorm.load(loader, "model.decoder.layernorm_embedding", config.norm_eps)
        self.tables = [self._embedding, self._encoder_positions, self._decoder_positions]
        self.encoder_layers = load_layers(partial(encoder_layer, config, loader), config.encoder.num_layers)
        self.decoder_layers = load_layers(partial(decoder_layer, config, loader), config.num_layers)
        if config.pre_norm:
            self.encoder_norm = LayerNorm.load(loader, "model.encoder.layer_norm", config.norm_eps)
            self.decoder_norm = LayerNorm.load(loader, "model.decoder.layer_norm", config.norm_eps)
        weight = self._embedding.weight if config.tie_word_embeddings else loader.matrix(["lm_head"])
        self.output = Linear(loader.backend, weight, _final_bias(loader))

    def embed_encoder(self, batch: EncoderInputs) -> Tensor:
        assert batch.token_ids is not None, "BART reads text"
        tokens = self._embedding(batch.token_ids, None)
        return self._encoder_start(self._scaled(tokens), self._encoder_positions(batch.positions, None))

    def embed_decoder(self, batch: ModelInput) -> Tensor:
        tokens = self._scaled(self._embedding(batch.input_ids, batch.last_tokens))
        # Where norms stand behind, nobody but this one sees the states of layer 0.
        tap = None if self.stream is PreNorm else tap_at(batch, 0, of_output=True)
        return self._decoder_start(tokens, self._decoder_positions(batch.positions, None), tap)

    def _scaled(self, tokens: Tensor) -> Tensor:
        return tokens if self._scale == 1.0 else tokens * self._scale


def _final_bias(loader: Loader) -> Tensor | None:
    """Of the logits, [V]: a leftover in most checkpoints, all zeros."""
    if FINAL_BIAS not in loader.source.names():
        return None
    values = loader.source.load(FINAL_BIAS).flatten()
    return loader.backend.vector(values, loader.dtype) if values.any() else None


def position_table(loader: Loader, name: str, first: int = 0) -> Embedding:
    """Rows by position; the checkpoint's row `first` is that of position 0."""
    rows = loader.source.load(f"{name}.weight")[first:]
    if isinstance(loader.backend, CpuBackend):
        return RowTable(loader.backend, rows, loader.dtype)
    return Embedding(loader.backend, loader.backend.matrix([rows], loader.dtype))


def _projection(loader: Loader, names: Sequence[str], width: int) -> Linear:
    """Matrices of `width` outputs each, stacked; where one has no bias it gets zeros."""
    biased = loader.source.names()
    parts = [loader.source.load(f"{name}.bias") if f"{name}.bias" in biased else torch.zeros(width) for name in names]
    bias = loader.backend.vector(torch.cat([part.float() for part in parts]), loader.dtype)
    return Linear(loader.backend, loader.matrix(names), bias)


def _attention(config: EncoderDecoderConfig, loader: Loader, name: str, num_heads: int) -> SelfAttention:
    qkv = _projection(loader, [f"{name}.{part}_proj" for part in "qkv"], num_heads * config.head_dim)
    return SelfAttention(qkv, Linear.load(loader, [f"{name}.out_proj"], True), num_heads, config.attention_scale)


def _feed_forward(config: EncoderDecoderConfig, loader: Loader, prefix: str) -> FeedForward:
    up, down = (Linear.load(loader, [prefix + name], has_bias=True) for name in ("fc1", "fc2"))
    return FeedForward(up, down, config.activation, gated=False)


def encoder_layer(config: EncoderDecoderConfig, loader: Loader, layer: int) -> EncoderLayer:
    prefix = f"model.encoder.layers.{layer}."
    return EncoderLayer(
        LayerNorm.load(loader, prefix + "self_attn_layer_norm", config.norm_eps),
        _attention(config, loader, prefix + "self_attn", config.encoder.num_heads),
        LayerNorm.load(loader, prefix + "final_layer_norm", config.norm_eps),
        _feed_forward(config, loader, prefix),
    )


def decoder_layer(config: EncoderDecoderConfig, loader: Loader, layer: int) -> CrossLayer:
    prefix = f"model.decoder.layers.{layer}."
    cross, width = prefix + "encoder_attn.", config.num_heads * config.head_dim
    return CrossLayer(
        LayerNorm.load(loader, prefix + "self_attn_layer_norm", config.norm_eps),
        _attention(config, loader, prefix + "self_attn", config.num_heads),
        LayerNorm.load(loader, prefix + "encoder_attn_layer_norm", config.norm_eps),
        CrossAttention(
            Linear.load(loader, [cross + "q_proj"], has_bias=True),
            _projection(loader, [cross + "k_proj", cross + "v_proj"], width),
            Linear.load(loader, [cross + "out_proj"], has_bias=True),
            config.num_heads,
            config.attention_scale,
            layer,
        ),
        LayerNorm.load(loader, prefix + "final_layer_norm", config.norm_eps),
        _feed_forward(config, loader, prefix),
    )


def expected_tensors(config: BartConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.shared.weight": (config.vocab_size, hidden)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for stack, positions in (("encoder", config.encoder.max_len), ("decoder", config.max_position)):
        shapes[f"model.{stack}.embed_positions.weight"] = (FIRST_POSITION + positions, hidden)
        for name in ("layernorm_embedding", "layer_norm") if config.pre_norm else ("layernorm_embedding",):
            shapes |= {f"model.{stack}.{name}.{part}": (hidden,) for part in ("weight", "bias")}
    return shapes | layer_tensors(config, unbiased=())


def layer_tensors(config: EncoderDecoderConfig, unbiased: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The tensors of all layers; projections named in `unbiased` have no bias."""
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: EncoderConfig | EncoderDecoderConfig
    for stack, sizes in (("encoder", config.encoder), ("decoder", config)):
        layer = _one_layer(config.hidden_size, sizes, ("self_attn", "encoder_attn")[: 1 + (stack == "decoder")])
        for index in range(sizes.num_layers):
            prefix = f"model.{stack}.layers.{index}."
            shapes |= {prefix + name: shape for name, shape in layer.items()}
    return {name: shape for name, shape in shapes.items() if not any(name.endswith(f"{u}.bias") for u in unbiased)}


def _one_layer(
    hidden: int, sizes: EncoderConfig | EncoderDecoderConfig, attentions: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    attended, inner = sizes.num_heads * sizes.head_dim, sizes.intermediate_size
    matrices = {"fc1": (inner, hidden), "fc2": (hidden, inner)}
    norms = ["final_layer_norm"]
    for name in attentions:
        matrices |= {f"{name}.{part}_proj": (attended, hidden) for part in "qkv"}
        matrices[f"{name}.out_proj"] = (hidden, attended)
        norms.append(f"{name}_layer_norm")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    return shapes | {f"{name}.{part}": (hidden,) for name in norms for part in ("weight", "bias")}
