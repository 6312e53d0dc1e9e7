"""What a model computes in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap
from bequest.engine.models.backend import AttentionWork


@dataclass(frozen=True, slots=True)
class ReadRows:
    """R of a step's T tokens: those whose hidden states somebody reads."""

    rows: Tensor  # [R] int64, in [0, T), ascending
    attention: AttentionWork  # of these queries alone, with the window of the last layer


@dataclass(frozen=True, slots=True)
class ModelInput:
    """T tokens of any number of sequences; rows do not see each other but through the cache."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [T] int64, where a token's K and V go; -1: nowhere
    kv_cache: Tensor  # [NB, L, 2, NKV, BS, D]
    attention: Mapping[int, AttentionWork]  # one for each window in DecoderConfig.windows
    last_tokens: Tensor | None = (
        None  # [rows] int32: an input id of -(row + 1) means the last token of that sampler row
    )
    read: ReadRows | None = None  # None: every row is
    cross: AttentionWork | None = None  # of an encoder-decoder model: the same queries over cross tables, not causal
    tap: HiddenTap | None = None  # None: nobody wants hidden states

    def tap_before(self, layer: int) -> LayerTap | None:
        """For the norm that block `layer` begins with: it sees that layer's hidden states."""
        return None if self.tap is None else LayerTap(self.tap, layer)

    def tap_after(self, num_layers: int) -> LayerTap | None:
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
    features: tuple[Tensor, ...] = ()  # [n_mels, frames] float32 each, of audio
