"""What drafts cost on this GPU with this model, measured when the graphs are there: how long to draft depends on it.

Kernels for a few rows end somewhere, so a step of five may take a third more than one of four. Where that is depends on
the model, its weights' format and the card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from bequest.engine.types import NO_ROW, NO_SLOT, StepBatch
from bequest.engine.types.speculation import MOST_DRAFTED

_WAIT = 3e-4  # seconds that the device waits for the next plan: a sequence that drafts is not planned ahead
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """In steps of one token, of a sequence that is planned ahead."""

    steps: tuple[float, ...]  # that check so many drafts
    wait: float
    one_pass: float | None  # of who drafts on the device


def draft_times(rows: Sequence[int], seconds: Sequence[float], one_pass: float | None) -> DraftTimes:
    """By `seconds` of steps of `rows`, ascending from one: a step is padded to the next of them."""
    whole = max(seconds[0], _WAIT)  # no step is planned faster
    parts = np.maximum.accumulate(seconds) / whole
    counts = 1 + np.arange(min(MOST_DRAFTED + 1, rows[-1]))
    steps = tuple(parts[np.searchsorted(rows, counts)].tolist())
    return DraftTimes(steps, _WAIT / whole, None if one_pass is None else one_pass / whole)


def one_sequence(num_tokens: int, num_strips: int, block_size: int, *, crosses: bool) -> StepBatch:
    """A step that reads the null block and writes nothing."""
    places = np.arange(num_tokens, dtype=np.int32)
    table = np.zeros((1, -(-num_tokens // block_size)), np.int32)
    one = np.asarray([num_tokens], np.int32)
    return StepBatch(
        input_ids=places,
        input_rows=np.full(num_tokens, NO_ROW, np.int32),
        positions=places,
        slot_mapping=np.full((num_strips, num_tokens), NO_SLOT, np.int64),
        query_start=np.asarray([0, num_tokens], np.int32),
        seq_lens=one,
        block_tables=np.stack([table] * num_strips),
        cross_tables=table if crosses else None,
        cross_lens=one if crosses else None,
    )


def time_replays(replay: Callable[[], None]) -> float:
    """Seconds, of the fastest, on the current stream."""
    replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    events[-1].synchronize()
    return float(min(a.elapsed_time(b) for a, b in pairwise(events))) / 1e3
