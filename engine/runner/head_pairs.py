"""Which pairs a step makes known to a head that drafts (engine/runner/head_drafts.py), as arrays.

They are the same on a CPU and on a GPU, where nobody on the host knows yet what was sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from bequest.engine.runner.draft_passes import Places, places_in_cache
from bequest.engine.types import NO_ROW, NO_SLOT, IntArray, StepBatch, StepSamples

_UNKNOWN = np.iinfo(np.int32).min  # which token follows
_NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPairs:
    """R pairs of S sequences, in their order, and E states whose tokens are not known yet."""

    ids: IntArray  # [R] the token of a pair; -(i + 1): what sample i of the step says
    tokens: Places  # [R] of the step, whose state it is; where `joined` says so a place among kept ends
    joined: Places  # of R: the state is an end that was kept
    positions: IntArray  # [R]
    slots: Places  # [R]
    query_start: IntArray  # [S + 1]
    lens: IntArray  # [S]
    sequences: Places  # [S] of the step
    of_token: Places  # [T] the pair of each token; -1: it has none
    end_tokens: Places  # [E] of the step
    end_places: Places  # [E] among kept ends


class KeptEnds:
    """Where states behind the last tokens of chunks are kept, by the slots of those tokens. The oldest make room."""

    def __init__(self, num_places: int) -> None:
        self._places: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(num_places))

    def add(self, slot: int) -> int:
        place = self._places.pop(slot, None)
        if place is None:
            place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
        self._places[slot] = place
        return place

    def take(self, slot: int) -> int | None:
        """It is free again for whoever comes in a later step."""
        place = self._places.pop(slot, None)
        if place is not None:
            self._free.insert(0, place)
        return place


def pairs_of_step(
    batch: StepBatch, samples: StepSamples, ids: IntArray, ends: KeptEnds, block_size: int
) -> StepPairs | None:
    """`ids`: [T] tokens of the step as far as they are known, else negative. None: it has nothing for a head."""
    slots, places = batch.slot_mapping[0].astype(np.int64), places_in_cache(batch)
    counts = np.diff(batch.query_start)
    sequence_of = np.repeat(np.arange(len(counts)), counts)
    begins = batch.query_start[:-1]
    has_slots = counts > 0
    has_slots[has_slots] = slots[begins[has_slots]] != NO_SLOT
    following = _following(batch, samples, ids)
    own = has_slots[sequence_of]
    tokens = np.flatnonzero(own & (following != _UNKNOWN))
    joined = _join_ends(batch, ids, places, ends, np.flatnonzero(has_slots & (places[begins] > 0)), block_size)
    last = np.flatnonzero(own & (following == _UNKNOWN))
    if not len(tokens) and not len(joined) and not len(last):
        return None
    firsts = begins[joined[:, 0]]
    sequences = np.concatenate([joined[:, 0], sequence_of[tokens]])
    order = np.argsort(sequences, kind="stable")  # a joined one comes before the others of its sequence
    in_cache = np.concatenate([places[firsts] - 1, places[tokens]])[order]
    found, starts = np.unique(sequences[order], return_index=True)
    query_start = np.append(starts, len(order)).astype(np.int32)
    of_token = np.full(len(ids), _NOWHERE, np.int64)
    sources = np.concatenate([joined[:, 1], tokens])[order]
    is_joined = order < len(joined)
    of_token[sources[~is_joined]] = np.flatnonzero(~is_joined)
    return StepPairs(
        ids=np.concatenate([ids[firsts], following[tokens]])[order].astype(np.int32),
        tokens=sources,
        joined=np.flatnonzero(is_joined),
        positions=np.concatenate([batch.positions[firsts] - 1, batch.positions[tokens]])[order].astype(np.int32),
        slots=np.concatenate([joined[:, 2], slots[tokens]])[order],
        query_start=query_start,
        lens=in_cache[query_start[1:] - 1].astype(np.int32) + 1,
        sequences=found,
        of_token=of_token,
        end_tokens=last,
        end_places=np.asarray([ends.add(slot) for slot in slots[last].tolist()], np.int64),
    )


def _following(batch: StepBatch, samples: StepSamples, ids: IntArray) -> IntArray:
    """[T] the token behind each: the next one of its sequence, or -(i + 1): what sample i says."""
    following = np.append(ids[1:], np.int32(_UNKNOWN))
    following[following < 0] = _UNKNOWN
    following[batch.query_start[1:] - 1] = _UNKNOWN
    sampled = np.flatnonzero(samples.rows != NO_ROW)[::-1]  # where choices part ways the first one's, which comes last
    following[samples.tokens[sampled]] = -(sampled + 1)
    return following


def _join_ends(
    batch: StepBatch, ids: IntArray, places: IntArray, ends: KeptEnds, sequences: Places, block_size: int
) -> Places:
    """The pairs that the chunks before those of this step could not make: [J, 3] sequence, kept end and slot."""
    joined: list[tuple[int, int, int]] = []
    for sequence in sequences.tolist():
        begin = int(batch.query_start[sequence])
        block, offset = divmod(int(places[begin]) - 1, block_size)
        slot = int(batch.block_tables[0, sequence, block]) * block_size + offset
        end = ends.take(slot)
        if end is not None and ids[begin] >= 0:
            joined.append((sequence, end, slot))
    return np.asarray(joined, np.int64).reshape(-1, 3)


@dataclass(frozen=True, slots=True)
class Runs:
    """The samples of each sampler row, of which some have a pair."""

    begins: Places  # [Q] the first sample of each
    rows: Places  # [Q]

    @classmethod
    def of(cls, samples: StepSamples, pairs: StepPairs) -> Runs:
        rows = samples.rows
        begins = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]])) if len(rows) else np.empty(0, np.int64)
        begins = begins[(rows[begins] != NO_ROW) & (pairs.of_token[samples.tokens[begins]] >= 0)]
        return cls(begins, rows[begins].astype(np.int64))
