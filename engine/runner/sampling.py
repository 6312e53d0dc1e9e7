"""Sampler rows on the device side: opened and closed by plans, they hold what sampling needs to remember."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bequest.engine.constraints.masks import StepMasks
from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.cpu_beams import constrain_row
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.timestamps import TimestampRows
from bequest.engine.types import BoolArray, IntArray, LogprobArrays, RowSpec


class RowSampler:
    """Draws tokens for sampler rows; raw log-probabilities beside them."""

    def __init__(self, num_rows: int, vocab_size: int, catalogues: PlacedCatalogues) -> None:
        self._sampler = kernels.Sampler(num_rows, vocab_size)
        self._timestamps = TimestampRows(num_rows, vocab_size, torch.device("cpu"))
        self._catalogues = catalogues

    def update_rows(self, closed: Sequence[int], opened: Sequence[RowSpec]) -> None:
        self._timestamps.update_rows(closed, opened)
        for row in closed:
            self._sampler.close_row(row)
        for spec in opened:
            self._sampler.open_row(spec)
            if spec.params.catalogue is not None:
                rule = self._catalogues.rule(spec.params.catalogue, spec.end_token_ids)
                constrain_row(self._sampler, spec.row, rule, spec.output_token_ids)

    def resolve(self, input_ids: IntArray) -> IntArray:
        """Replaces -(row + 1) by the row's last token."""
        if not (input_ids < 0).any():
            return input_ids
        return self._sampler.resolve(input_ids)

    def sample(
        self,
        logits: torch.Tensor,
        rows: IntArray,
        positions: IntArray,
        num_logprobs: int | None,
        masks: StepMasks | None = None,
    ) -> tuple[IntArray, BoolArray, LogprobArrays | None]:
        """Tokens for logits [N, V]; 0 for row -1, a beam's, all of which come last.

        The rows that `masks` is of are sampled when it is there. The log-probabilities are the raw model's, whatever
        the row's parameters do.
        """
        num = len(rows) - int(np.count_nonzero(rows < 0))
        tokens, bad = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.bool_)
        first = num if masks is None else masks.first_sample
        if first:
            tokens[:first], bad[:first] = self._draw(logits[:first], rows[:first], positions[:first])
        if masks is not None:
            part = slice(first, num)
            tokens[part], bad[part] = self._draw(logits[part], rows[part], positions[part], masks.wait())
        if num_logprobs is None:
            return tokens, bad, None
        return tokens, bad, self.logprobs(logits, tokens, num_logprobs)

    def _draw(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray, masks: IntArray | None = None
    ) -> tuple[IntArray, BoolArray]:
        if not self._timestamps.any:
            return self._sampler.sample(logits, rows, positions, masks)
        places = torch.from_numpy(rows)
        tokens, bad = self._sampler.sample(self._timestamps.masked(logits, places), rows, positions, masks)
        self._timestamps.record(places, torch.from_numpy(tokens))
        return tokens, bad

    def logprobs(self, logits: torch.Tensor, chosen: IntArray, top: int) -> LogprobArrays:
        return LogprobArrays(*kernels.logprobs(logits, chosen, top))
