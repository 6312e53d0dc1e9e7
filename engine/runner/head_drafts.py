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

from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace

from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.layers.step import LayerStep
from bequest.engine.models.config import DecoderConfig
from bequest.engine.runner.block_bytes import move_blocks
from bequest.engine.runner.cpu_attention import CpuAttention
from bequest.engine.runner.device_drafts import Drafted, Guess
from bequest.engine.runner.draft_passes import DraftedTokens, DraftPass, Places, passes_of_head
from bequest.engine.runner.head_pairs import KeptEnds, Runs, pairs_of_step
from bequest.engine.types import IntArray, StepBatch, StepMoves, StepSamples


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
        self.caches = kv_cache, host_cache
        self._kv_cache = kv_cache
        self._attention = CpuAttention(head.config, kv_cache, bfloat16=bfloat16)
        self._block_size = kv_cache.shape[4]
        self._states = torch.zeros(num_rows, head.config.hidden_size)  # behind the last pair of each sampler row
        self._ends = KeptEnds(2 * num_rows)
        self._end_states = torch.zeros(
            2 * num_rows, head.config.hidden_size
        )  # what chunks knew behind their last tokens

    def move(self, moves: StepMoves) -> None:
        move_blocks(*self.caches, moves)

    def draft(self, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        drafted = DraftedTokens(samples, len(input_ids))
        if samples.drafts is None or not len(drafted.samples):
            return Drafted(input_ids, samples)
        ids, places = input_ids.copy(), drafted.first
        states = self._states[drafted.rows[places]]
        ids[places] = self._sampled(states, places, drafted, guess)
        for of_pass in passes_of_head(batch, drafted):
            going_on = np.isin(places, of_pass.tokens + 1)
            states = self._compute_drafts(batch, ids, of_pass, states[torch.from_numpy(going_on)])
            places = of_pass.drafts
            ids[places] = self._sampled(states, places, drafted, guess)
        drafts = samples.drafts.copy()
        drafts[drafted.samples] = ids[samples.tokens[drafted.samples] + 1]
        return Drafted(ids, replace(samples, drafts=drafts))

    def _sampled(self, states: torch.Tensor, places: Places, drafted: DraftedTokens, guess: Guess) -> IntArray:
        logits = self._head.logits_of(states, self._vocab_size)
        return guess(logits, drafted.rows[places], drafted.positions[places])

    def _compute_drafts(self, batch: StepBatch, ids: IntArray, of: DraftPass, states: torch.Tensor) -> torch.Tensor:
        """Pairs of drafts and of the head's own states, one of each sequence."""
        return self._forward(
            torch.from_numpy(ids[of.tokens + 1]),
            states,
            (batch.positions[of.tokens], batch.slot_mapping[0][of.tokens]),
            self._attention.plan(of.query_start, of.lens, batch.block_tables[0][of.sequences]),
        )

    def learn(
        self, batch: StepBatch, samples: StepSamples, ids: IntArray, features: torch.Tensor, tokens: IntArray
    ) -> None:
        pairs = pairs_of_step(batch, samples, ids, self._ends, self._block_size)
        if pairs is None:
            return
        fused = self._head.enter(features)
        if len(pairs.ids):
            states = fused[torch.from_numpy(np.where(pairs.tokens < len(fused), pairs.tokens, 0))]
            states[pairs.joined] = self._end_states[pairs.tokens[pairs.joined]]
            following = pairs.ids.copy()
            sampled = following < 0
            following[sampled] = tokens[-following[sampled] - 1]
            made = self._forward(
                torch.from_numpy(following),
                states,
                (pairs.positions, pairs.slots),
                self._attention.plan(pairs.query_start, pairs.lens, batch.block_tables[0][pairs.sequences]),
            )
            runs = Runs.of(samples, pairs)
            last = pairs.of_token[samples.tokens[_last_counted(samples, tokens, runs.begins)]]
            self._states[runs.rows] = made[torch.from_numpy(last)]
        self._end_states[pairs.end_places] = fused[torch.from_numpy(pairs.end_tokens)]

    def _forward(
        self, ids: torch.Tensor, states: torch.Tensor, at: tuple[IntArray, np.ndarray], attention: AttentionWork
    ) -> torch.Tensor:
        """`at`: positions and slots."""
        positions, slots = map(torch.from_numpy, at)
        step = LayerStep(positions=positions, slot_mapping=(slots,), kv_cache=self._kv_cache, attention=(attention,))
        return self._head.forward(ids, states, step)


def _last_counted(samples: StepSamples, tokens: IntArray, begins: Places) -> Places:
    """Of each run the last sample that counts: later ones follow a wrong draft."""
    if samples.drafts is None:
        return begins
    wrong = np.where(tokens != samples.drafts, np.arange(len(tokens)), len(tokens))
    following: Places = np.minimum.accumulate(wrong[::-1])[::-1]  # the first wrong one from each on
    return following[begins]
