"""From scheduled chunks to a launched step: what each chunk leads to, and whom its result concerns.

Owned by the event-loop thread.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from msgspec import structs

from bequest.engine._C import prepare_batch
from bequest.engine.cache.images import DeviceImages
from bequest.engine.cache.states import States
from bequest.engine.scheduling.assembly import BlockMoves, assemble
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.scheduling.outcome import StepOutcome
from bequest.engine.scheduling.results import Samples
from bequest.engine.scheduling.sampler_rows import SamplerRows
from bequest.engine.state.draft import Chunk, Draft, EncoderRun
from bequest.engine.state.launch import Launch
from bequest.engine.state.sequence import Lane
from bequest.engine.types import NO_SLOT, Matcher
from bequest.engine.work.desk import Desk
from bequest.engine.work.owed import StatesOfEncoder, StatesOfTokens


class StepMaker:
    def __init__(self, rows: SamplerRows, desk: Desk, states: States, limits: SchedulerLimits) -> None:
        self._rows = rows
        self._states = states
        self._desk = desk
        self._prefix_caching = limits.prefix_caching
        self._turns = limits.turns_images
        self._together = limits.images_together
        self._yields_from = limits.extraction.yields_from
        self._step = 0

    def make(self, draft: Draft, moves: BlockMoves, images: DeviceImages) -> Launch:
        streams, chunks = draft.streams, draft.chunks
        batch = prepare_batch(streams, [(c.tables, c.tokens, c.begin, c.count, c.sequence.row) for c in chunks])
        states = self._states.plan(draft)  # choices that part ways in this step share what it leaves
        yields = self._yields(draft, len(batch.input_ids))
        # What passes a step that yields may open a row that it would close.
        closing = () if yields else self._rows.take_closed()
        outcome = StepOutcome(self._rows)
        if self._turns:
            batch.positions[: len(streams)] += np.asarray([s.group.prompt.shift for s in streams], np.int32)
        outcome.sample_first(streams)
        start = len(streams)
        for chunk in chunks:
            if chunk.read_only:
                batch.slot_mapping[:, start : start + chunk.count] = NO_SLOT
            if chunk.sequence.group.prompt.images:
                number = int(np.searchsorted(batch.query_start, start, side="right")) - 1 if self._together else None
                outcome.gather_images(chunk, start, batch.input_ids, batch.positions, number)
            self._conclude(outcome, chunk, start)
            start += chunk.num_tokens
        masked = _masked_last(outcome)
        self._step += 1
        runs = sorted(draft.encoders, key=lambda run: run.spec.slots is None)  # those that fill cross blocks come first
        plan = assemble(self._step, draft, batch, moves, runs, closing, outcome, states, images.take())
        plan = structs.replace(plan, yields=True) if yields else plan
        drafts = tuple(outcome.drafts) if outcome.drafts else None
        samples = Samples(tuple(outcome.sampled), drafts, commits=self._prefix_caching)
        return Launch(
            plan=plan,
            expected=(samples, *outcome.expected, *self._expected_states(outcome, runs)),
            masked=masked,
            num_prompt_tokens=outcome.num_prompt_tokens,
            num_preempted=draft.num_preempted,
            num_extracted=sum(chunk.num_tokens for chunk in chunks if _is_extracted(chunk)),
            changes=self._rows.catalogues.take_changes(),
            nature=_nature(draft, outcome, start),
            images_ahead=images.take_ahead({rows.image for rows in outcome.image_rows}) if outcome.image_rows else 0,
        )

    def _yields(self, draft: Draft, num_tokens: int) -> bool:
        """Whether others may pass the step."""
        least = self._yields_from
        return least is not None and num_tokens >= least and not draft.encoders and _extracts(draft)

    def _conclude(self, outcome: StepOutcome, chunk: Chunk, start: int) -> None:
        """What a chunk, at token `start` of the step, leads to."""
        sequence = chunk.sequence
        if chunk.tapped is not None:
            outcome.tapped.append((sequence, chunk.tapped, chunk.tapped + (start - chunk.begin)))
        if chunk.read_only:
            return
        num_known = chunk.count - len(chunk.drafts)
        if chunk.begin < sequence.num_prompt or num_known > 1:
            # Known tokens: whoever comes next may share them. A sampled token is committed when it is known.
            end = chunk.begin + num_known
            if self._prefix_caching:
                sequence.table.commit(sequence.tokens, min(end, len(sequence.tokens)))
            outcome.num_prompt_tokens += max(0, min(end, sequence.num_prompt) - chunk.begin)
            outcome.tell_prompt(chunk, start)
        sequence.work.conclude(outcome, sequence, chunk, start)

    def _expected_states(
        self, outcome: StepOutcome, runs: list[EncoderRun]
    ) -> tuple[StatesOfTokens | StatesOfEncoder, ...]:
        """As the plan's taps: those of chunks, then those of encoders."""
        if not outcome.tapped and not runs:
            return ()
        desk, num = self._desk, len(outcome.tapped)
        of_tokens = [StatesOfTokens(s, positions, i, desk) for i, (s, positions, _) in enumerate(outcome.tapped)]
        read = [(run.group, run.tapped) for run in runs if run.tapped is not None]
        return (*of_tokens, *[StatesOfEncoder(group, tapped, num + i, desk) for i, (group, tapped) in enumerate(read)])


def _extracts(draft: Draft) -> bool:
    return not draft.streams and all(map(_is_extracted, draft.chunks))


def _is_extracted(chunk: Chunk) -> bool:
    return chunk.sequence.group.kind.lane is Lane.EXTRACTION


def _nature(draft: Draft, outcome: StepOutcome, num_tokens: int) -> Literal["decode", "extraction", "mixed"]:
    if _extracts(draft):
        return "extraction"
    if num_tokens == len(outcome.sampled) and not outcome.num_prompt_tokens and not outcome.tapped:
        return "decode"
    return "mixed"


def _masked_last(outcome: StepOutcome) -> tuple[Matcher, ...]:
    """Moves the samples of rows with a grammar behind the others; returns their matchers."""
    if not outcome.num_masked:
        return ()
    if outcome.num_masked < len(outcome.sampled):
        masked = [s.matcher is not None for s in outcome.sampled]
        order = sorted(range(len(masked)), key=masked.__getitem__)
        outcome.sampled = [outcome.sampled[i] for i in order]
        outcome.sample_tokens = [outcome.sample_tokens[i] for i in order]
        outcome.positions = [outcome.positions[i] for i in order]
        outcome.drafts = [outcome.drafts[i] for i in order] if outcome.drafts else []
    return tuple([s.matcher for s in outcome.sampled if s.matcher is not None])
