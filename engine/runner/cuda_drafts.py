"""Who drafts on a GPU, as its runner sees it: everything is queued, nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels import cuda as kernels
from bequest.engine.kernels.cuda_capture import Pool
from bequest.engine.kernels.cuda_sampler import CudaSampler
from bequest.engine.runner.cuda_blocks import BlockTransfers
from bequest.engine.runner.cuda_buffers import StepBuffers
from bequest.engine.runner.draft_passes import DraftedTokens
from bequest.engine.runner.host_cache import PinnedHostCache
from bequest.engine.runner.staging import Field
from bequest.engine.types import DRAFTED, NO_ROW, IntArray, StepBatch, StepMoves, StepPlan, StepSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedStep:
    """A step of the target whose arrays are on the device."""

    batch: StepBatch
    samples: StepSamples
    drafted: DraftedTokens
    input_ids: Tensor  # [T] int32
    drafts: Tensor  # [N] int32, as those of the samples
    tokens: Tensor  # [N] int32: what is sampled
    fill_tokens: Tensor  # [D] int64: where drafts go among the tokens
    fill_samples: Tensor  # [D] int64: and among the samples

    def fill(self, drafts: Tensor) -> None:
        """`drafts`: [D] int32, all of the step."""
        self.input_ids.index_copy_(0, self.fill_tokens, drafts)
        self.drafts.index_copy_(0, self.fill_samples, drafts)


def queued_step(plan: StepPlan, buffers: StepBuffers, tokens: Tensor) -> QueuedStep:
    """`tokens`: of any step, that are sampled."""
    at, num_samples = buffers.on_device, len(plan.samples)
    drafted = DraftedTokens(plan.samples, plan.num_tokens)
    return QueuedStep(
        batch=plan.batch,
        samples=plan.samples,
        drafted=drafted,
        input_ids=at("input_ids")[: plan.num_tokens],
        drafts=at("sample_drafts")[:num_samples],
        tokens=tokens[:num_samples],
        fill_tokens=at("fill_tokens")[: len(drafted.samples)],
        fill_samples=at("fill_samples")[: len(drafted.samples)],
    )


class CudaDrafts(Protocol):
    """Its guesses may be as bad as they like: no answer changes. On the current stream."""

    layers: tuple[int, ...]  # as of DeviceDrafts
    cache: DraftCache

    def move(self, moves: StepMoves, copies: Tensor) -> None:
        """Its blocks, as the target's. `copies`: those of the moves on the device, int32 [C, 2], and others behind"""

    def draft(self, step: QueuedStep) -> None:
        """Before the target computes a step: fills in its drafts."""

    def learn(self, step: QueuedStep, features: Tensor) -> None:
        """Behind it: the states of its layers [T, layers × HT]."""

    def capture(self, pool: Pool) -> None:
        """Graphs of its small passes."""

    def run_padding(self, num_tokens: int) -> None:
        """A pass of nothing but padding."""

    def time_pass(self) -> float:
        """Seconds for a draft of one sequence. REQUIRES: capture"""


MakeDrafts = Callable[[CudaSampler], CudaDrafts]


def fill_fields(max_samples: int) -> list[Field]:
    """Of the target's buffers."""
    return [Field(name, (max_samples,), torch.int64) for name in ("fill_tokens", "fill_samples")]


def stage_fill(samples: StepSamples, fill_tokens: np.ndarray, fill_samples: np.ndarray) -> None:
    if samples.drafts is None:
        return
    wanted = np.flatnonzero(samples.drafts == DRAFTED)
    fill_tokens[: len(wanted)] = samples.tokens[wanted] + 1
    fill_samples[: len(wanted)] = wanted


class DraftCache:
    """Blocks of the same numbers as the target's, with keys and values of who drafts."""

    def __init__(self, shape: tuple[int, ...], num_host_blocks: int, dtype: torch.dtype) -> None:
        """Zeros: a guess may read what nobody has written."""
        self.blocks = torch.zeros(shape, dtype=dtype, device="cuda")  # [NB, L, 2, NKV, BS, D]
        self._host = PinnedHostCache(num_host_blocks, self.blocks)
        self.transfers = BlockTransfers(self.blocks, self._host)

    def move(self, moves: StepMoves, copies: Tensor) -> None:
        if len(moves.swaps_out):
            self._host.swap_out(moves.swaps_out)
        if len(moves.swaps_in):
            self._host.swap_in(moves.swaps_in)
        if len(moves.copies):
            kernels.copy_blocks(self.blocks, copies[: len(moves.copies)])


def known_ids(batch: StepBatch, vocab_size: int) -> IntArray:
    """[T] tokens as kernels read them: -(row + 1) where a sampler row has it; what is no token becomes one."""
    known = np.minimum(batch.input_ids, vocab_size - 1)
    ids: IntArray = np.where(batch.input_rows == NO_ROW, known, -batch.input_rows - 1).astype(np.int32)
    return ids
