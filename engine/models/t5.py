"""T5: version 1.0 (ReLU, output tied to the embedding), 1.1 and Flan (gated GELU, an output matrix of its own).

Positions are a learned bias on the scores of self attention: distances fall into buckets, one value per bucket and
head, shared by all layers of a stack. Scores are not scaled.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from bequest.engine.kernels.cpu_stack import StackEmbedding
from bequest.engine.models.batch import EncoderInputs, ModelInput
from bequest.engine.models.encoder_decoder import EncoderDecoder, PreNorm, load_layers
from bequest.engine.models.encoder_decoder_config import EncoderConfig, T5Config
from bequest.engine.models.layers import Embedding, Linear, Loader, RMSNorm
from bequest.engine.models.sublayers import CrossAttention, CrossLayer, EncoderLayer, FeedForward, SelfAttention

BIAS = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


class T5(EncoderDecoder):
    stream = PreNorm

    def __init__(self, config: T5Config, loader: Loader) -> None:
        """The loader's source has passed check_tensors."""
        self.config = config
        self._output_scale = config.output_scale
        self._embedding = Embedding.load(loader, "shared")
        self.tables = [self._embedding]
        self.encoder_layers = load_layers(partial(_encoder_layer, config, loader), config.encoder.num_layers)
        self.decoder_layers = load_layers(partial(_decoder_layer, config, loader), config.num_layers)
        self.encoder_norm = RMSNorm.load(loader, "encoder.final_layer_norm", config.norm_eps)
        self.decoder_norm = RMSNorm.load(loader, "decoder.final_layer_norm", config.norm_eps)
        device = loader.backend.device
        self.encoder_bias = bias_table(loader.source.load(BIAS.format("encoder")), config, both_ways=True).to(device)
        self.decoder_bias = bias_table(loader.source.load(BIAS.format("decoder")), config, both_ways=False).to(device)
        tied = config.tie_word_embeddings
        self.output = self._embedding.as_linear() if tied else Linear.load(loader, ["lm_head"], has_bias=False)

    def embed_encoder(self, batch: EncoderInputs) -> Tensor:
        assert batch.token_ids is not None, "T5 reads text"
        return self._embedding(batch.token_ids, None)

    def embed_decoder(self, batch: ModelInput) -> Tensor:
        return self._embedding(batch.input_ids, batch.last_tokens)

    def decoder_rows(self, batch: ModelInput) -> StackEmbedding:
        return StackEmbedding(batch.input_ids, self._embedding.weight, batch.positions, rows=None)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output(hidden if self._output_scale == 1.0 else hidden * self._output_scale)


def _attention(config: T5Config, loader: Loader, name: str, num_heads: int) -> SelfAttention:
    qkv = Linear.load(loader, [f"{name}.{part}" for part in "qkv"], has_bias=False)
    output = Linear.load(loader, [f"{name}.o"], has_bias=False)
    return SelfAttention(qkv, output, num_heads, config.attention_scale)


def _feed_forward(config: T5Config, loader: Loader, name: str) -> FeedForward:
    inputs = ["wi_0", "wi_1"] if config.gated else ["wi"]
    up = Linear.load(loader, [f"{name}.{part}" for part in inputs], has_bias=False)
    return FeedForward(up, Linear.load(loader, [f"{name}.wo"], has_bias=False), config.activation, config.gated)


def _encoder_layer(config: T5Config, loader: Loader, layer: int) -> EncoderLayer:
    prefix = f"encoder.block.{layer}.layer."
    return EncoderLayer(
        RMSNorm.load(loader, prefix + "0.layer_norm", config.norm_eps),
        _attention(config, loader, prefix + "0.SelfAttention", config.encoder.num_heads),
        RMSNorm.load(loader, prefix + "1.layer_norm", config.norm_eps),
        _feed_forward(config, loader, prefix + "1.DenseReluDense"),
    )


def _decoder_layer(config: T5Config, loader: Loader, layer: int) -> CrossLayer:
    prefix = f"decoder.block.{layer}.layer."
    cross = prefix + "1.EncDecAttention."
    return CrossLayer(
        RMSNorm.load(loader, prefix + "0.layer_norm", config.norm_eps),
        _attention(config, loader, prefix + "0.SelfAttention", config.num_heads),
        RMSNorm.load(loader, prefix + "1.layer_norm", config.norm_eps),
        CrossAttention(
            Linear.load(loader, [cross + "q"], has_bias=False),
            Linear.load(loader, [cross + "k", cross + "v"], has_bias=False),
            Linear.load(loader, [cross + "o"], has_bias=False),
            config.num_heads,
            config.attention_scale,
            layer,
        ),
        RMSNorm.load(loader, prefix + "2.layer_norm", config.norm_eps),
        _feed_forward(config, loader, prefix + "2.DenseReluDense"),
    )


def bias_table(values: Tensor, config: T5Config, *, both_ways: bool) -> Tensor:
    """Values [buckets, NQ] of a stack as a table over distances: [NQ, 2 R + 1] float32, R the largest that counts."""
    reach = config.max_distance
    distances = torch.arange(-reach, reach + 1)  # key less query
    return values.float().T[:, _buckets(distances, config, both_ways)].contiguous()


def _buckets(distances: Tensor, config: T5Config, both_ways: bool) -> Tensor:
    """The bucket of each distance. Half of the buckets are of one distance each, the others grow like powers; an
    encoder has as many for keys ahead as for keys behind, a decoder has none ahead."""
    num_buckets, ahead = config.num_buckets, torch.zeros_like(distances)
    if both_ways:
        num_buckets //= 2
        ahead = (distances > 0) * num_buckets
        steps = distances.abs()
    else:
        steps = (-distances).clamp(min=0)
    exact = num_buckets // 2
    growth = (steps.float() / exact).log() / math.log(config.max_distance / exact) * (num_buckets - exact)
    far = (exact + growth.long()).clamp(max=num_buckets - 1)
    return ahead + torch.where(steps < exact, steps, far)


def expected_tensors(config: T5Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (config.vocab_size, hidden)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    sizes: EncoderConfig | T5Config
    for stack, sizes, last in (("encoder", config.encoder, 1), ("decoder", config, 2)):  # last: the feed-forward
        inner, attended = sizes.intermediate_size, sizes.num_heads * sizes.head_dim
        shapes[BIAS.format(stack)] = (config.num_buckets, sizes.num_heads)
        shapes[f"{stack}.final_layer_norm.weight"] = (hidden,)
        for layer in range(sizes.num_layers):
            prefix = f"{stack}.block.{layer}.layer."
            for sublayer, name in enumerate(("SelfAttention", "EncDecAttention")[:last]):
                shapes |= {f"{prefix}{sublayer}.{name}.{part}.weight": (attended, hidden) for part in "qkv"}
                shapes[f"{prefix}{sublayer}.{name}.o.weight"] = (hidden, attended)
            for part in ("wi_0", "wi_1") if config.gated else ("wi",):
                shapes[f"{prefix}{last}.DenseReluDense.{part}.weight"] = (inner, hidden)
            shapes[f"{prefix}{last}.DenseReluDense.wo.weight"] = (hidden, inner)
            shapes |= {f"{prefix}{sublayer}.layer_norm.weight": (hidden,) for sublayer in range(last + 1)}
    return shapes
