"""A model of two stacks: what BART, T5 and Whisper share.

An encoder reads a whole input at once; its states leave through `write_cross`, as keys and values of every decoder
layer in a table of the cache, and are not needed again. The decoder is then a decoder like any other whose layers also
attend to that table. Owned by the device thread. No row of a result depends on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bequest.engine.layers.adapted import adapted
from bequest.engine.layers.backend import Backend
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Norm
from bequest.engine.layers.spec import CrossAttention, LayerSpec
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight
from bequest.engine.models.batch import EncoderInputs, ModelInput
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.reader import Matrix
from bequest.engine.models.sites import OUTPUT
from bequest.engine.models.vocabulary import output_matrix

# Called with the number of layers behind a state of the encoder and the state [E, H]: 0 is what the first layer reads,
# the last one is the result.
Tap = Callable[[int, Tensor], None]


class Inputs(Protocol):
    """How a family's inputs become the streams that its stacks read."""

    def encoder(self, batch: EncoderInputs, ops: Ops) -> Stream:
        """[E, H]"""
        ...

    def decoder(self, batch: ModelInput, ops: Ops) -> Stream | StartRows:
        """[T, H], or the rows of tables that it begins with."""
        ...


@dataclass(frozen=True, slots=True)
class StackParts:
    layers: list[LayerSpec]
    norm: Norm | None  # behind the last layer, where layers do not end with one


@dataclass(frozen=True, slots=True)
class EncoderDecoderParts:
    """What a family makes of a checkpoint."""

    inputs: Inputs
    encoder: StackParts
    decoder: StackParts
    output: Weight  # [V, H]
    output_scale: float = 1.0  # of the states that logits are made from


class EncoderDecoder:
    def __init__(self, config: EncoderDecoderConfig, parts: EncoderDecoderParts, backend: Backend) -> None:
        self.config = config
        self.device = backend.device
        self.ops = backend.ops
        self._parts = parts
        self._encoder = backend.compile(parts.encoder.layers)
        self._decoder = backend.compile(parts.decoder.layers)
        self._crosses = [cross for layer in parts.decoder.layers for cross in _crosses(layer)]

    def encode(self, batch: EncoderInputs, tap: Tap | None = None) -> Tensor:
        """The encoder's states, [E, H]."""
        stream = self._parts.inputs.encoder(batch, self.ops)
        if tap is None:
            self._encoder.run(stream, batch.step)
            return self._result(stream, self._parts.encoder.norm)
        self._encoder.run_watched(stream, batch.step, tap)
        states = self._result(stream, self._parts.encoder.norm)
        tap(len(self._parts.encoder.layers), states)
        return states

    def write_cross(
        self, states: Tensor, slots: Tensor, kv_cache: Tensor, adapters: StepAdapters | None = None
    ) -> None:
        """Keys and values of every decoder layer for the encoder's states [E, H], to slots [E] int64 of the cache."""
        for cross in self._crosses:
            adapted(cross.kv, adapters).store(states, kv_cache, cross.heads.cache_layer, slots)

    def forward(self, batch: ModelInput) -> Tensor:
        """The decoder's states: [T, H], or [R, H] of the rows in `batch.read`. Writes K and V of every token."""
        assert batch.cross is not None, "an encoder-decoder model attends to cross tables"
        start = self._parts.inputs.decoder(batch, self.ops)
        if isinstance(start, StartRows):
            stream = self._decoder.run_from(start, batch)
        else:
            stream = start
            self._decoder.run(stream, batch)
        if batch.read is not None:
            stream.narrow(batch.read.rows)
        norm = self._parts.decoder.norm
        return stream.state() if norm is None else stream.normed(norm, batch.tap_of_result(self.config.num_layers))

    def _result(self, stream: Stream, norm: Norm | None) -> Tensor:
        return stream.state() if norm is None else stream.normed(norm)

    @property
    def vocabulary(self) -> dict[str, Matrix]:
        """What adapters can add to beside its layers, by the names of the tensors."""
        return dict.fromkeys(("lm_head", "proj_out"), output_matrix(self._parts.output, self.device))

    def logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """[R, H] → [R, V]. `adapters`: of these rows"""
        scale = self._parts.output_scale
        return adapted(self._parts.output, adapters, OUTPUT)(hidden if scale == 1.0 else hidden * scale)

    @property
    def decoder_layers(self) -> tuple[LayerSpec, ...]:
        return self._decoder.layers

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Of both stacks."""
        return (*self._encoder.layers, *self._decoder.layers)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which layers run kernel by kernel, and why."""
        stacks = (("encoder", self._encoder), ("decoder", self._decoder))
        return tuple(f"{name}: {note}" for name, stack in stacks for note in stack.notes)


def _crosses(layer: LayerSpec) -> list[CrossAttention]:
    mixers = (sublayer.mixer for sublayer in layer.sublayers)
    return [mixer for mixer in mixers if isinstance(mixer, CrossAttention)]
