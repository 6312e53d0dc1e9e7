"""A step's arrays on their way to the device, with what changes in sampler rows before it. Device thread only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bequest.engine.kernels.cuda_sampler import CudaSampler
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.cuda_buffers import MOST_UPDATE_BYTES, StepBuffers
from bequest.engine.types import NO_DRAFT, NO_ROW, NO_SLOT, NO_TOKEN, StepBatch, StepPlan, StepSamples

Arrays = dict[str, npt.NDArray[np.generic]]  # of a step, by their fields


def stage_tokens(batch: StepBatch, arrays: Arrays, padded: int) -> None:
    """Writes tokens and their places."""
    num = len(batch.input_ids)
    # As the kernel has it (csrc/ops/cuda/gather.h): -(row + 1) where a sampler row has the token, whose id is 0.
    np.subtract(batch.input_ids, batch.input_rows - NO_ROW, out=arrays["input_ids"][:num])
    arrays["positions"][:num] = batch.positions
    arrays["slot_mapping"][:, :num] = batch.slot_mapping
    if num < padded:
        arrays["input_ids"][num:padded] = NO_TOKEN
        arrays["positions"][num:padded] = 0
        arrays["slot_mapping"][:, num:padded] = NO_SLOT


def stage_samples(samples: StepSamples, arrays: Arrays, padded: int) -> None:
    num = len(samples)
    arrays["sample_tokens"][:num] = samples.tokens
    arrays["sample_rows"][:num] = samples.rows
    if num < padded:
        arrays["sample_tokens"][num:padded] = 0
        arrays["sample_rows"][num:padded] = NO_ROW
    if samples.masks is not None:
        masked = samples.masks.part
        arrays["masked_rows"][: samples.masks.num_rows] = samples.rows[masked]
        arrays["sample_rows"][masked] = NO_ROW  # the graph leaves them to a launch behind it
    arrays["sample_positions"][:num] = samples.positions
    arrays["sample_drafts"][:num] = NO_DRAFT if samples.drafts is None else samples.drafts


def send_step(plan: StepPlan, buffers: StepBuffers, sampler: CudaSampler, catalogues: PlacedCatalogues) -> None:
    """Queues the copy of what was written to the buffers, then rows close and open."""
    for row in plan.rows.close:
        sampler.close_row(row)
    for spec in plan.rows.open:
        rule = None if spec.catalogue is None else catalogues.rule(spec.catalogue)
        sampler.open_row(spec, rule)
    updates = sampler.pack_updates()
    travels = updates is not None and len(updates[0]) <= MOST_UPDATE_BYTES
    if updates is not None and travels:
        buffers.staging.arrays()["updates"][: len(updates[0])] = np.frombuffer(updates[0], np.uint8)
    buffers.send(len(plan.batch.seq_lens), len(updates[0]) if updates is not None and travels else 0)
    if updates is None:
        return
    staged = buffers.on_device("updates")
    if not travels:
        content = torch.frombuffer(bytearray(updates[0]), dtype=torch.uint8)
        staged = content.pin_memory().to(sampler.last_tokens.device, non_blocking=True)
    sampler.apply_updates(staged, updates[1])
