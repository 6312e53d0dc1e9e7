"""BART, and mBART's variant of it: learned positions, layer norms, biases everywhere.

BART norms behind each sublayer; mBART before it, with one more norm at the end of each stack. Whisper's layers
(whisper.py) are mBART's under the same names, but for one bias.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Heads, Norm
from bequest.engine.layers.spec import Attention, CrossAttention, FeedForward, LayerSpec, Mixer, Sublayer
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Table, Weight
from bequest.engine.models.batch import EncoderInputs, ModelInput
from bequest.engine.models.encoder_decoder import EncoderDecoderParts, StackParts
from bequest.engine.models.encoder_decoder_config import BartConfig, EncoderConfig, EncoderDecoderConfig
from bequest.engine.models.families.embeddings import embeddings
from bequest.engine.models.reader import Reader

FIRST_POSITION = 2  # the row of position 0: the first two are left over from a padding token
FINAL_BIAS = "final_logits_bias"


def describe(config: BartConfig, read: Reader) -> EncoderDecoderParts:
    encoder_table, decoder_table, output = embeddings(config, read, "model.")
    bias = read.optional(FINAL_BIAS)  # [1, V]: a leftover in most checkpoints, all zeros
    if bias is not None and bias.any():
        output = output.with_bias(read.placed(bias.flatten(), as_weight=True))
    inputs = BartInputs(
        _start(config, read.under("model.encoder."), encoder_table, config.encoder.max_len),
        _start(config, read.under("model.decoder."), decoder_table, config.max_position),
        norms_follow=not config.pre_norm,
    )
    encoder, decoder = (stack(config, read, name, pre_norm=config.pre_norm) for name in ("encoder", "decoder"))
    return EncoderDecoderParts(inputs, encoder, decoder, output)


def _start(config: BartConfig, at: Reader, table: Weight, num_positions: int) -> Start:
    positions = at.table("embed_positions", num_positions, config.hidden_size, first=FIRST_POSITION)
    norm = at.norm("layernorm_embedding", config.hidden_size, config.norm_eps, has_bias=True)
    return Start(table, positions, norm, config.embedding_scale)


@dataclass(frozen=True, slots=True)
class Start:
    """Tokens and positions, normed."""

    table: Weight
    positions: Table
    norm: Norm
    scale: float  # of the tokens' rows

    def rows(self, ids: Tensor, last_tokens: Tensor | None) -> Tensor:
        tokens = self.table.rows(ids, last_tokens)
        return tokens if self.scale == 1.0 else tokens * self.scale


@dataclass(frozen=True, slots=True)
class BartInputs:
    """Inputs."""

    encoder_start: Start
    decoder_start: Start
    norms_follow: bool

    def encoder(self, batch: EncoderInputs, ops: Ops) -> Stream:
        assert batch.token_ids is not None, "BART reads text"
        start = self.encoder_start
        stream = Stream(ops, start.positions.rows(batch.positions), start.rows(batch.token_ids, None))
        stream.become_normed(start.norm)
        return stream

    def decoder(self, batch: ModelInput, ops: Ops) -> Stream:
        start = self.decoder_start
        tokens = start.rows(batch.input_ids, batch.last_tokens)
        stream = Stream(ops, start.positions.rows(batch.positions), tokens)
        # Where norms stand behind, nobody but this one sees the states of layer 0.
        stream.become_normed(start.norm, batch.tap_of_output(0) if self.norms_follow else None)
        return stream


def stack(
    config: EncoderDecoderConfig, read: Reader, name: str, *, pre_norm: bool, key_bias: bool = True
) -> StackParts:
    """The layers of "encoder" or "decoder"; `key_bias`: projections of keys have one as the others do."""
    at = read.under(f"model.{name}.")
    sizes: EncoderConfig | EncoderDecoderConfig = config.encoder if name == "encoder" else config
    maker = LayerMaker(config, sizes, at, has_cross=name == "decoder", pre_norm=pre_norm, key_bias=key_bias)
    layers = read.each(maker.layer, sizes.num_layers)
    norm = at.norm("layer_norm", config.hidden_size, config.norm_eps, has_bias=True) if pre_norm else None
    return StackParts(layers, norm)


class LayerMaker:
    """The layers of one stack."""

    def __init__(
        self,
        config: EncoderDecoderConfig,
        sizes: EncoderConfig | EncoderDecoderConfig,
        read: Reader,
        *,
        has_cross: bool,
        pre_norm: bool,
        key_bias: bool,
    ) -> None:
        self._config, self._sizes, self._read = config, sizes, read
        self._has_cross, self._pre_norm, self._key_bias = has_cross, pre_norm, key_bias
        self._width = sizes.num_heads * sizes.head_dim

    def layer(self, index: int) -> LayerSpec:
        at = self._read.under(f"layers.{index}.")
        # The keys and values of an encoder's layers use one place in turns.
        heads = Heads(
            num_heads=self._sizes.num_heads,
            scale=self._config.attention_scale,
            cache_layer=index if self._has_cross else 0,
        )
        sublayers = [self._sublayer(at, "self_attn_layer_norm", self._attention(at.under("self_attn."), heads))]
        if self._has_cross:
            cross = self._cross(at.under("encoder_attn."), heads)
            sublayers.append(self._sublayer(at, "encoder_attn_layer_norm", cross))
        sublayers.append(self._sublayer(at, "final_layer_norm", self._feed_forward(at)))
        return LayerSpec(index, tuple(sublayers))

    def _sublayer(self, at: Reader, name: str, mixer: Mixer) -> Sublayer:
        norm = at.norm(name, self._config.hidden_size, self._config.norm_eps, has_bias=True)
        return Sublayer(mixer=mixer, before=norm) if self._pre_norm else Sublayer(mixer=mixer, after=norm)

    def _attention(self, at: Reader, heads: Heads) -> Attention:
        names, biases = ["q_proj", "k_proj", "v_proj"], [True, self._key_bias, True]
        qkv = at.stacked(names, [self._width] * 3, self._config.hidden_size, biases)
        return Attention(qkv, heads, self._output(at))

    def _cross(self, at: Reader, heads: Heads) -> CrossAttention:
        hidden = self._config.hidden_size
        q = at.weight("q_proj", self._width, hidden, has_bias=True)
        kv = at.stacked(["k_proj", "v_proj"], [self._width] * 2, hidden, [self._key_bias, True])
        return CrossAttention(q, kv, heads, self._output(at))

    def _output(self, at: Reader) -> Weight:
        return at.weight("out_proj", self._config.hidden_size, self._width, has_bias=True)

    def _feed_forward(self, at: Reader) -> FeedForward:
        hidden, inner = self._config.hidden_size, self._sizes.intermediate_size
        up = at.weight("fc1", inner, hidden, has_bias=True)
        return FeedForward(up, self._config.activation, at.weight("fc2", hidden, inner, has_bias=True), gated=False)
