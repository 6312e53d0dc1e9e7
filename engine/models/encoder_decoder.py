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
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from bequest.engine.kernels.cpu_stack import LayerStack, StackCache, StackEmbedding
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap
from bequest.engine.models.backend import Matrix
from bequest.engine.models.batch import EncoderInputs, ModelInput
from bequest.engine.models.cpu_layers import stack_of
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.layers import Embedding, Linear
from bequest.engine.models.sublayers import CrossLayer, EncoderLayer, Norm, SelfKeys

Layer = TypeVar("Layer")


class PreNorm:
    """A residual stream to which each sublayer adds f(norm(stream))."""

    def __init__(self, x: Tensor, total: Tensor | None = None) -> None:
        self._added = x  # [T, H], what the last sublayer adds
        self._sum = torch.zeros_like(x) if total is None else total  # what all before it have

    def apply(
        self,
        norm: Norm,
        function: Callable[[Tensor], Tensor],
        before: LayerTap | None = None,
        after: LayerTap | None = None,
    ) -> None:
        """`before` wants the state that the sublayer reads, `after` the one that it leaves; each stream has one."""
        self._added = function(norm(self._added, self._sum, before))

    def apply_all(self, stack: LayerStack, cache: StackCache, tap: HiddenTap | None = None) -> None:
        """All layers of a stack; the tap wants the states that layers begin with."""
        stack.run(self._added, self._sum, cache, tap)

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

    def encoder_stream(self, batch: EncoderInputs) -> PreNorm:
        """What `embed_encoder` gives, or the parts that it adds up."""
        return PreNorm(self.embed_encoder(batch))

    def decoder_rows(self, batch: ModelInput) -> StackEmbedding | None:
        """What `embed_decoder` adds up, where it is nothing but rows of tables."""
        return None

    def encode(self, batch: EncoderInputs, tap: Tap | None = None) -> Tensor:
        """The encoder's states, [E, H]."""
        if tap is None and self._encoder_stack is not None:
            run = self.encoder_stream(batch)
            cache = StackCache(batch.scratch, batch.slots, batch.attention, bias=self.encoder_bias)
            run.apply_all(self._encoder_stack, cache)
            return run.finish(self.encoder_norm)
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
        stack = self._decoder_stack
        embedding = None if stack is None else self.decoder_rows(batch)
        stream: PreNorm | PostNorm
        if stack is not None and embedding is not None:
            stream = PreNorm(*stack.embed_and_run(embedding, self._self_and_cross(batch), batch.tap))
        else:
            stream = self.stream(self.embed_decoder(batch))
            if stack is not None and isinstance(stream, PreNorm):
                stream.apply_all(stack, self._self_and_cross(batch), batch.tap)
            else:
                self._apply_layers(stream, batch)
        states = stream.finish(self.decoder_norm, tap_at(batch, len(self.decoder_layers), of_output=True))
        return states if batch.read is None else states[batch.read.rows]

    def _apply_layers(self, stream: PreNorm | PostNorm, batch: ModelInput) -> None:
        """The decoder's, one by one."""
        work = batch.attention[self.config.sliding_windows[0]]
        for index, layer in enumerate(self.decoder_layers):
            keys = SelfKeys(batch.positions, batch.slot_mapping, batch.kv_cache, index, work, self.decoder_bias)
            stream.apply(layer.attention_norm, partial(layer.attention, keys=keys), before=tap_at(batch, index))
            stream.apply(layer.cross_norm, partial(layer.cross, kv_cache=batch.kv_cache, work=batch.cross))
            stream.apply(layer.mlp_norm, layer.mlp, after=tap_at(batch, index + 1, of_output=True))

    def _self_and_cross(self, batch: ModelInput) -> StackCache:
        work = batch.attention[self.config.sliding_windows[0]]
        return StackCache(batch.kv_cache, batch.slot_mapping, work, batch.cross, self.decoder_bias)

    @cached_property
    def _encoder_stack(self) -> LayerStack | None:
        """Where norms stand before sublayers and a CPU runs them."""
        return stack_of(self.encoder_layers, self.config.hidden_size) if self.stream is PreNorm else None

    @cached_property
    def _decoder_stack(self) -> LayerStack | None:
        return stack_of(self.decoder_layers, self.config.hidden_size) if self.stream is PreNorm else None

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
