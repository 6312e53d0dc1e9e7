"""What layers are told about a step: where keys and values go, and what queries see of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.kernels.delta_net import RecurrentStep
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.layers.together import Together


@dataclass(frozen=True, slots=True)
class ReadRows:
    """R of a step's T tokens: those whose hidden states somebody reads."""

    rows: Tensor  # [R] int64, in [0, T), ascending
    attention: AttentionWork  # of these queries alone, over the strip of the last layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """T tokens of any number of sequences; rows do not see each other but through the cache."""

    positions: Tensor  # [T] int32
    slot_mapping: tuple[Tensor, ...]  # [T] int64 of each strip: where a token's K and V go; -1: nowhere
    kv_cache: Tensor  # [NB, L, 2, NKV, BS, D]
    attention: tuple[AttentionWork, ...]  # of each strip
    read: ReadRows | None = None  # None: every row is
    cross: AttentionWork | None = None  # of an encoder-decoder model: the same queries over cross tables, not causal
    recurrent: RecurrentStep | None = None  # of a model with recurrent layers
    tap: HiddenTap | None = None  # None: nobody wants hidden states
    adapters: StepAdapters | None = None  # None: no row has one
    together: Together | None = None  # rows of images that see what comes behind them; None: there are none

    def tap_of_state(self, layer: int) -> LayerTap | None:
        """For the norm that layer `layer` begins with: it sees that layer's hidden states."""
        return None if self.tap is None else LayerTap(self.tap, layer)

    def tap_of_output(self, layer: int) -> LayerTap | None:
        """For the norm whose result is the hidden states behind so many layers."""
        return None if self.tap is None else LayerTap(self.tap, layer, of_output=True)
