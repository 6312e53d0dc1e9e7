"""Sampler rows on the device side: opened and closed by plans, they hold what sampling needs to remember."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.cpu_beams import constrain_row
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.timestamps import TimestampRows
from bequest.engine.types import (
    NO_ROW,
    BoolArray,
    IntArray,
    LogprobArrays,
    MaskSource,
    StepBatch,
    StepRows,
    StepSamples,
)

_Indices = npt.NDArray[np.int64]


class RowSampler:
    """Draws tokens for sampler rows; raw log-probabilities beside them."""

    def __init__(self, num_rows: int, vocab_size: int, catalogues: PlacedCatalogues) -> None:
        self._sampler = kernels.Sampler(num_rows, vocab_size)
        self._timestamps = TimestampRows(num_rows, vocab_size, torch.device("cpu"))
        self._catalogues = catalogues

    def update_rows(self, rows: StepRows) -> None:
        self._timestamps.update_rows(rows)
        for row in rows.close:
            self._sampler.close_row(row)
        for spec in rows.open:
            self._sampler.open_row(spec)
            if spec.catalogue is not None:
                rule = self._catalogues.rule(spec.catalogue)
                constrain_row(self._sampler, spec.row, rule, spec.output_token_ids)

    def guess(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> IntArray:
        """What rows would sample of logits [N, V] with the random numbers of these positions; they stay as they are."""
        return self._sampler.guess(logits.contiguous(), rows, positions)

    def resolve(self, batch: StepBatch) -> IntArray:
        """[T] input ids, with those that only sampler rows know."""
        if not (batch.input_rows != NO_ROW).any():
            return batch.input_ids
        return self._sampler.resolve(batch.input_ids, batch.input_rows)

    def sample(
        self, logits: torch.Tensor, samples: StepSamples, masks: MaskSource | None = None
    ) -> tuple[IntArray, BoolArray, LogprobArrays | None]:
        """Tokens for logits [N, V]; 0 for a beam's, all of which come last.

        The samples that have masks are drawn when those are there. The log-probabilities are the raw model's, whatever
        the row's parameters do.
        """
        num = len(samples) - int(np.count_nonzero(samples.rows == NO_ROW))
        tokens, bad = np.zeros(len(samples), np.int32), np.zeros(len(samples), np.bool_)
        first = num if samples.masks is None else samples.masks.first_sample
        if first:
            part = slice(0, first)
            tokens[part], bad[part] = self._draw(logits[part], samples, part)
        if samples.masks is not None:
            assert masks is not None
            part, mask = slice(first, num), masks.of(samples.masks.number).wait()
            tokens[part], bad[part] = self._draw(logits[part], samples, part, mask)
        if samples.num_logprobs is None:
            return tokens, bad, None
        return tokens, bad, self.logprobs(logits, tokens, samples.num_logprobs)

    def _draw(
        self, logits: torch.Tensor, samples: StepSamples, part: slice, masks: IntArray | None = None
    ) -> tuple[IntArray, BoolArray]:
        """Of the samples in `part`, whose logits and masks these are."""
        rows, positions = samples.rows[part], samples.positions[part]
        if samples.drafts is None:
            return self._draw_each(logits, rows, positions, masks)
        tokens, bad = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.bool_)
        drafts = samples.drafts[part]
        counts = np.ones(len(rows), np.bool_)  # whether all samples of the row before it were as drafted
        for turn in _turns(rows):
            turn = turn[counts[turn]]
            if not len(turn):
                break
            of_turn = logits if len(turn) == len(rows) else logits[torch.from_numpy(turn)]
            allowed = None if masks is None else np.ascontiguousarray(masks[turn])
            tokens[turn], bad[turn] = self._draw_each(of_turn, rows[turn], positions[turn], allowed)
            ended = turn[bad[turn] | (tokens[turn] != drafts[turn])]
            counts[np.isin(rows, rows[ended])] = False
        return tokens, bad

    def _draw_each(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray, masks: IntArray | None
    ) -> tuple[IntArray, BoolArray]:
        """Of distinct rows."""
        if not self._timestamps.any:
            return self._sampler.sample(logits, rows, positions, masks)
        places = torch.from_numpy(rows)
        tokens, bad = self._sampler.sample(self._timestamps.masked(logits, places), rows, positions, masks)
        self._timestamps.record(places, torch.from_numpy(tokens))
        return tokens, bad

    def logprobs(self, logits: torch.Tensor, chosen: IntArray, top: int) -> LogprobArrays:
        chosen_logprobs, rank, top_ids, top_logprobs = kernels.logprobs(logits, chosen, top)
        return LogprobArrays(chosen=chosen_logprobs, rank=rank, top_ids=top_ids, top=top_logprobs)


def _turns(rows: IntArray) -> Iterator[_Indices]:
    """The first samples of all rows [N], then the second ones, and so on. REQUIRES: those of a row are consecutive"""
    begins = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
    number = np.arange(len(rows)) - np.repeat(begins, np.diff(begins, append=len(rows)))  # of each in its row
    for turn in range(int(number.max()) + 1):
        yield np.flatnonzero(number == turn)
