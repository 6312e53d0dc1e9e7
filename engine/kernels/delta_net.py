"""What kernels of the gated delta rule are given: a layer's weights, and where states lie."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bequest.engine.types.recurrent import DeltaSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """The gated delta rule of a layer. All tensors are float32."""

    sizes: DeltaSizes
    taps: Tensor  # [CW, C] of the convolution, the token's own last
    decay: Tensor  # [HV]
    step_bias: Tensor  # [HV]
    norm: Tensor  # [DV]
    eps: float
    state_layer: int  # where its states lie


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """Where recurrent layers find what is left of a sequence's tokens, and where they leave it.

    The last token of a sequence has a slot. No slot is both read and written in a step, and none is written twice; on
    a CPU the last token's may be the one that the sequence goes on from."""

    states: Tensor  # [NS, LR, E] float32: slots, recurrent layers, floats of a layer's state
    query_start: Tensor  # [S + 1] int32
    starts: Tensor  # [S] int32: the slot that a sequence goes on from; -1: it begins
    slots: Tensor  # [T] int32: the slot that gets the state behind a token; -1: nobody wants it
    one_each: bool = False  # no sequence has more than one token
