"""From scheduled chunks to a StepPlan: what each chunk leads to, and whom its result concerns.

Owned by the event-loop thread. A chunk that completes its sequence's tokens ends in a sample, in the candidates of a
beam, or in the end of a request that wanted only its prompt computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bequest.engine._C import prepare_batch
from bequest.engine.beams.search import BeamSearch
from bequest.engine.scheduling.assembly import BlockMoves, Outcome, assemble
from bequest.engine.scheduling.chunk import Chunk, EncoderRun
from bequest.engine.scheduling.sampler_rows import SamplerRows
from bequest.engine.scheduling.sequence import Group, Sequence
from bequest.engine.types import NO_ROW, NO_SLOT, Matcher, PromptLogprobSpec, Registration, Release, StepPlan
from bequest.engine.types.hidden import Indices


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan and whom it concerns: needed again when its result comes."""

    plan: StepPlan
    sampled: tuple[Sequence, ...]  # as plan.samples.rows, up to the beams'
    prompt_ended: tuple[Group, ...]  # whose last prompt token this step computes without sampling (max_tokens 0)
    prompt_logprobs: tuple[Group, ...]  # as plan.prompt_logprobs
    beams: tuple[tuple[Group, BeamSearch], ...]  # as plan.beams; a group that started again has another search
    num_prompt_tokens: int
    num_preempted: int
    masked: tuple[Matcher, ...] = ()  # as plan.samples.masks
    tapped: tuple[tuple[Sequence, Indices], ...] = ()  # as plan.taps.specs: whose states, of which positions
    encoded: tuple[tuple[Group, Indices], ...] = ()  # as plan.taps.encoders, likewise
    extracts_only: bool = False  # no generation is in it
    changes: tuple[Registration | Release, ...] = ()  # that the device is told before the plan


class StepMaker:
    def __init__(
        self, rows: SamplerRows, part_ways: Callable[[Sequence], list[Sequence]], *, prefix_caching: bool
    ) -> None:
        """`part_ways` gives the choices of a sequence whose prefill ends: itself, or all of its group."""
        self._rows = rows
        self._part_ways = part_ways
        self._prefix_caching = prefix_caching
        self._step = 0

    def make(self, chunks: list[Chunk], moves: BlockMoves, encoders: list[EncoderRun], num_preempted: int) -> Launch:
        batch = prepare_batch(
            [c.tables for c in chunks],
            [c.sequence.tokens for c in chunks],
            [c.begin for c in chunks],
            [c.count for c in chunks],
            [c.sequence.row for c in chunks],
        )
        closing = self._rows.take_closed()
        outcome = Outcome()
        start = 0
        for chunk in chunks:
            if chunk.read_only:
                batch.slot_mapping[start : start + chunk.count] = NO_SLOT
            self._conclude(outcome, chunk, start)
            start += chunk.num_tokens
        masked = _masked_last(outcome)
        self._step += 1
        runs = sorted(encoders, key=lambda run: run.spec.slots is None)  # those that fill cross blocks come first
        read = [run for run in runs if run.tapped is not None]
        plan = assemble(self._step, chunks, batch, moves, runs, closing, outcome, self._rows.catalogues)
        return Launch(
            plan,
            tuple(outcome.sampled),
            tuple(outcome.ended),
            tuple(outcome.spec_groups),
            tuple((group, group.search) for group in outcome.beam_tokens if group.search is not None),
            outcome.num_prompt_tokens,
            num_preempted,
            masked,
            tuple(outcome.tapped),
            tuple((run.group, run.tapped) for run in read if run.tapped is not None),
            all(chunk.sequence.extracts for chunk in chunks),
            self._rows.catalogues.take_changes(),
        )

    def _conclude(self, outcome: Outcome, chunk: Chunk, start: int) -> None:
        """What a chunk, at token `start` of the step, leads to."""
        sequence, end = chunk.sequence, chunk.begin + chunk.count
        if chunk.tapped is not None:
            outcome.tapped.append((sequence, chunk.tapped))
            outcome.tapped_tokens.append(chunk.tapped + (start - chunk.begin))
        if chunk.read_only:
            return
        if chunk.begin < sequence.num_prompt or chunk.count > 1:
            # Known tokens: whoever comes next may share them. A sampled token is committed when it is known.
            if self._prefix_caching:
                sequence.table.commit(sequence.tokens, min(end, len(sequence.tokens)))
            outcome.num_prompt_tokens += max(0, min(end, sequence.num_prompt) - chunk.begin)
            if (spec := _prompt_logprobs(chunk, start)) is not None:
                outcome.specs.append(spec)
                outcome.spec_groups.append(sequence.group)
        if end < sequence.planned_len or sequence.owing:
            return
        last = start + chunk.count - 1
        if sequence.group.search is not None and sequence.wants_sample:
            outcome.beam_tokens[sequence.group] = range(last, start + chunk.num_tokens)
            sequence.group.forked = True
            return
        choices = [sequence] if sequence.group.forked else self._part_ways(sequence)
        if not sequence.wants_sample:
            outcome.ended.append(sequence.group)
            return
        for choice in choices:
            if choice.row == NO_ROW:
                outcome.opened.append(self._rows.open(choice))
            outcome.sampled.append(choice)
            outcome.sample_tokens.append(last)
            outcome.positions.append(choice.planned_len)
            choice.note_sampling()


def _masked_last(outcome: Outcome) -> tuple[Matcher, ...]:
    """Moves the samples of rows with a grammar behind the others; returns their matchers."""
    masked = [s.matcher is not None for s in outcome.sampled]
    if not any(masked):
        return ()
    order = sorted(range(len(masked)), key=masked.__getitem__)
    outcome.sampled = [outcome.sampled[i] for i in order]
    outcome.sample_tokens = [outcome.sample_tokens[i] for i in order]
    outcome.positions = [outcome.positions[i] for i in order]
    return tuple(s.matcher for s in outcome.sampled if s.matcher is not None)


def _prompt_logprobs(chunk: Chunk, start: int) -> PromptLogprobSpec | None:
    """What this chunk can tell of the prompt: position p gives the log-probability of token p + 1.

    A recomputed chunk does not tell again what is known (`done` entries, the first being None).
    """
    sequence, group = chunk.sequence, chunk.sequence.group
    top = group.request.params.prompt_logprobs
    if top is None or sequence.choice != 0:
        return None
    first = max(chunk.begin, group.prompt_logprobs_planned)
    last = min(chunk.begin + chunk.count, sequence.num_prompt - 1)
    if first >= last:
        return None
    group.prompt_logprobs_planned = last
    targets = np.asarray(group.request.prompt_token_ids[first + 1 : last + 1], dtype=np.int32)
    return PromptLogprobSpec(
        request_id=group.request.id, first_token=start + first - chunk.begin, targets=targets, top=top
    )
