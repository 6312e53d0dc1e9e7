"""What layers are told about a step: where keys and values go, and what queries see of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.kernels.delta_net import RecurrentStep
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.layers.together import Together


def strip_views(kv_cache: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """For `LayerStep.strip_caches`: a cache with blocks of these shapes, one for each strip. Made once: kernels know a
    cache by its tensor."""
    if len({*shapes}) == 1:
        return ()
    return tuple(kv_cache.view(kv_cache.shape[0], *shape) for shape in shapes)


@dataclass(frozen=True, slots=True)
class ReadRows:
    """R of a step's T tokens, R < T: those whose hidden states somebody reads."""

    rows: Tensor  # [R] int64, in [0, T); ascending where attention is of these alone
    # Of these queries alone, over the strip of the last layer; None: all queries attend there, and these are kept.
    attention: AttentionWork | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """T tokens of any number of sequences; rows do not see each other but through the cache."""

    positions: Tensor  # [T] int32
    slot_mapping: tuple[Tensor, ...]  # [T] int64 of each strip: where a token's K and V go; -1: nowhere
    kv_cache: Tensor  # [NB, L, 2, NKV, BS, D]
    strip_caches: tuple[Tensor, ...] = ()  # the same memory as each strip sees it (strip_views); empty: all alike
    attention: tuple[AttentionWork, ...]  # of each strip
    read: ReadRows | None = None  # None: every row is
    cross: AttentionWork | None = None  # of an encoder-decoder model: the same queries over cross tables, not causal
    recurrent: RecurrentStep | None = None  # of a model with recurrent layers
    tap: HiddenTap | None = None  # None: nobody wants hidden states
    adapters: StepAdapters | None = None  # None: no row has one
    together: Together | None = None  # rows of images that see what comes behind them; None: there are none
    between: Callable[[], None] | None = None  # called behind each layer that runs kernel by kernel

    def cache_of(self, strip: int) -> Tensor:
        """[NB, L, 2, NKV, BS, D] with the layers and the heads of a strip."""
        return self.strip_caches[strip] if self.strip_caches else self.kv_cache

    def tap_of_state(self, layer: int) -> LayerTap | None:
        """For the norm that layer `layer` begins with: it sees that layer's hidden states."""
        return None if self.tap is None else LayerTap(self.tap, layer)

    def tap_of_output(self, layer: int) -> LayerTap | None:
        """For the norm whose result is the hidden states behind so many layers."""
        return None if self.tap is None else LayerTap(self.tap, layer, of_output=True)
