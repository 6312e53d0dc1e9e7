"""A head that reads states of the target and drafts, on a GPU: what engine/runner/head_drafts.py does, queued. Which
samples count, and so where a row goes on, is known on the device alone. Device thread only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels.cuda_capture import Pool
from bequest.engine.kernels.cuda_sampler import CudaSampler
from bequest.engine.layers.step import LayerStep
from bequest.engine.runner.cuda_buffers import StepBuffers
from bequest.engine.runner.cuda_drafts import DraftCache, QueuedStep, known_ids
from bequest.engine.runner.cuda_passes import CudaPasses, PassArrays, PassLimits
from bequest.engine.runner.cuda_sizes import StepSize
from bequest.engine.runner.draft_passes import DraftedTokens, DraftPass, Places, passes_of_head
from bequest.engine.runner.head_drafts import Head
from bequest.engine.runner.head_pairs import KeptEnds, Runs, StepPairs, pairs_of_step
from bequest.engine.types import StepMoves

_NO_TABLES, _NO_INTS, _NO_SLOTS = np.empty((0, 0), np.int32), np.empty(0, np.int32), np.empty(0, np.int64)


class CudaHeadDrafts:
    """CudaDrafts."""

    def __init__(
        self, head: Head, cache: DraftCache, dtype: torch.dtype, limits: PassLimits, sampler: CudaSampler
    ) -> None:
        device, hidden = cache.blocks.device, head.config.hidden_size
        self.layers = head.layers
        self._head = head
        self.cache = cache
        self._sampler = sampler
        self._num_rows = limits.num_rows
        self._block_size = cache.blocks.shape[4]
        # Behind the last pair of each sampler row; one more is padding's, as in the next two.
        self._states = torch.zeros(limits.num_rows + 1, hidden, dtype=dtype, device=device)
        self._guessed = torch.zeros(limits.num_rows + 1, dtype=torch.int32, device=device)
        self._drafted = torch.zeros(limits.max_tokens + 1, dtype=torch.int32, device=device)
        self._ends = KeptEnds(2 * limits.num_rows)
        self._end_states = torch.zeros(2 * limits.num_rows, hidden, dtype=dtype, device=device)
        padding = {"numbers": limits.max_tokens, "rows": limits.num_rows, "tokens": 0, "begins": 0, "of_sample": 0}
        self._passes = CudaPasses(head.config, cache.blocks, dtype, limits, padding)

    def move(self, moves: StepMoves, copies: Tensor) -> None:
        self.cache.move(moves, copies)

    # --- drafts --------------------------------------------------------------------------------------------------

    def draft(self, step: QueuedStep) -> None:
        drafted = step.drafted
        if not len(drafted.samples):
            return
        self._passes.run(self._sample, self._first(drafted))
        for of_pass in passes_of_head(step.batch, drafted):
            self._passes.run(self._go_on, self._arrays(step, of_pass))
        step.fill(self._drafted[: len(drafted.samples)])

    def _first(self, drafted: DraftedTokens) -> PassArrays:
        """Of no token: the states are there."""
        places = drafted.first
        return PassArrays(
            ids=_NO_INTS,
            positions=_NO_INTS,
            slots=_NO_SLOTS,
            query_start=np.zeros(1, np.int32),
            lens=_NO_INTS,
            tables=_NO_TABLES,
            num_samples=len(places),
            others=_samples(drafted, places),
        )

    def _arrays(self, step: QueuedStep, of: DraftPass) -> PassArrays:
        batch, drafted = step.batch, step.drafted
        return PassArrays(
            ids=np.zeros(len(of.tokens), np.int32),  # they are guessed
            positions=batch.positions[of.tokens],
            slots=batch.slot_mapping[0][of.tokens],
            query_start=of.query_start,
            lens=of.lens,
            tables=np.ascontiguousarray(batch.block_tables[0][of.sequences]),
            num_samples=len(of.drafts),
            others=_samples(drafted, of.drafts),
        )

    def _go_on(self, size: StepSize, buffers: StepBuffers) -> None:
        """Rows pair what they guessed with what they knew before it; the result takes the place of that."""
        rows = buffers.on_device("rows")[: size.num_tokens]
        made = self._forward(self._guessed[rows], self._states[rows], size, buffers)
        self._states.index_copy_(0, rows, made)
        self._sample(size, buffers)

    def _sample(self, size: StepSize, buffers: StepBuffers) -> None:
        """Rows guess behind what they know."""
        samples, at = size.num_samples, buffers.on_device
        logits = self._head.logits_of(self._states[at("rows")[:samples]], self._sampler.vocab_size)
        rows, positions = at("sample_rows")[:samples], at("sample_positions")[:samples]
        drafts = self._sampler.guess(logits, rows, positions, self._guessed[:-1])
        self._drafted.index_copy_(0, at("numbers")[:samples], drafts)

    def _forward(self, ids: Tensor, states: Tensor, size: StepSize, buffers: StepBuffers) -> Tensor:
        num, at = size.num_tokens, buffers.on_device
        step = LayerStep(
            positions=at("positions")[:num],
            slot_mapping=at("slot_mapping")[:, :num].unbind(),
            kv_cache=self.cache.blocks,
            attention=(buffers.bind(0, size),),
        )
        return self._head.forward(ids, states, step)

    # --- what steps make known -----------------------------------------------------------------------------------

    def learn(self, step: QueuedStep, features: Tensor) -> None:
        ids = known_ids(step.batch, self._sampler.vocab_size)
        pairs = pairs_of_step(step.batch, step.samples, ids, self._ends, self._block_size)
        if pairs is None:
            return
        fused = self._head.enter(features)
        if len(pairs.ids):
            runs = Runs.of(step.samples, pairs)
            self._passes.run(lambda *sized: self._pair(step, fused, pairs, runs, *sized), _pairs(step, pairs, runs))
        if len(pairs.end_tokens):
            places, tokens = (_sent(array, fused.device) for array in (pairs.end_places, pairs.end_tokens))
            self._end_states.index_copy_(0, places, fused[tokens])

    def _pair(
        self, step: QueuedStep, fused: Tensor, pairs: StepPairs, runs: Runs, size: StepSize, buffers: StepBuffers
    ) -> None:
        at, num = buffers.on_device, size.num_tokens
        states = fused[at("tokens")[:num]]
        if len(pairs.joined):
            places = (pairs.joined, pairs.tokens[pairs.joined])
            joined, ends = (_sent(array, fused.device) for array in places)
            states.index_copy_(0, joined, self._end_states[ends])
        ids = at("input_ids")[:num]
        sampled = step.tokens[(-1 - ids).clamp_(0, max(0, len(step.tokens) - 1)).long()] if len(step.tokens) else ids
        made = self._forward(torch.where(ids < 0, sampled, ids), states, size, buffers)
        if len(runs.rows):
            last = _last_counted(step, at("begins")[: len(runs.rows)])
            self._states.index_copy_(0, at("rows")[: len(runs.rows)], made[at("of_sample")[: len(step.samples)][last]])

    # --- start ---------------------------------------------------------------------------------------------------

    def capture(self, pool: Pool) -> None:
        for compute in (self._go_on, self._sample):
            self._passes.capture(pool, compute, self._num_rows, samples=(True,))

    def run_padding(self, num_tokens: int) -> None:
        size = StepSize(num_tokens, min(num_tokens, self._num_rows), prefill=True)
        buffers = self._passes.pad(size)
        states = self._states.new_zeros(num_tokens, self._states.shape[1])
        self._forward(buffers.on_device("input_ids")[:num_tokens], states, size, buffers)
        self._sample(size, buffers)

    def time_pass(self) -> float:
        return self._passes.time(self._go_on)


def _samples(drafted: DraftedTokens, places: Places) -> dict[str, np.ndarray]:
    rows = drafted.rows[places]
    return {
        "sample_rows": rows,
        "sample_positions": drafted.positions[places],
        "numbers": drafted.numbers[places],
        "rows": rows,
    }


def _pairs(step: QueuedStep, pairs: StepPairs, runs: Runs) -> PassArrays:
    tokens = pairs.tokens.copy()
    tokens[pairs.joined] = 0
    return PassArrays(
        ids=pairs.ids,
        positions=pairs.positions,
        slots=pairs.slots,
        query_start=pairs.query_start,
        lens=pairs.lens,
        tables=np.ascontiguousarray(step.batch.block_tables[0][pairs.sequences]),
        others={
            "tokens": tokens,
            "begins": runs.begins,
            "rows": runs.rows,
            "of_sample": np.maximum(pairs.of_token[step.samples.tokens], 0),
        },
    )


def _last_counted(step: QueuedStep, begins: Tensor) -> Tensor:
    """Of each run the last sample that counts: later ones follow a wrong draft."""
    if step.samples.drafts is None:
        return begins
    numbers = torch.arange(len(step.tokens), device=begins.device)
    wrong = torch.where(step.tokens != step.drafts, numbers, len(numbers))
    following = wrong.flip(0).cummin(0).values.flip(0)  # the first wrong one from each on
    return following[begins]


def _sent(array: Places, device: torch.device) -> Tensor:
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
