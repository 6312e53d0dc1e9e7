"""Who drafts on the device, as a runner sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from bequest.engine.types import DRAFTED, BoolArray, IntArray, StepBatch, StepMoves, StepSamples

Places = npt.NDArray[np.int64]  # of tokens or samples of a step


@dataclass(frozen=True, slots=True)
class Drafted:
    """A step whose drafts are known."""

    input_ids: IntArray  # [T]
    samples: StepSamples


class DeviceDrafts(Protocol):
    """Its guesses may be as bad as they like: no answer changes."""

    layers: tuple[int, ...]  # whose states of the target it reads, ascending: what enters these layers

    def move(self, moves: StepMoves) -> None:
        """Its blocks, as the target's."""

    def draft(self, batch: StepBatch, samples: StepSamples, input_ids: IntArray) -> Drafted:
        """Before the target computes a step: fills in what samples say is DRAFTED."""

    def learn(
        self, batch: StepBatch, samples: StepSamples, ids: IntArray, features: torch.Tensor, tokens: IntArray
    ) -> None:
        """Behind it: the states of its layers [T, layers × HT], and the tokens [N] that were sampled."""


def drafted_tokens(samples: StepSamples, num_tokens: int) -> tuple[Places, BoolArray]:
    """The samples behind which the device drafts, and which of the step's tokens are drafts, [T + 1]."""
    is_drafted = np.zeros(num_tokens + 1, np.bool_)
    wanted = np.empty(0, np.int64) if samples.drafts is None else np.flatnonzero(samples.drafts == DRAFTED)
    is_drafted[samples.tokens[wanted] + 1] = True
    return wanted, is_drafted
