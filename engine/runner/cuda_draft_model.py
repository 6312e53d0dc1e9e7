"""A smaller model beside the target, which drafts on a GPU. Device thread only.

The passes are those of engine/runner/draft_model.py, queued one behind the other: what one of them samples the next one
finds on the device, by sampler row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels import cuda as kernels
from bequest.engine.kernels.cuda_capture import Pool
from bequest.engine.kernels.cuda_sampler import CudaSampler
from bequest.engine.models.batch import ModelInput
from bequest.engine.models.decoder import Decoder
from bequest.engine.runner.cuda_buffers import StepBuffers
from bequest.engine.runner.cuda_drafts import DraftCache, QueuedStep, known_ids
from bequest.engine.runner.cuda_passes import CudaPasses, PassArrays, PassLimits
from bequest.engine.runner.cuda_sizes import StepSize
from bequest.engine.runner.draft_passes import DraftPass, passes_of_model
from bequest.engine.types import IntArray, StepMoves


class CudaDraftModel:
    """CudaDrafts."""

    layers: tuple[int, ...] = ()  # it reads tokens

    def __init__(
        self, model: Decoder, cache: DraftCache, dtype: torch.dtype, limits: PassLimits, sampler: CudaSampler
    ) -> None:
        device = cache.blocks.device
        self._model = model
        self.cache = cache
        self._sampler = sampler
        self._most_samples = limits.num_rows
        self._missing = sampler.vocab_size - model.config.vocab_size  # tokens that it cannot say
        self._heard = torch.zeros(limits.num_rows, dtype=torch.int32, device=device)  # the last token of each row
        self._nowhere = limits.max_tokens
        self._drafted = torch.zeros(limits.max_tokens + 1, dtype=torch.int32, device=device)  # the last is padding's
        self._passes = CudaPasses(model.config, cache.blocks, dtype, limits, {"numbers": self._nowhere})

    def move(self, moves: StepMoves, copies: Tensor) -> None:
        self.cache.move(moves, copies)

    def draft(self, step: QueuedStep) -> None:
        """Computes the tokens of a step, and what it takes to follow where samples say so."""
        vocab_size, drafted = self._model.config.vocab_size, step.drafted
        torch.clamp(self._sampler.last_tokens, 0, vocab_size - 1, out=self._heard)
        ids = known_ids(step.batch, vocab_size)
        ids[drafted.is_draft[:-1]] = -drafted.rows[:-1][drafted.is_draft[:-1]] - 1
        for of_pass in passes_of_model(step.batch, drafted):
            self._passes.run(self._compute, self._arrays(step, ids, of_pass))
        if len(drafted.samples):
            step.fill(self._drafted[: len(drafted.samples)])

    def learn(self, step: QueuedStep, features: Tensor) -> None:
        """It reads what was sampled in the next step."""

    def capture(self, pool: Pool) -> None:
        self._passes.capture(pool, self._compute, self._most_samples, samples=(True, False))

    def run_padding(self, num_tokens: int) -> None:
        size = StepSize(num_tokens, min(num_tokens, self._most_samples), prefill=True)
        self._compute(size, self._passes.pad(size))

    def time_pass(self) -> float:
        return self._passes.time(self._compute)

    def _arrays(self, step: QueuedStep, ids: IntArray, of: DraftPass) -> PassArrays:
        batch, drafted, places = step.batch, step.drafted, of.drafts
        return PassArrays(
            ids=ids[of.tokens],
            positions=batch.positions[of.tokens],
            slots=batch.slot_mapping[0][of.tokens],
            query_start=of.query_start,
            lens=of.lens,
            tables=np.ascontiguousarray(batch.block_tables[0][of.sequences]),
            num_samples=len(places),
            others={
                "sample_tokens": of.reads,
                "sample_rows": drafted.rows[places],
                "sample_positions": drafted.positions[places],
                "numbers": drafted.numbers[places],
            },
        )

    def _compute(self, size: StepSize, buffers: StepBuffers) -> None:
        """Every tensor that it touches has a fixed place."""
        tokens, samples, at = size.num_tokens, size.num_samples, buffers.on_device
        hidden = self._model.forward(
            ModelInput(
                input_ids=at("input_ids")[:tokens],
                positions=at("positions")[:tokens],
                slot_mapping=at("slot_mapping")[:, :tokens].unbind(),
                kv_cache=self.cache.blocks,
                attention=(buffers.bind(0, size),),
                last_tokens=self._heard,
            )
        )
        if not samples:
            return
        logits = self._model.logits(kernels.embedding(at("sample_tokens")[:samples], hidden))
        if self._missing:
            logits = torch.nn.functional.pad(logits, (0, self._missing), value=-torch.inf)
        rows, positions = at("sample_rows")[:samples], at("sample_positions")[:samples]
        drafts = self._sampler.guess(logits, rows, positions, self._heard)
        self._drafted.index_copy_(0, at("numbers")[:samples], drafts)
