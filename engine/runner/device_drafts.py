"""Who drafts on the device, as a runner sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from bequest.engine.types import IntArray, StepBatch, StepMoves, StepSamples

# What sampler rows [N] would sample of logits [N, V] at positions [N]. The random numbers are the target's: where the
# logits are near to its own, the draft is its sample, at any temperature.
Guess = Callable[[torch.Tensor, IntArray, IntArray], IntArray]


@dataclass(frozen=True, slots=True)
class Drafted:
    """A step whose drafts are known."""

    input_ids: IntArray  # [T]
    samples: StepSamples


class DeviceDrafts(Protocol):
    """Its guesses may be as bad as they like: no answer changes."""

    # Whose states of the target it reads, ascending: what enters these layers; behind the last one, normed
    layers: tuple[int, ...]
    caches: tuple[torch.Tensor, torch.Tensor]  # [NB, L, 2, NKV, BS, D] of the device and of the host

    def move(self, moves: StepMoves) -> None:
        """Its blocks, as the target's."""

    def draft(self, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        """Before the target computes a step: fills in what samples say is DRAFTED."""

    def learn(
        self, batch: StepBatch, samples: StepSamples, ids: IntArray, features: torch.Tensor, tokens: IntArray
    ) -> None:
        """Behind it: the states of its layers [T, layers × HT], and the tokens [N] that were sampled."""
