"""A step's arrays on their way to the device, with what changes in sampler rows before it. Device thread only."""

from __future__ import annotations

import numpy as np
import torch

from bequest.engine.kernels.cuda_sampler import CudaSampler
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.cuda_buffers import MOST_UPDATE_BYTES, StepBuffers
from bequest.engine.types import StepPlan


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
