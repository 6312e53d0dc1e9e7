"""The encoder-decoder families: what BART, T5 and Whisper share.

An encoder reads a whole input at once; its states leave through `write_cross`, as keys and values of every decoder
layer in a table of the cache, and are not needed again. The decoder is then a decoder like any other whose layers also
attend to that table. Owned by the device thread. No row of a result depends on the other rows of the batch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from engine.kernels.hidden_tap import LayerTap
from engine.models.backend import Activation, AttentionWork, Matrix, Projected
from engine.models.batch import EncoderInputs, ModelInput
from engine.models.encoder_decoder_config import EncoderDecoderConfig
from engine.models.layers import Embedding, LayerNorm, Linear, RMSNorm

Norm = LayerNorm | RMSNorm
Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class SelfKeys:
    """Where a layer's keys and values go and what its queries see of them."""

    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int64
    kv_cache: Tensor  # [NB, L, 2, NKV, BS, D]
    layer: int
    work: AttentionWork
    bias: Tensor | None  # [NQ, 2 R + 1] float32


class SelfAttention:
    def __init__(self, qkv: Linear, output: Linear, num_heads: int, scale: float) -> None:
        self.qkv = qkv  # [3 NQ D, H]
        self.output = output
        self.num_heads = num_heads
        self.scale = scale

    def __call__(self, x: Tensor, keys: SelfKeys) -> Tensor:
        """[T, H] → [T, H]"""
        backend = self.qkv.backend
        projected = Projected(self.qkv(x), keys.positions, keys.slots, keys.kv_cache, keys.layer)
        q = backend.prepare_qkv(projected, self.num_heads, None, None)  # [T, NQ, D]
        attended = backend.attention(q, keys.kv_cache, keys.layer, keys.work, self.scale, keys.bias)
        return self.output(attended.flatten(1))

    @property
    def matrices(self) -> list[Matrix]:
        return [self.qkv.weight, self.output.weight]


class CrossAttention:
    def __init__(self, q: Linear, kv: Linear, output: Linear, num_heads: int, scale: float, layer: int) -> None:
        self.q = q
        self.kv = kv  # [2 NQ D, H]
        self.output = output
        self.num_heads = num_heads
        self.scale = scale
        self.layer = layer

    def write(self, states: Tensor, slots: Tensor, kv_cache: Tensor) -> None:
        """Keys and values of states [E, H] to slots [E]."""
        heads = self.kv(states).view(states.shape[0], 2 * self.num_heads, -1)  # [E, 2 NQ, D]
        keys, values = heads[:, : self.num_heads], heads[:, self.num_heads :]
        self.kv.backend.write_kv(keys, values, kv_cache, self.layer, slots)

    def __call__(self, x: Tensor, kv_cache: Tensor, work: AttentionWork) -> Tensor:
        """[T, H] → [T, H]"""
        q = self.q(x).view(x.shape[0], self.num_heads, -1)  # [T, NQ, D]
        attended = self.q.backend.attention(q, kv_cache, self.layer, work, self.scale)
        return self.output(attended.flatten(1))

    @property
    def matrices(self) -> list[Matrix]:
        return [self.q.weight, self.kv.weight, self.output.weight]


class FeedForward:
    def __init__(self, up: Linear, down: Linear, activation: Activation, gated: bool) -> None:
        self.up = up  # [I, H], or gate and up [2 I, H]
        self.down = down  # [H, I]
        self.activation = activation
        self.gated = gated

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H]"""
        return self.up.backend.feed_forward(x, self.up.product, self.down.product, self.activation, self.gated)

    @property
    def matrices(self) -> list[Matrix]:
        return [self.up.weight, self.down.weight]


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm
    mlp: FeedForward

    @property
    def matrices(self) -> list[Matrix]:
        return self.attention.matrices + self.mlp.matrices


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """Of a decoder."""

    attention_norm: Norm
    attention: SelfAttention
    cross_norm: Norm
    cross: CrossAttention
    mlp_norm: Norm
    mlp: FeedForward

    @property
    def matrices(self) -> list[Matrix]:
        return self.attention.matrices + self.cross.matrices + self.mlp.matrices


class PreNorm:
    """A residual stream to which each sublayer adds f(norm(stream))."""

    def __init__(self, x: Tensor) -> None:
        self._added = x  # [T, H], what the last sublayer adds
        self._sum = torch.zeros_like(x)  # what all before it have

    def apply(
        self,
        norm: Norm,
        function: Callable[[Tensor], Tensor],
        before: LayerTap | None = None,
        after: LayerTap | None = None,
    ) -> None:
        """`before` wants the state that the sublayer reads, `after` the one that it leaves; each stream has one."""
        self._added = function(norm(self._added, self._sum, before))

    def state(self) -> Tensor:
        """[T, H]"""
        return self._sum + self._added

    def finish(self, norm: Norm | None, tap: LayerTap | None = None) -> Tensor:
        """[T, H]; the stream is not used any more."""
        assert norm is not None, "without a last norm nobody would add the last sublayer"
        return norm(self._added, self._sum, tap)


class PostNorm:
    """A stream of which each sublayer makes norm(stream + f(stream))."""

    def __init__(self, x: Tensor) -> None:
        self._state = x  # [T, H]

    def apply(
        self,
        norm: Norm,
        function: Callable[[Tensor], Tensor],
        before: LayerTap | None = None,
        after: LayerTap | None = None,
    ) -> None:
        self._state = norm(function(self._state), self._state, after)

    def state(self) -> Tensor:
        return self._state

    def finish(self, norm: Norm | None, tap: LayerTap | None = None) -> Tensor:
        assert norm is None, "the last sublayer has normed it, and its tap has the result"
        return self._state


# Called with the number of layers behind a state of the encoder and the state [E, H]: 0 is what the first layer reads,
# the last one is the result.
Tap = Callable[[int, Tensor], None]


class EncoderDecoder(ABC):
    """A family fills these and says how inputs become states."""

    config: EncoderDecoderConfig
    stream: type[PreNorm | PostNorm]
    encoder_layers: list[EncoderLayer]
    encoder_norm: Norm | None = None
    encoder_bias: Tensor | None = None  # [NQ, 2 R + 1] float32, by distance
    decoder_layers: list[CrossLayer]
    decoder_norm: Norm | None = None
    decoder_bias: Tensor | None = None
    tables: list[Embedding]
    output: Linear  # [V, H]

    @abstractmethod
    def embed_encoder(self, batch: EncoderInputs) -> Tensor:
        """[E, H]"""

    @abstractmethod
    def embed_decoder(self, batch: ModelInput) -> Tensor:
        """[T, H]"""

    def encode(self, batch: EncoderInputs, tap: Tap | None = None) -> Tensor:
        """The encoder's states, [E, H]."""
        keys = SelfKeys(batch.positions, batch.slots, batch.scratch, 0, batch.attention, self.encoder_bias)
        stream = self.stream(self.embed_encoder(batch))
        for index, layer in enumerate(self.encoder_layers):
            if tap is not None:
                tap(index, stream.state())
            stream.apply(layer.attention_norm, partial(layer.attention, keys=keys))
            stream.apply(layer.mlp_norm, layer.mlp)
        states = stream.finish(self.encoder_norm)
        if tap is not None:
            tap(len(self.encoder_layers), states)
        return states

    def write_cross(self, states: Tensor, slots: Tensor, kv_cache: Tensor) -> None:
        """Keys and values of every decoder layer for the encoder's states [E, H], to slots [E] int64 of the cache."""
        for layer in self.decoder_layers:
            layer.cross.write(states, slots, kv_cache)

    def forward(self, batch: ModelInput) -> Tensor:
        """The decoder's states: [T, H], or [R, H] of the rows in `batch.read`. Writes K and V of every token.

        All layers compute all rows: a decoder's prompt is short.
        """
        assert batch.cross is not None, "an encoder-decoder model attends to cross tables"
        work = batch.attention[self.config.sliding_windows[0]]
        stream = self.stream(self.embed_decoder(batch))
        for index, layer in enumerate(self.decoder_layers):
            keys = SelfKeys(batch.positions, batch.slot_mapping, batch.kv_cache, index, work, self.decoder_bias)
            stream.apply(layer.attention_norm, partial(layer.attention, keys=keys), before=tap_at(batch, index))
            stream.apply(layer.cross_norm, partial(layer.cross, kv_cache=batch.kv_cache, work=batch.cross))
            stream.apply(layer.mlp_norm, layer.mlp, after=tap_at(batch, index + 1, of_output=True))
        states = stream.finish(self.decoder_norm, tap_at(batch, len(self.decoder_layers), of_output=True))
        return states if batch.read is None else states[batch.read.rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, V]"""
        return self.output(hidden)

    @property
    def matrices(self) -> list[Matrix]:
        """Each once; norms and biases are too small to count."""
        matrices = [table.weight for table in self.tables]
        if not self.config.tie_word_embeddings:
            matrices.append(self.output.weight)
        layers: list[EncoderLayer | CrossLayer] = [*self.encoder_layers, *self.decoder_layers]
        return matrices + [matrix for layer in layers for matrix in layer.matrices]


def tap_at(batch: ModelInput, layer: int, of_output: bool = False) -> LayerTap | None:
    """For the norm that sees (or makes) the states of the decoder after `layer` layers."""
    return None if batch.tap is None else LayerTap(batch.tap, layer, of_output)


def load_layers(make: Callable[[int], Layer], num_layers: int) -> list[Layer]:
    """Reading and packing leave the interpreter, so threads help."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(make, range(num_layers)))
