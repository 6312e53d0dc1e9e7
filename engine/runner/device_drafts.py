"""Who drafts on the device, as a runner sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from bequest.engine.types import DRAFTED, BoolArray, IntArray, StepBatch, StepMoves, StepSamples

Places = npt.NDArray[np.int64]  # of tokens or samples of a step
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

    def move(self, moves: StepMoves) -> None:
        """Its blocks, as the target's."""

    def draft(self, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        """Before the target computes a step: fills in what samples say is DRAFTED."""

    def learn(
        self, batch: StepBatch, samples: StepSamples, ids: IntArray, features: torch.Tensor, tokens: IntArray
    ) -> None:
        """Behind it: the states of its layers [T, layers × HT], and the tokens [N] that were sampled."""


class Samplers:
    """Who samples which of a step's drafts."""

    def __init__(self, samples: StepSamples, wanted: Places, num_tokens: int, guess: Guess) -> None:
        self._rows, self._positions = np.zeros((2, num_tokens + 1), np.int32)  # by the place of a draft
        self._rows[samples.tokens[wanted] + 1] = samples.rows[wanted]
        self._positions[samples.tokens[wanted] + 1] = samples.positions[wanted]
        self._guess = guess

    def sample(self, logits: torch.Tensor, places: Places) -> IntArray:
        """The drafts at these places, by logits [N, V]."""
        return self._guess(logits, self._rows[places], self._positions[places])

    def row(self, place: int) -> int:
        return int(self._rows[place])


def places_in_cache(batch: StepBatch) -> IntArray:
    """[T] of each token in its sequence; positions of rotation are others behind images that have grids."""
    counts = np.diff(batch.query_start)
    places: IntArray = np.arange(len(batch.positions), dtype=np.int32) + np.repeat(
        batch.seq_lens - batch.query_start[1:], counts
    )
    return places


def drafted_tokens(samples: StepSamples, num_tokens: int) -> tuple[Places, BoolArray]:
    """The samples behind which the device drafts, and which of the step's tokens are drafts, [T + 1]."""
    is_drafted = np.zeros(num_tokens + 1, np.bool_)
    wanted = np.empty(0, np.int64) if samples.drafts is None else np.flatnonzero(samples.drafts == DRAFTED)
    is_drafted[samples.tokens[wanted] + 1] = True
    return wanted, is_drafted
