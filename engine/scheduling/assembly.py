"""From what the chunks of a step lead to, to the arrays of its StepPlan. Owned by the event-loop thread."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bequest.engine._C import Batch, BlockTable, gather_tables
from bequest.engine.scheduling.catalogue_handles import CatalogueHandles
from bequest.engine.scheduling.chunk import Chunk, EncoderRun
from bequest.engine.scheduling.sequence import Group, Sequence
from bequest.engine.types import (
    NO_ROW,
    BeamSpec,
    CatalogueSpec,
    IntArray,
    MaskSpec,
    PromptLogprobSpec,
    RowSpec,
    StepBatch,
    StepMoves,
    StepPlan,
    StepRows,
    StepSamples,
)
from bequest.engine.types.hidden import NOT_TAPPED, EncoderTap, Indices, StepTaps, TapSpec

BlockPairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """What happens to blocks before the step: (source, destination) pairs."""

    swaps_out: BlockPairs
    swaps_in: BlockPairs
    copies: BlockPairs
    copies_of_beams: list[IntArray]  # [C, 2] of each group


@dataclass(slots=True)
class Outcome:
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


def assemble(
    step: int,
    chunks: list[Chunk],
    batch: Batch,
    moves: BlockMoves,
    runs: list[EncoderRun],
    closing: tuple[int, ...],
    outcome: Outcome,
    catalogues: CatalogueHandles,
) -> StepPlan:
    """REQUIRES: runs without slots are the last ones; so are samples of rows with a grammar"""
    tapped = bool(outcome.tapped) or any(run.tapped is not None for run in runs)
    return StepPlan(
        step=step,
        batch=_batch(batch, chunks),
        moves=_moves(moves),
        rows=StepRows(close=closing, open=tuple(outcome.opened)),
        samples=_samples(step, outcome),
        prompt_logprobs=tuple(outcome.specs),
        beams=_beam_specs(outcome, catalogues),
        taps=_taps(outcome, len(batch.input_ids), runs) if tapped else None,
        encoders=tuple(run.spec for run in runs),
    )


def _batch(batch: Batch, chunks: list[Chunk]) -> StepBatch:
    cross_tables, cross_lens = _cross_arrays(chunks)
    return StepBatch(
        input_ids=batch.input_ids,
        input_rows=batch.input_rows,
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
        query_start=batch.query_start,
        seq_lens=batch.seq_lens,
        block_tables=batch.block_tables,
        cross_tables=cross_tables,
        cross_lens=cross_lens,
    )


def _masks_of(step: int, sampled: list[Sequence]) -> MaskSpec | None:
    if not sampled or sampled[-1].matcher is None:
        return None
    num_masked = sum(s.matcher is not None for s in sampled)
    return MaskSpec(number=step, first_sample=len(sampled) - num_masked, num_rows=num_masked)


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


def _moves(moves: BlockMoves) -> StepMoves:
    return StepMoves(swaps_out=_pairs(moves.swaps_out), swaps_in=_pairs(moves.swaps_in), copies=_all_copies(moves))


def _pairs(pairs: BlockPairs) -> IntArray:
    return np.asarray(pairs, dtype=np.int32) if pairs else _NO_PAIRS


def _all_copies(moves: BlockMoves) -> IntArray:
    if not moves.copies and len(moves.copies_of_beams) == 1:
        return moves.copies_of_beams[0]
    pairs = _pairs(moves.copies)
    return np.concatenate([pairs, *moves.copies_of_beams]) if moves.copies_of_beams else pairs


def _samples(step: int, outcome: Outcome) -> StepSamples:
    """The beams', which have no rows, are the last."""
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
    return StepSamples(
        tokens=tokens,
        rows=rows,
        positions=positions,
        num_logprobs=_most_logprobs(outcome),
        masks=_masks_of(step, outcome.sampled),
    )


def _taps(outcome: Outcome, num_tokens: int, runs: list[EncoderRun]) -> StepTaps:
    rows = np.full(num_tokens, NOT_TAPPED, np.int32)
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
    return StepTaps(rows=rows, layers=layers, num_rows=first, specs=tuple(specs), encoders=tuple(encoders))


def _beam_specs(outcome: Outcome, catalogues: CatalogueHandles) -> tuple[BeamSpec, ...]:
    specs = []
    first = len(outcome.sample_tokens)
    for group, tokens in outcome.beam_tokens.items():
        search, params = group.search, group.request.params
        assert search is not None and len(tokens) == search.num_running
        catalogue = None
        if params.catalogue is not None:
            ends = tuple(sorted(search.stop_token_ids))
            catalogue = CatalogueSpec(handle=catalogues.handle_of(params.catalogue), end_token_ids=ends)
        specs.append(
            BeamSpec(
                request_id=group.request.id,
                first_sample=first,
                scores=search.scores,
                num_candidates=search.num_candidates,
                logit_bias=params.logit_bias,
                allowed_token_ids=params.allowed_token_ids,
                held_back=search.forbidden,
                catalogue=catalogue,
                nodes=search.nodes,
            )
        )
        first += len(tokens)
    return tuple(specs)


def _most_logprobs(outcome: Outcome) -> int | None:
    groups = [*(sequence.group for sequence in outcome.sampled), *outcome.beam_tokens]
    wanted = [group.request.params.logprobs for group in groups]
    return max((w for w in wanted if w is not None), default=None)
