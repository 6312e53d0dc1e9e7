"""A head that reads states of the target and drafts: EAGLE-3's (engine/models/eagle3.py), or the one that a checkpoint
has for multi-token prediction (engine/models/mtp.py). Device thread only, on a CPU.

The pair of a token and its state has the slot of the token that the state belongs to, in blocks of the same numbers as
the target's:

    tokens       t0   t1   t2   t3            t3 was sampled in this step
    states       s0   s1   s2                 of the target, behind t0 to t2
    pairs       s0t1 s1t2 s2t3                in the slots of t0 to t2
    drafts                     h d1  h d2     begin in the slot of t3, in the next step: h is the head's own state

So a step ends with the pairs that it has made known, and the next one begins with drafts behind the last of them. What
a sampler row needs for that is its last state. The pair of a prompt's last token in a chunk is made in the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from bequest.engine.layers.step import LayerStep
from bequest.engine.models.config import DecoderConfig
from bequest.engine.runner.block_bytes import move_blocks
from bequest.engine.runner.cpu_attention import CpuAttention
from bequest.engine.runner.device_drafts import Drafted, Guess, Places, Samplers, drafted_tokens, places_in_cache
from bequest.engine.types import NO_ROW, NO_SLOT, IntArray, StepBatch, StepMoves, StepSamples


class Head(Protocol):
    """Says what comes behind a token, by the token and by what was known before it."""

    @property
    def config(self) -> DecoderConfig:
        """Of its one layer."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target, whose states it reads, ascending: as a tap numbers them."""

    def enter(self, features: torch.Tensor) -> torch.Tensor:
        """States of those layers, side by side, [T, layers × HT]: what it pairs with tokens, [T, H]."""

    def forward(self, ids: torch.Tensor, states: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """[T] tokens, and [T, H] what was known before each: its states behind them, [T, H]."""

    def logits_of(self, states: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """[R, H] → [R, V] of the target's tokens."""


class HeadDrafts:
    """DeviceDrafts."""

    def __init__(
        self,
        head: Head,
        kv_cache: torch.Tensor,
        host_cache: torch.Tensor,
        num_rows: int,
        vocab_size: int,
        *,
        bfloat16: bool,
    ) -> None:
        """`num_rows`, `vocab_size`: the target's sampler rows and tokens."""
        self.layers = head.layers
        self._head = head
        self._vocab_size = vocab_size
        self._kv_cache, self._host_cache = kv_cache, host_cache
        self._attention = CpuAttention(head.config, kv_cache, bfloat16=bfloat16)
        self._block_size = kv_cache.shape[4]
        self._states = torch.zeros(num_rows, head.config.hidden_size)  # behind the last pair of each sampler row
        self._ends: OrderedDict[int, torch.Tensor] = OrderedDict()  # by slot: what a chunk knew behind its last token
        self._most_ends = 2 * num_rows

    def move(self, moves: StepMoves) -> None:
        move_blocks(self._kv_cache, self._host_cache, moves)

    def draft(self, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        wanted, is_drafted = drafted_tokens(samples, len(input_ids))
        if samples.drafts is None or not len(wanted):
            return Drafted(input_ids, samples)
        ids = input_ids.copy()
        places = np.flatnonzero(is_drafted[1:] & ~is_drafted[:-1]) + 1  # of the first draft of each sequence
        samplers = Samplers(samples, wanted, len(ids), guess)
        states = self._states[[samplers.row(place) for place in places.tolist()]]
        while True:
            ids[places] = samplers.sample(self._head.logits_of(states, self._vocab_size), places)
            more = np.flatnonzero(is_drafted[places + 1])
            if not len(more):
                break
            places = places[more]
            states = self._compute_drafts(batch, places - 1, ids[places], states[torch.from_numpy(more)])
            places = places + 1
        drafts = samples.drafts.copy()
        drafts[wanted] = ids[samples.tokens[wanted] + 1]
        return Drafted(ids, replace(samples, drafts=drafts))

    def _compute_drafts(self, batch: StepBatch, at: Places, ids: IntArray, states: torch.Tensor) -> torch.Tensor:
        """Pairs of drafts and of the head's own states, in the slots of tokens `at`, one of each sequence."""
        sequences = np.searchsorted(batch.query_start, at, side="right") - 1
        pairs = _Pairs(
            ids=ids,
            states=states,
            positions=batch.positions[at],
            slots=batch.slot_mapping[0][at],
            query_start=np.arange(len(at) + 1, dtype=np.int32),
            lens=places_in_cache(batch)[at] + 1,
            tables=batch.block_tables[0][sequences],
        )
        return self._forward(pairs)

    def learn(
        self, batch: StepBatch, samples: StepSamples, ids: IntArray, features: torch.Tensor, tokens: IntArray
    ) -> None:
        fused = self._head.enter(features)
        following, places = _following(batch, samples, ids, tokens), places_in_cache(batch)
        made = _Making()
        place_of: dict[int, int] = {}  # of a token's pair
        for sequence, (begin, end) in enumerate(zip(batch.query_start[:-1], batch.query_start[1:], strict=True)):
            if begin == end or batch.slot_mapping[0][begin] == NO_SLOT:
                continue
            self._join_end(made, batch, sequence, int(begin), int(places[begin]), int(ids[begin]))
            for token in range(begin, end):
                slot = int(batch.slot_mapping[0][token])
                if following[token] < 0:
                    self._note_end(slot, fused[token].clone())
                    continue
                place_of[token] = made.num
                made.add(int(following[token]), fused[token], int(batch.positions[token]), int(places[token]), slot)
            made.close(sequence)
        if made.num:
            states = self._forward(made.pairs(batch))
            for row, token in _last_counted(samples, tokens):
                if token in place_of:
                    self._states[row] = states[place_of[token]]

    def _join_end(self, made: _Making, batch: StepBatch, sequence: int, begin: int, place: int, token: int) -> None:
        """The pair that the chunk before this one could not make. `place`: of its first token in the cache."""
        if place == 0:
            return
        block, offset = divmod(place - 1, self._block_size)
        slot = int(batch.block_tables[0, sequence, block]) * self._block_size + offset
        if (state := self._ends.pop(slot, None)) is not None:
            made.add(token, state, int(batch.positions[begin]) - 1, place - 1, slot)

    def _note_end(self, slot: int, state: torch.Tensor) -> None:
        self._ends[slot] = state
        if len(self._ends) > self._most_ends:
            self._ends.popitem(last=False)

    def _forward(self, pairs: _Pairs) -> torch.Tensor:
        step = LayerStep(
            positions=torch.from_numpy(pairs.positions),
            slot_mapping=(torch.from_numpy(pairs.slots),),
            kv_cache=self._kv_cache,
            attention=(self._attention.plan(pairs.query_start, pairs.lens, pairs.tables),),
        )
        return self._head.forward(torch.from_numpy(pairs.ids), pairs.states, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """R pairs of S sequences, as the head computes them at once."""

    ids: IntArray  # [R]
    states: torch.Tensor  # [R, H]
    positions: IntArray  # [R]
    slots: np.ndarray  # [R] int64
    query_start: IntArray  # [S + 1]
    lens: IntArray  # [S]
    tables: IntArray  # [S, MB]


@dataclass(slots=True)
class _Making:
    """Pairs on their way into a batch, sequence by sequence."""

    ids: list[int] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # in the cache
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    sequences: list[int] = field(default_factory=list)

    @property
    def num(self) -> int:
        return len(self.ids)

    def add(self, token: int, state: torch.Tensor, position: int, place: int, slot: int) -> None:
        self.ids.append(token)
        self.states.append(state)
        self.positions.append(position)
        self.places.append(place)
        self.slots.append(slot)

    def close(self, sequence: int) -> None:
        if self.num > self.starts[-1]:
            self.starts.append(self.num)
            self.sequences.append(sequence)

    def pairs(self, batch: StepBatch) -> _Pairs:
        places, starts = np.asarray(self.places, np.int32), np.asarray(self.starts, np.int32)
        return _Pairs(
            ids=np.asarray(self.ids, np.int32),
            states=torch.stack(self.states),
            positions=np.asarray(self.positions, np.int32),
            slots=np.asarray(self.slots, np.int64),
            query_start=starts,
            lens=places[starts[1:] - 1] + 1,
            tables=batch.block_tables[0][self.sequences],
        )


def _following(batch: StepBatch, samples: StepSamples, ids: IntArray, tokens: IntArray) -> IntArray:
    """[T] the token behind each: the next one of its sequence, or what was sampled there; -1: not known yet."""
    following = np.append(ids[1:], np.int32(-1))
    following[batch.query_start[1:] - 1] = -1
    for i in reversed(range(len(samples))):  # where choices part ways the first one's
        if samples.rows[i] != NO_ROW:
            following[samples.tokens[i]] = tokens[i]
    return following


def _last_counted(samples: StepSamples, tokens: IntArray) -> list[tuple[int, int]]:
    """Of each row the token of the step that its last sample is behind: later ones follow a wrong draft."""
    counted: dict[int, int] = {}
    ended: set[int] = set()
    for i, row in enumerate(samples.rows.tolist()):
        if row == NO_ROW or row in ended:
            continue
        counted[row] = int(samples.tokens[i])
        if samples.drafts is None or tokens[i] != samples.drafts[i]:
            ended.add(row)
    return list(counted.items())
