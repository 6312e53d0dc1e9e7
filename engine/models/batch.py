"""What a model computes in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.kernels.hidden_tap import HiddenTap, LayerTap
from engine.models.backend import AttentionWork


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
