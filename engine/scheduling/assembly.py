"""From what the chunks of a step lead to, to the arrays of its StepPlan. Owned by the event-loop thread."""

from __future__ import annotations

import msgspec
import numpy as np

from bequest.engine._C import Batch, BlockTable, any_adapter, gather_tables, rows_of
from bequest.engine.cache.states import StatePlan
from bequest.engine.scheduling.outcome import StepOutcome
from bequest.engine.state.draft import Draft, EncoderRun
from bequest.engine.state.sequence import Copies, Sequence
from bequest.engine.types import (
    MAX_BEAM_WIDTH,
    NO_DRAFT,
    NO_ROW,
    BeamSpec,
    IntArray,
    MaskSpec,
    StepBatch,
    StepMoves,
    StepPlan,
    StepRows,
    StepSamples,
)
from bequest.engine.types.hidden import NOT_TAPPED, EncoderTap, StepTaps, TapSpec
from bequest.engine.types.image import Image, StepImages

BlockPairs = list[tuple[int, int]]


class BlockMoves(msgspec.Struct, frozen=True):
    """What happens to blocks before the step: (source, destination) pairs."""

    swaps_out: BlockPairs
    swaps_in: BlockPairs
    copies: BlockPairs
    copies_of_beams: list[Copies]  # [C, 2] of each group


def assemble(
    step: int,
    draft: Draft,
    batch: Batch,
    moves: BlockMoves,
    runs: list[EncoderRun],
    closing: tuple[int, ...],
    outcome: StepOutcome,
    states: StatePlan | None,
    images: tuple[tuple[int, ...], tuple[Image, ...]],
) -> StepPlan:
    """`images`: what the device drops, and what its tower looks at.

    REQUIRES: runs without slots are the last ones; so are samples of rows with a grammar
    """
    tapped = bool(outcome.tapped) or any(run.tapped is not None for run in runs)
    return StepPlan(
        step=step,
        batch=_batch(batch, draft, states),
        moves=_moves(moves, states),
        rows=StepRows(close=closing, open=tuple(outcome.opened)),
        samples=_samples(step, outcome),
        prompt_logprobs=tuple(outcome.scored),
        beams=_beam_specs(outcome),
        taps=_taps(outcome, len(batch.input_ids), runs) if tapped else None,
        encoders=tuple(run.spec for run in runs),
        images=_images(outcome, *images),
    )


def _batch(batch: Batch, draft: Draft, states: StatePlan | None) -> StepBatch:
    cross_tables, cross_lens = _cross_arrays(draft)
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
        adapters=_adapters(draft),
        state_starts=None if states is None else states.starts,
        state_slots=None if states is None else states.slots,
    )


def _images(outcome: StepOutcome, dropped: tuple[int, ...], looked_at: tuple[Image, ...]) -> StepImages | None:
    if not outcome.image_rows and not dropped and not looked_at:
        return None
    return StepImages(
        dropped=dropped, looked_at=looked_at, gathered=tuple(outcome.image_rows), together=tuple(outcome.together)
    )


def _masks_of(step: int, outcome: StepOutcome) -> MaskSpec | None:
    num_rows = outcome.num_masked
    if not num_rows:
        return None
    return MaskSpec(number=step, first_sample=len(outcome.sampled) - num_rows, num_rows=num_rows)


def _in_order(draft: Draft) -> list[Sequence]:
    return [*draft.streams, *[chunk.sequence for chunk in draft.chunks]]


def _cross_arrays(draft: Draft) -> tuple[IntArray | None, IntArray | None]:
    """[S, MBX] blocks and [S] lengths of what the sequences of an encoder-decoder model attend to."""
    first = draft.streams[0] if draft.streams else draft.chunks[0].sequence if draft.chunks else None
    if first is None or first.group.request.encoder is None:
        return None, None
    tables: list[BlockTable] = []
    lens: list[int] = []
    for sequence in _in_order(draft):
        group, num_rows = sequence.group, sequence.work.num_rows(sequence)
        assert group.cross is not None and group.request.encoder is not None
        tables += [group.cross.table] * num_rows
        lens += [group.request.encoder.length] * num_rows
    return gather_tables(tables), np.asarray(lens, dtype=np.int32)


def _adapters(draft: Draft) -> IntArray | None:
    """[S] handles."""
    sequences = _in_order(draft)
    if not any_adapter(sequences):
        return None
    handles: list[int] = []
    for sequence in sequences:
        handles += [sequence.group.adapter] * sequence.work.num_rows(sequence)
    return np.asarray(handles, dtype=np.int32)


_NO_PAIRS = np.empty((0, 2), np.int32)


def _moves(moves: BlockMoves, states: StatePlan | None) -> StepMoves:
    return StepMoves(
        swaps_out=_pairs(moves.swaps_out),
        swaps_in=_pairs(moves.swaps_in),
        copies=_all_copies(moves),
        states=_NO_PAIRS if states is None else states.moves,
    )


def _pairs(pairs: BlockPairs) -> IntArray:
    return np.asarray(pairs, dtype=np.int32) if pairs else _NO_PAIRS


def _all_copies(moves: BlockMoves) -> IntArray:
    """Those of beams first, which a `Following` counts."""
    arrays = [np.asarray(copies, np.int32) for copies in moves.copies_of_beams]
    if not moves.copies and len(arrays) == 1:
        return arrays[0]
    pairs = _pairs(moves.copies)
    return np.concatenate([*arrays, pairs]) if arrays else pairs


def _samples(step: int, outcome: StepOutcome) -> StepSamples:
    """The beams', which have no rows, are the last."""
    num = len(outcome.sampled)
    if not num and len(outcome.ranked) == 1:
        return _beams_alone(outcome.ranked[0][0], outcome.num_logprobs)
    of_beams = [np.arange(r.start, r.stop, dtype=np.int32) for r, _ in outcome.ranked]
    num_beams = sum(map(len, of_beams))
    samples = np.empty((3, num + num_beams), np.int32)
    tokens, rows, positions = samples
    if num:
        tokens[:num] = outcome.sample_tokens
        rows[:num] = rows_of(outcome.sampled)
        positions[:num] = outcome.positions
    if num_beams:
        tokens[num:] = of_beams[0] if len(of_beams) == 1 else np.concatenate(of_beams)
        rows[num:] = NO_ROW
        positions[num:] = 0
    return StepSamples(
        tokens=tokens,
        rows=rows,
        positions=positions,
        drafts=_drafts(outcome, num + num_beams) if outcome.drafts else None,
        num_logprobs=outcome.num_logprobs,
        masks=_masks_of(step, outcome),
    )


# Of steps of one group of beams: they are slices of these.
_COUNTED = np.arange(2 * MAX_BEAM_WIDTH, dtype=np.int32)
_NO_ROWS = np.full(MAX_BEAM_WIDTH, NO_ROW, np.int32)
_NO_POSITIONS = np.zeros(MAX_BEAM_WIDTH, np.int32)


def _beams_alone(tokens: range, num_logprobs: int | None) -> StepSamples:
    num, known = len(tokens), tokens.stop <= len(_COUNTED)
    return StepSamples(
        tokens=_COUNTED[tokens.start : tokens.stop] if known else np.arange(tokens.start, tokens.stop, dtype=np.int32),
        rows=_NO_ROWS[:num],
        positions=_NO_POSITIONS[:num],
        num_logprobs=num_logprobs,
    )


def _drafts(outcome: StepOutcome, num_samples: int) -> IntArray:
    drafts = np.full(num_samples, NO_DRAFT, np.int32)
    drafts[: len(outcome.drafts)] = outcome.drafts
    return drafts


def _taps(outcome: StepOutcome, num_tokens: int, runs: list[EncoderRun]) -> StepTaps:
    rows = np.full(num_tokens, NOT_TAPPED, np.int32)
    layers = np.zeros((num_tokens, 2), np.uint64)
    specs, first = [], 0
    for sequence, _, tokens in outcome.tapped:
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


def _beam_specs(outcome: StepOutcome) -> tuple[BeamSpec, ...]:
    specs = []
    first = len(outcome.sample_tokens)
    for tokens, spec in outcome.ranked:
        specs.append(spec(first))
        first += len(tokens)
    return tuple(specs)
