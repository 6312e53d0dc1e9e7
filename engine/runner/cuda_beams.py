"""The candidates of beam search on a device. Device thread only; results are read elsewhere.

A step with beams adds to its one copy each way a small one for its groups: those steps are few, and beams wait for
their results anyway. Nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels import cuda_beams
from engine.kernels.beams import PackedGroups
from engine.runner.beams import Constraints, nodes_of, pack, scores_of, unpack
from engine.runner.catalogues import PlacedCatalogues
from engine.types import BeamCandidates, BeamSpec, FloatArray, IntArray

_ALIGNMENT = 16


def _places(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes in bytes lie in one buffer, and behind them its end."""
    places = [0]
    for size in sizes:
        places.append(-(-(places[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return places


class PendingCandidates:
    """Candidates of G groups with R rows, on the device and, in one copy, on their way to the host."""

    __slots__ = ("_host", "_places", "_shape", "_specs", "_whole", "device")

    def __init__(self, specs: Sequence[BeamSpec], num_rows: int, columns: int, device: torch.device) -> None:
        self._specs = specs
        self._shape = (len(specs), columns)
        size = 4 * len(specs) * columns
        self._places = _places([size, size, size, size, num_rows])
        self._whole = torch.empty(self._places[-1], dtype=torch.uint8, device=device)
        score, row, token, logprob, bad = self._places[:-1]
        self.device = cuda_beams.DeviceCandidates(
            self._table(score, torch.float32),
            self._table(row, torch.int32),
            self._table(token, torch.int32),
            self._table(logprob, torch.float32),
            self._whole[bad : bad + num_rows].view(torch.bool),
        )
        self._host = torch.empty(self._places[-1], dtype=torch.uint8, pin_memory=True)

    def send(self) -> None:
        """Queues the copy, behind the kernels that write it."""
        self._host.copy_(self._whole, non_blocking=True)

    def read(self) -> tuple[BeamCandidates, ...]:
        """When the step has run."""
        content = self._host.numpy().copy()
        groups, columns = self._shape

        def table(place: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            return content[place : place + 4 * groups * columns].view(dtype).reshape(groups, columns)

        score, row, token, logprob, bad = self._places[:-1]
        return unpack(
            self._specs,
            table(score, np.float32),
            table(row, np.int32),
            table(token, np.int32),
            table(logprob, np.float32),
            content[bad:].view(np.bool_),
        )

    def _table(self, place: int, dtype: torch.dtype) -> Tensor:
        groups, columns = self._shape
        return self._whole[place : place + 4 * groups * columns].view(dtype).view(groups, columns)


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
        pending = PendingCandidates(specs, num_rows, groups.columns, self._device)
        memory = cuda_beams.workspace(num_rows, groups.num_slots, self._device)
        rows = logits[first : first + num_rows]
        cuda_beams.beam_candidates(rows, scores, device_groups, memory, pending.device, nodes)
        pending.send()
        return pending

    def _send(
        self, scores: FloatArray, nodes: IntArray | None, groups: PackedGroups
    ) -> tuple[Tensor, Tensor | None, cuda_beams.DeviceGroups]:
        """All that the kernel reads of the step, in one copy."""
        arrays = [scores, groups.group_start, groups.records] + ([] if nodes is None else [nodes])
        parts = [np.frombuffer(array, np.uint8) for array in arrays]
        places = _places([len(part) for part in parts])
        pinned = torch.empty(places[-1], dtype=torch.uint8, pin_memory=True)
        view = pinned.numpy()
        for place, part in zip(places, parts, strict=False):
            view[place : place + len(part)] = part
        sent = pinned.to(self._device, non_blocking=True)
        pieces = [sent[place : place + len(part)] for place, part in zip(places, parts, strict=False)]
        on_device = cuda_beams.DeviceGroups(pieces[1].view(torch.int32), pieces[2])
        return pieces[0].view(torch.float32), None if nodes is None else pieces[3].view(torch.int32), on_device
