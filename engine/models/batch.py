"""What a model computes in one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.layers.start import FixedOverlay, Overlay
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.step import ReadRows as ReadRows
from bequest.engine.layers.step import strip_views as strip_views
from bequest.engine.layers.step_adapters import StepAdapters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput(LayerStep):
    """The tokens of a step."""

    input_ids: Tensor  # [T] int32
    last_tokens: Tensor | None = None  # [rows] int32: an id of -(row + 1) means the last token of that sampler row
    overlay: Overlay | FixedOverlay | None = None  # what tokens of images begin with

    def tap_of_result(self, num_layers: int) -> LayerTap | None:
        """For the final norm, whose result is the last layer's; it has only the rows that are read."""
        if self.tap is None:
            return None
        table = self.tap if self.read is None else self.tap.of(self.read.rows)
        return LayerTap(table, num_layers, of_output=True)


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """E states of any number of encoder inputs, one after another; an input sees itself alone.

    Keys and values of a layer pass through a scratch that looks like a cache of one layer (engine.models.encoder_batch
    places them).
    """

    attention: AttentionWork  # not causal, of all E states over the scratch's tables
    scratch: Tensor  # [NB', 1, 2, NKV, BS', D] in the dtype of activations
    slots: Tensor  # [E] int64 in the scratch
    positions: Tensor  # [E] int32 in their inputs
    token_ids: Tensor | None = None  # [E] int32, of text
    adapters: StepAdapters | None = None  # None: no state has one
    features: tuple[Tensor, ...] = ()  # [n_mels, frames] float32 each, of audio

    @property
    def step(self) -> LayerStep:
        """For the layers of the encoder, which use the scratch in turns."""
        return LayerStep(
            positions=self.positions,
            slot_mapping=(self.slots,),
            kv_cache=self.scratch,
            attention=(self.attention,),
            adapters=self.adapters,
        )
