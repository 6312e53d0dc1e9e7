"""What drafts of a step take, pass by pass, as arrays: the same on a CPU and on a GPU.

A pass computes some tokens of the step. Behind some of those a draft is sampled, which the next pass begins with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bequest.engine.types import DRAFTED, BoolArray, IntArray, StepBatch, StepSamples

Places = npt.NDArray[np.int64]  # of tokens or samples of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPass:
    """R tokens of S sequences, and D drafts."""

    tokens: Places  # [R] of the step: whose slots and positions they are
    query_start: IntArray  # [S + 1]
    lens: IntArray  # [S] tokens of each sequence behind the pass
    sequences: Places  # [S] of the step
    reads: Places  # [D] of R, ascending: behind which a draft is sampled
    drafts: Places  # [D] where those are among the tokens of the step


class DraftedTokens:
    """Which tokens of a step are drafts, and who samples them."""

    def __init__(self, samples: StepSamples, num_tokens: int) -> None:
        none = samples.drafts is None
        self.samples: Places = np.empty(0, np.int64) if none else np.flatnonzero(samples.drafts == DRAFTED)
        places = samples.tokens[self.samples] + 1
        self.is_draft: BoolArray = np.zeros(num_tokens + 1, np.bool_)
        self.is_draft[places] = True
        # By place among the tokens of the step: sampler row, position, and number among all drafts
        self.rows, self.positions, self.numbers = np.zeros((3, num_tokens + 1), np.int32)
        self.rows[places] = samples.rows[self.samples]
        self.positions[places] = samples.positions[self.samples]
        self.numbers[places] = np.arange(len(places))

    @property
    def first(self) -> Places:
        """The first draft of each sequence that has any."""
        return np.flatnonzero(self.is_draft[1:] & ~self.is_draft[:-1]) + 1


def places_in_cache(batch: StepBatch) -> IntArray:
    """[T] of each token in its sequence; positions of rotation are others behind images that have grids."""
    counts = np.diff(batch.query_start)
    places: IntArray = np.arange(len(batch.positions), dtype=np.int32) + np.repeat(
        batch.seq_lens - batch.query_start[1:], counts
    )
    return places


def passes_of_model(batch: StepBatch, drafted: DraftedTokens) -> Iterator[DraftPass]:
    """All tokens that are known, then draft by draft, the last ones too: whoever accepts them goes on behind them."""
    places = drafted.first
    yield _known_pass(batch, drafted, places)
    while len(places):
        more = np.flatnonzero(drafted.is_draft[places + 1])
        yield _one_each(batch, places, more, places[more] + 1)
        places = places[more] + 1


def passes_of_head(batch: StepBatch, drafted: DraftedTokens) -> Iterator[DraftPass]:
    """Behind the first drafts. The pair of a draft and the state before it is computed in the slot of the token before
    it; of the last draft nobody reads it."""
    places = drafted.first
    while len(places := places[drafted.is_draft[places + 1]]):
        yield _one_each(batch, places - 1, np.arange(len(places)), places + 1)
        places = places + 1


def _known_pass(batch: StepBatch, drafted: DraftedTokens, places: Places) -> DraftPass:
    is_known = ~drafted.is_draft[:-1]
    num_before = np.concatenate([[0], np.cumsum(is_known)])  # [T + 1] known ones before each token
    query_start = num_before[batch.query_start].astype(np.int32)
    return DraftPass(
        tokens=np.flatnonzero(is_known),
        query_start=query_start,
        lens=batch.seq_lens - (np.diff(batch.query_start) - np.diff(query_start)),
        sequences=np.arange(len(batch.seq_lens)),
        reads=num_before[places - 1],
        drafts=places,
    )


def _one_each(batch: StepBatch, tokens: Places, reads: Places, drafts: Places) -> DraftPass:
    return DraftPass(
        tokens=tokens,
        query_start=np.arange(len(tokens) + 1, dtype=np.int32),
        lens=places_in_cache(batch)[tokens] + 1,
        sequences=np.searchsorted(batch.query_start, tokens, side="right") - 1,
        reads=reads,
        drafts=drafts,
    )
