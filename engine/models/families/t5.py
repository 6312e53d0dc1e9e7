"""T5: version 1.0 (ReLU, output tied to the embedding), 1.1 and Flan (gated GELU, an output matrix of its own).

Positions are a learned bias on the scores of self attention: distances fall into buckets, one value per bucket and
head, shared by all layers of a stack. Scores are not scaled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Heads
from bequest.engine.layers.spec import Attention, CrossAttention, FeedForward, LayerSpec, Mixer, Sublayer
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight
from bequest.engine.models.batch import EncoderInputs, ModelInput
from bequest.engine.models.encoder_decoder import EncoderDecoderParts, StackParts
from bequest.engine.models.encoder_decoder_config import EncoderConfig, T5Config
from bequest.engine.models.families.embeddings import embeddings
from bequest.engine.models.reader import Reader

BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def describe(config: T5Config, read: Reader) -> EncoderDecoderParts:
    encoder_table, decoder_table, output = embeddings(config, read)
    encoder, decoder = (_stack(config, read, name) for name in ("encoder", "decoder"))
    return EncoderDecoderParts(T5Inputs(encoder_table, decoder_table), encoder, decoder, output, config.output_scale)


@dataclass(frozen=True, slots=True)
class T5Inputs:
    """Inputs."""

    encoder_table: Weight
    decoder_table: Weight

    def encoder(self, batch: EncoderInputs, ops: Ops) -> Stream:
        assert batch.token_ids is not None, "T5 reads text"
        return Stream(ops, self.encoder_table.rows(batch.token_ids))

    def decoder(self, batch: ModelInput, ops: Ops) -> StartRows:
        return StartRows(batch.input_ids, self.decoder_table, batch.last_tokens)


def _stack(config: T5Config, read: Reader, name: str) -> StackParts:
    at = read.under(f"{name}.")
    sizes: EncoderConfig | T5Config = config.encoder if name == "encoder" else config
    is_decoder = name == "decoder"
    values = at.tensor(BIAS, (config.num_buckets, sizes.num_heads))
    bias = read.placed(bias_table(values, config, both_ways=not is_decoder))
    layers = read.each(partial(_layer, config, sizes, at, bias), sizes.num_layers)
    return StackParts(layers, at.norm("final_layer_norm", config.hidden_size, config.norm_eps))


def _layer(config: T5Config, sizes: EncoderConfig | T5Config, at: Reader, bias: Tensor, index: int) -> LayerSpec:
    """Of the decoder, where the sizes are its own."""
    at = at.under(f"block.{index}.layer.")
    has_cross = sizes is config
    heads = Heads(
        num_heads=sizes.num_heads,
        scale=config.attention_scale,
        cache_layer=index if has_cross else 0,  # the layers of an encoder use one place in turns
        window=config.sliding_windows[index] if has_cross else 0,
        bias=bias,
    )
    width, hidden = sizes.num_heads * sizes.head_dim, config.hidden_size
    own = at.under("0.SelfAttention.")
    mixers: list[Mixer] = [
        Attention(own.stacked(list("qkv"), [width] * 3, hidden, [False] * 3), heads, own.weight("o", hidden, width))
    ]
    if has_cross:
        cross = at.under("1.EncDecAttention.")
        q, kv = cross.weight("q", width, hidden), cross.stacked(list("kv"), [width] * 2, hidden, [False] * 2)
        plain = replace(heads, bias=None, window=0)
        mixers.append(CrossAttention(q, kv, plain, cross.weight("o", hidden, width)))
    mixers.append(_feed_forward(config, sizes.intermediate_size, at.under(f"{len(mixers)}.DenseReluDense.")))
    return LayerSpec(
        index,
        tuple(
            Sublayer(before=at.norm(f"{number}.layer_norm", hidden, config.norm_eps), mixer=mixer)
            for number, mixer in enumerate(mixers)
        ),
    )


def _feed_forward(config: T5Config, inner: int, at: Reader) -> FeedForward:
    names = ["wi_0", "wi_1"] if config.gated else ["wi"]
    up = at.stacked(names, [inner] * len(names), config.hidden_size, [False] * len(names))
    return FeedForward(up, config.activation, at.weight("wo", config.hidden_size, inner), config.gated)


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
