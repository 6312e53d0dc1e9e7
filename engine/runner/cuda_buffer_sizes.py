"""Buffers for steps of all sizes. Arrays lie at fixed places, long enough for the largest step that they serve, and a
step's copy is everything up to its last one. So steps of a few tokens, and small ones, have buffers of their own: those
of one token are 8 KB, not 330."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bequest.engine.kernels.cuda_attention import CudaAttentionWorkspace
from bequest.engine.models.any_model import Model
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.runner.cuda_buffers import CROSS, StepBuffers
from bequest.engine.runner.cuda_limits import RunnerLimits
from bequest.engine.runner.cuda_sizes import StepSize
from bequest.engine.runner.staging import Field

SMALL_STEP = 256  # tokens, and samples, with padding
_FEW = 4  # the same: what a chain takes


class BufferSizes:
    """`dtype`: of activations; `others`: the fields that others write and read, of so many tokens and samples;
    `states`: [NS, LR, E] of recurrent layers, if there are any."""

    def __init__(
        self,
        model: Model,
        kv_cache: Tensor,
        dtype: torch.dtype,
        limits: RunnerLimits,
        others: Callable[[int, int], Sequence[Field]],
        states: Tensor | None,
    ) -> None:
        self._config, self._kv_cache, self._dtype = model.config, kv_cache, dtype
        self._limits = limits
        self._others = others
        self._states = states
        crosses = [CROSS] if isinstance(model, EncoderDecoder) else []
        self._strips = (*range(len(model.config.strips.windows)), *crosses)
        self.large = self._make(limits.max_tokens, limits.max_samples)
        self._smaller = [self._make(rows, rows, self.large) for rows in (_FEW, SMALL_STEP) if rows < limits.max_tokens]
        # Graphs read theirs from fixed places, so steps that are left and come back to have others.
        yields = limits.tokens_of_piece > 0
        self.yielding = self._make(limits.max_tokens, limits.max_samples, self.large) if yields else self.large

    def of(self, size: StepSize) -> StepBuffers:
        """Of steps of this size, and of their graph."""
        return self.of_rows(size.num_tokens, size.num_samples)

    def of_rows(self, num_tokens: int, num_samples: int) -> StepBuffers:
        """Of a step of so many tokens and samples, before it is padded."""
        rows = max(num_tokens, num_samples)
        return next((buffers for buffers in self._smaller if rows <= buffers.max_tokens), self.large)

    def _make(self, max_tokens: int, max_samples: int, beside: StepBuffers | None = None) -> StepBuffers:
        """`beside`: those whose scratch it shares."""
        workspaces = {strip: self._workspace(max_tokens, strip) for strip in self._strips}
        if beside is not None:
            for strip, workspace in workspaces.items():
                workspace.share_scratch(beside.workspaces[strip])
        widths = self._limits.max_blocks_per_sequence, self._limits.max_cross_blocks
        others = self._others(max_tokens, max_samples)
        device = self._kv_cache.device
        return StepBuffers(workspaces, max_tokens, max_samples, widths, device, self._states, others)

    def _workspace(self, max_tokens: int, strip: int) -> CudaAttentionWorkspace:
        strips, causal = self._config.strips, strip != CROSS
        heads = strips.heads[strip if causal else 0]
        return CudaAttentionWorkspace(
            num_q_heads=self._config.num_heads,
            num_kv_heads=heads.count,
            head_dim=heads.size,
            max_sequences=max_tokens,
            max_tokens=max_tokens,
            dtype=self._dtype,
            kv_dtype=self._kv_cache.dtype,
            causal=causal,
            window=strips.windows[strip] if causal else 0,
            block_size=self._kv_cache.shape[4] if causal else None,
            device=self._kv_cache.device,
        )
