"""From scheduled chunks to a StepPlan: what each chunk leads to, and whom its result concerns.

Owned by the event-loop thread. A chunk that completes its sequence's tokens ends in a sample, in the candidates of a
beam, or in the end of a request that wanted only its prompt computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from bequest.engine._C import BeamTables, BlockTable, gather_tables, prepare_batch
from bequest.engine.beams.search import BeamSearch
from bequest.engine.constraints.masks import StepMasks
from bequest.engine.scheduling.sampler_rows import SamplerRows
from bequest.engine.scheduling.sequence import NO_ROW, Group, Sequence
from bequest.engine.types import BeamSpec, IntArray, Matcher, PromptLogprobSpec, RowSpec, StepPlan
from bequest.engine.types.encoder import EncoderSpec
from bequest.engine.types.hidden import EncoderTap, Indices, StepTaps, TapSpec

BlockPairs = list[tuple[int, int]]
NO_SLOT = -1


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Positions [begin, begin + count) of a sequence, to be computed; of a group of beams, one position of each."""

    sequence: Sequence
    begin: int
    count: int
    tapped: Indices | None = None  # positions whose hidden states are stored
    read_only: bool = False  # their KV is there, and is not written again

    @property
    def tables(self) -> BlockTable | BeamTables:
        beams = self.sequence.group.beams
        return self.sequence.table if beams is None else beams

    @property
    def num_tokens(self) -> int:
        beams = self.sequence.group.beams
        return self.count if beams is None else len(beams)


@dataclass(frozen=True, slots=True)
class EncoderRun:
    """An encoder that runs before the chunks are computed."""

    group: Group
    spec: EncoderSpec
    tapped: Indices | None = None  # positions whose hidden states are stored


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """What happens to blocks before the step: (source, destination) pairs."""

    swaps_out: BlockPairs
    swaps_in: BlockPairs
    copies: BlockPairs
    copies_of_beams: list[IntArray]  # [C, 2] of each group


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan and whom it concerns: needed again when its result comes."""

    plan: StepPlan
    sampled: tuple[Sequence, ...]  # as plan.sample_rows, up to the beams'
    prompt_ended: tuple[Group, ...]  # whose last prompt token this step computes without sampling (max_tokens 0)
    prompt_logprobs: tuple[Group, ...]  # as plan.prompt_logprobs
    beams: tuple[tuple[Group, BeamSearch], ...]  # as plan.beams; a group that started again has another search
    num_prompt_tokens: int
    num_preempted: int
    masked: tuple[Matcher, ...] = ()  # as plan.masks
    tapped: tuple[tuple[Sequence, Indices], ...] = ()  # as plan.taps.specs: whose states, of which positions
    encoded: tuple[tuple[Group, Indices], ...] = ()  # as plan.taps.encoders, likewise
    extracts_only: bool = False  # no generation is in it


@dataclass(slots=True)
class _Outcome:
    """What the chunks of a step lead to: samples, ends of prompts, log-probabilities of prompts."""

    sampled: list[Sequence] = field(default_factory=list)
    sample_tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    opened: list[RowSpec] = field(default_factory=list)
    ended: list[Group] = field(default_factory=list)
    specs: list[PromptLogprobSpec] = field(default_factory=list)
    spec_groups: list[Group] = field(default_factory=list)
    beam_tokens: dict[Group, range] = field(default_factory=dict)  # as sample_tokens, of each group's beams
    num_prompt_tokens: int = 0
    tapped: list[tuple[Sequence, Indices]] = field(default_factory=list)
    tapped_tokens: list[Indices] = field(default_factory=list)  # as tapped, of the step


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
        outcome = _Outcome()
        start = 0
        for chunk in chunks:
            if chunk.read_only:
                batch.slot_mapping[start : start + chunk.count] = NO_SLOT
            self._conclude(outcome, chunk, start)
            start += chunk.num_tokens
        masked = _masked_last(outcome)
        self._step += 1
        cross_tables, cross_lens = _cross_arrays(chunks)
        runs = sorted(encoders, key=lambda run: run.spec.slots is None)  # those that fill cross blocks come first
        read = [run for run in runs if run.tapped is not None]
        sample_tokens, sample_rows, sample_positions = _samples(outcome)
        plan = StepPlan(
            step=self._step,
            input_ids=batch.input_ids,
            positions=batch.positions,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            slot_mapping=batch.slot_mapping,
            block_tables=batch.block_tables,
            swaps_out=_pairs(moves.swaps_out),
            swaps_in=_pairs(moves.swaps_in),
            block_copies=_all_copies(moves),
            close_rows=closing,
            open_rows=tuple(outcome.opened),
            sample_tokens=sample_tokens,
            sample_rows=sample_rows,
            sample_positions=sample_positions,
            num_logprobs=_most_logprobs(outcome),
            prompt_logprobs=tuple(outcome.specs),
            beams=_beam_specs(outcome),
            masks=_masks_of(outcome.sampled, len(masked)),
            taps=_taps(outcome, len(batch.input_ids), runs) if outcome.tapped or read else None,
            encoders=tuple(run.spec for run in runs),
            cross_tables=cross_tables,
            cross_lens=cross_lens,
        )
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
        )

    def _conclude(self, outcome: _Outcome, chunk: Chunk, start: int) -> None:
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


def _masked_last(outcome: _Outcome) -> tuple[Matcher, ...]:
    """Moves the samples of rows with a grammar behind the others; returns their matchers."""
    masked = [s.matcher is not None for s in outcome.sampled]
    if not any(masked):
        return ()
    order = sorted(range(len(masked)), key=masked.__getitem__)
    outcome.sampled = [outcome.sampled[i] for i in order]
    outcome.sample_tokens = [outcome.sample_tokens[i] for i in order]
    outcome.positions = [outcome.positions[i] for i in order]
    return tuple(s.matcher for s in outcome.sampled if s.matcher is not None)


def _masks_of(sampled: list[Sequence], num_masked: int) -> StepMasks | None:
    if not num_masked:
        return None
    grammar = sampled[-1].group.request.params.grammar
    assert grammar is not None
    return StepMasks(len(sampled) - num_masked, num_masked, grammar.vocab_size)


def _cross_arrays(chunks: list[Chunk]) -> tuple[IntArray | None, IntArray | None]:
    """[S, MBX] blocks and [S] lengths of what the sequences of an encoder-decoder model attend to."""
    if not chunks or chunks[0].sequence.group.request.encoder is None:
        return None, None
    tables: list[BlockTable] = []
    lens: list[int] = []
    for group in (chunk.sequence.group for chunk in chunks):
        assert group.cross is not None and group.request.encoder is not None
        num_rows = 1 if group.beams is None else len(group.beams)
        tables += [group.cross.table] * num_rows
        lens += [group.request.encoder.length] * num_rows
    return gather_tables(tables), np.asarray(lens, dtype=np.int32)


_NO_PAIRS = np.empty((0, 2), np.int32)


def _pairs(pairs: BlockPairs) -> IntArray:
    return np.asarray(pairs, dtype=np.int32) if pairs else _NO_PAIRS


def _all_copies(moves: BlockMoves) -> IntArray:
    if not moves.copies and len(moves.copies_of_beams) == 1:
        return moves.copies_of_beams[0]
    pairs = _pairs(moves.copies)
    return np.concatenate([pairs, *moves.copies_of_beams]) if moves.copies_of_beams else pairs


def _samples(outcome: _Outcome) -> tuple[IntArray, IntArray, IntArray]:
    """Tokens, rows and positions [N] of the samples; the beams', which have no rows, are the last."""
    of_beams = [np.arange(r.start, r.stop, dtype=np.int32) for r in outcome.beam_tokens.values()]
    num, num_beams = len(outcome.sampled), sum(map(len, of_beams))
    samples = np.empty((3, num + num_beams), np.int32)
    tokens, rows, positions = samples
    if num:
        tokens[:num] = outcome.sample_tokens
        rows[:num] = [s.row for s in outcome.sampled]
        positions[:num] = outcome.positions
    if num_beams:
        tokens[num:] = of_beams[0] if len(of_beams) == 1 else np.concatenate(of_beams)
        rows[num:] = NO_ROW
        positions[num:] = 0
    return tokens, rows, positions


def _taps(outcome: _Outcome, num_tokens: int, runs: list[EncoderRun]) -> StepTaps:
    rows = np.full(num_tokens, -1, np.int32)
    layers = np.zeros((num_tokens, 2), np.uint64)
    specs, first = [], 0
    for (sequence, _), tokens in zip(outcome.tapped, outcome.tapped_tokens, strict=True):
        assert sequence.capture is not None
        num_layers = sequence.capture.num_layers
        end = first + len(tokens) * num_layers
        rows[tokens] = np.arange(first, end, num_layers)
        layers[tokens] = sequence.capture.mask
        specs.append(TapSpec(tokens.astype(np.int32), num_layers))
        first = end
    encoders, start = [], 0
    for run in runs:
        wanted = run.group.request.hidden_states
        if run.tapped is not None and wanted is not None:
            encoders.append(EncoderTap(run.tapped + start, wanted.tapped_layers, first))
            first += encoders[-1].num_rows
        start += run.spec.input.length
    return StepTaps(rows, layers, first, tuple(specs), tuple(encoders))


def _beam_specs(outcome: _Outcome) -> tuple[BeamSpec, ...]:
    specs = []
    first = len(outcome.sample_tokens)
    for group, tokens in outcome.beam_tokens.items():
        search = group.search
        assert search is not None and len(tokens) == search.num_running
        specs.append(
            BeamSpec(
                request_id=group.request.id,
                params=group.request.params,
                first_sample=first,
                scores=search.scores,
                num_candidates=search.num_candidates,
                held_back=search.forbidden,
                nodes=search.nodes,
                end_token_ids=() if search.nodes is None else tuple(sorted(search.stop_token_ids)),
            )
        )
        first += len(tokens)
    return tuple(specs)


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
    return PromptLogprobSpec(group.request.id, start + first - chunk.begin, targets, top)


def _most_logprobs(outcome: _Outcome) -> int | None:
    groups = [*(sequence.group for sequence in outcome.sampled), *outcome.beam_tokens]
    wanted = [group.request.params.logprobs for group in groups]
    return max((w for w in wanted if w is not None), default=None)
