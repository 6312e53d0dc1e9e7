"""The candidates of beam search on a device. Device thread only; results are read elsewhere.

A step with beams adds to its one copy each way a small one for its groups: those steps are few, and beams wait for
their results anyway. Nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels import cuda_beams
from engine.kernels.beams import PackedGroups
from engine.runner.beams import Constraints, nodes_of, pack, scores_of, unpack
from engine.runner.catalogues import PlacedCatalogues
from engine.types import BeamCandidates, BeamSpec, FloatArray, IntArray

_ALIGNMENT = 16


class PendingCandidates:
    """Candidates on their way to the host; `read` them when the step has run."""

    __slots__ = ("_arrays", "_specs")

    def __init__(self, specs: Sequence[BeamSpec], device: cuda_beams.DeviceCandidates) -> None:
        self._specs = specs
        parts = (device.score, device.row, device.token, device.logprob, device.bad)
        self._arrays = [torch.empty(p.shape, dtype=p.dtype, pin_memory=True) for p in parts]
        for host, part in zip(self._arrays, parts, strict=True):
            host.copy_(part, non_blocking=True)

    def read(self) -> tuple[BeamCandidates, ...]:
        score, row, token, logprob, bad = (array.numpy().copy() for array in self._arrays)
        return unpack(self._specs, score, row, token, logprob, bad)


class CudaBeams:
    def __init__(self, vocab_size: int, device: torch.device, catalogues: PlacedCatalogues) -> None:
        self._device = device
        self._constraints = Constraints(vocab_size, device, catalogues)

    def launch(self, logits: Tensor, specs: Sequence[BeamSpec]) -> PendingCandidates:
        """From logits [N, V] of the step's samples, of which R from the first group's on are beams'."""
        groups = pack(specs, self._constraints)
        num_rows = int(groups.group_start[-1])
        first = specs[0].first_sample
        scores, nodes, device_groups = self._send(scores_of(specs), nodes_of(specs), groups)
        out = cuda_beams.DeviceCandidates.empty(num_rows, len(specs), groups.columns, self._device)
        memory = cuda_beams.workspace(num_rows, groups.num_slots, self._device)
        cuda_beams.beam_candidates(logits[first : first + num_rows], scores, device_groups, memory, out, nodes)
        return PendingCandidates(specs, out)

    def _send(
        self, scores: FloatArray, nodes: IntArray | None, groups: PackedGroups
    ) -> tuple[Tensor, Tensor | None, cuda_beams.DeviceGroups]:
        """All that the kernel reads of the step, in one copy."""
        parts = [scores.tobytes(), groups.group_start.tobytes(), groups.records.tobytes()]
        if nodes is not None:
            parts.append(nodes.tobytes())
        offsets = [0]
        for part in parts:
            offsets.append(-(-(offsets[-1] + len(part)) // _ALIGNMENT) * _ALIGNMENT)
        pinned = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
        view = pinned.numpy()
        for offset, part in zip(offsets, parts, strict=False):
            view[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
        sent = pinned.to(self._device, non_blocking=True)
        pieces = [sent[offset : offset + len(part)] for offset, part in zip(offsets, parts, strict=False)]
        on_device = cuda_beams.DeviceGroups(pieces[1].view(torch.int32), pieces[2])
        return pieces[0].view(torch.float32), None if nodes is None else pieces[3].view(torch.int32), on_device
