"""Drafts as a GPU queues them (engine/runner/cuda_drafts.py), on a CPU.

Places, passes and what goes from one to the next are theirs, kernels are the CPU's. So a mistake in the former shows
where there is no GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels import cuda
from bequest.engine.kernels.cuda_attention import WorkCounts
from bequest.engine.models.batch import ModelInput
from bequest.engine.models.decoder import Decoder
from bequest.engine.runner import cuda_draft_model, cuda_passes, prepare_draft, staging
from bequest.engine.runner.cpu_attention import CpuAttention
from bequest.engine.runner.cuda_drafts import QueuedStep, stage_fill
from bequest.engine.runner.cuda_limits import RunnerLimits
from bequest.engine.runner.device_drafts import Drafted, Guess
from bequest.engine.runner.draft_passes import DraftedTokens
from bequest.engine.runner.prepare_draft import LoadedDrafts
from bequest.engine.types import NO_ROW, IntArray, StepBatch, StepMoves, StepSamples


class OnCpu:
    """DeviceDrafts, of what would be queued."""

    def __init__(self, loaded: LoadedDrafts, num_blocks: int, num_host: int, block_size: int, num_rows: int) -> None:
        limits = RunnerLimits(num_rows, 512, 256, 0)
        made = prepare_draft.place_on_gpu(loaded, num_blocks, num_host, block_size, limits)
        assert made is not None
        self._sampler = Sampler(num_rows, loaded.target.config.vocab_size)
        self._drafts = made(self._sampler)  # type: ignore[arg-type]
        self.layers = self._drafts.layers

    def move(self, moves: StepMoves) -> None:
        self._drafts.move(moves, torch.from_numpy(moves.copies))

    def draft(self, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        self._sampler.by = guess
        known = batch.input_rows != NO_ROW
        self._sampler.last_tokens[batch.input_rows[known]] = torch.from_numpy(input_ids[known])
        step = _queued(batch, samples, input_ids, np.empty(0, np.int32))
        self._drafts.draft(step)
        told = samples if samples.drafts is None else structs.replace(samples, drafts=step.drafts.numpy())
        return Drafted(step.input_ids.numpy(), told)

    def learn(self, batch: StepBatch, samples: StepSamples, ids: IntArray, features: Tensor, tokens: IntArray) -> None:
        self._drafts.learn(_queued(batch, samples, ids, tokens), features)


def _queued(batch: StepBatch, samples: StepSamples, ids: IntArray, tokens: IntArray) -> QueuedStep:
    drafted = DraftedTokens(samples, len(ids))
    fill = np.zeros((2, len(samples)), np.int64)
    stage_fill(samples, *fill)
    drafts = np.full(len(samples), -1, np.int32) if samples.drafts is None else samples.drafts.copy()
    num = len(drafted.samples)
    return QueuedStep(
        batch=batch,
        samples=samples,
        drafted=drafted,
        input_ids=torch.from_numpy(ids.copy()),
        drafts=torch.from_numpy(drafts),
        tokens=torch.from_numpy(tokens),
        fill_tokens=torch.from_numpy(fill[0, :num]),
        fill_samples=torch.from_numpy(fill[1, :num]),
    )


class Sampler:
    """As much of a CudaSampler as drafts know."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.last_tokens = torch.full((num_rows,), -1, dtype=torch.int32)
        self.by: Guess | None = None

    def guess(self, logits: Tensor, rows: Tensor, positions: Tensor, guessed: Tensor) -> Tensor:
        assert self.by is not None and guessed.shape == self.last_tokens.shape
        tokens = torch.from_numpy(self.by(logits, rows.numpy().copy(), positions.numpy().copy()))
        guessed[rows.long()] = tokens
        return tokens


class Workspace:
    """Attention of the pass that was written last."""

    def __init__(self, **sizes: Any) -> None:
        self.list_len = 1
        self._block_size = sizes["block_size"]
        self._written: tuple[IntArray, ...] = ()

    def share_scratch(self, other: Workspace) -> None:
        pass

    def write_list(self, *arrays: IntArray) -> WorkCounts:
        self._written = tuple(np.ascontiguousarray(array) for array in arrays[:3])
        return WorkCounts(0, 0, 0)

    def bind(self, *_: object, **__: object) -> kernels.AttentionPlan:
        assert _placed is not None
        return _placed.plan(*self._written)


_placed: CpuAttention | None = None


class _Passes(cuda_passes.CudaPasses):
    def run(self, compute: Any, arrays: Any) -> None:
        global _placed
        _placed = CpuAttention(self._config, self._kv_cache, bfloat16=False)
        super().run(compute, arrays)


class _Event:
    def query(self) -> bool:
        return True


def _copy(destination: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(destination, source, num_bytes)


def install(patch: pytest.MonkeyPatch) -> None:
    """Whatever is drafted from now on is drafted this way."""
    for name in ("zeros", "empty"):
        patch.setattr(torch, name, _here(getattr(torch, name)))
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    patch.setattr(torch.cuda, "Event", _Event)
    patch.setattr(staging, "copy_bytes", _copy)
    patch.setattr(staging, "record", lambda event: None)
    patch.setattr(cuda_passes, "CudaAttentionWorkspace", Workspace)
    patch.setattr(cuda_draft_model, "CudaPasses", _Passes)
    patch.setattr("bequest.engine.runner.cuda_head_drafts.CudaPasses", _Passes)
    patch.setattr(cuda, "embedding", lambda ids, rows: rows[ids.long()])
    patch.setattr(cuda, "copy_blocks", kernels.copy_blocks)
    patch.setattr(cuda, "swap_blocks", kernels.swap_blocks)
    patch.setattr(LoadedDrafts, "place", lambda self, *sizes: OnCpu(self, *sizes))
    forward = Decoder.forward

    def resolved(self: Decoder, batch: ModelInput) -> Tensor:
        if batch.last_tokens is None:
            return forward(self, batch)
        ids = torch.where(
            batch.input_ids < 0, batch.last_tokens[(-1 - batch.input_ids).clamp(0).long()], batch.input_ids
        )
        return forward(self, replace(batch, input_ids=ids.int(), last_tokens=None))

    patch.setattr(Decoder, "forward", resolved)


def _here(make: Any) -> Any:
    """Neither pinned nor on a device."""

    def made(*args: Any, pin_memory: bool = False, device: object = None, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made
