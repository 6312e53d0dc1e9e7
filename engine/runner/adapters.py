"""Adapters by the handles that they are registered under, and which rows of a step have them. Device thread only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bequest.engine.kernels.cpu_lora import LoraMatrices, LoraRows
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.types import IntArray, StepBatch
from bequest.engine.types.adapter import NO_ADAPTER, AdapterWeights
from bequest.engine.types.encoder import EncoderSpec

Rows = npt.NDArray[np.int64]


class CpuAdapters:
    def __init__(self) -> None:
        self._matrices: dict[int, LoraMatrices] = {}

    def register(self, handle: int, weights: AdapterWeights) -> None:
        assert handle not in self._matrices and handle != NO_ADAPTER, "a handle stands for one adapter"
        assert isinstance(weights.matrices, LoraMatrices), "loaded for another device"
        self._matrices[handle] = weights.matrices

    def release(self, handle: int) -> None:
        del self._matrices[handle]

    def of_step(self, handles: IntArray | None, starts: IntArray, read: Rows | None = None) -> StepAdapters | None:
        """Sequence i, rows [starts[i], starts[i + 1]), has handles[i]. `read`: rows that a stream may narrow to."""
        if handles is None:
            return None
        return step_adapters([(self._matrices.get(handle), rows) for handle, rows in _by_handle(handles, starts)], read)

    def of_tokens(self, batch: StepBatch, tokens: npt.NDArray[np.integer]) -> StepAdapters | None:
        """Of rows that are those of tokens [N] of the step, in any order."""
        if batch.adapters is None:
            return None
        handles = np.repeat(batch.adapters, np.diff(batch.query_start))[tokens]
        return self.of_step(handles, np.arange(len(tokens) + 1, dtype=np.int32))

    def of_encoders(self, specs: Sequence[EncoderSpec]) -> StepAdapters | None:
        """The same of the states of encoder inputs, and of those whose keys and values are written."""
        if not any(spec.adapter for spec in specs):
            return None
        starts = np.cumsum([0, *(spec.input.length for spec in specs)]).astype(np.int32)
        written = sum(spec.input.length for spec in specs if spec.slots is not None)
        return self.of_step(np.asarray([spec.adapter for spec in specs], np.int32), starts, np.arange(written))


def step_adapters(groups: Sequence[tuple[LoraMatrices | None, Rows]], read: Rows | None) -> StepAdapters:
    """Groups are all rows of a step, each in one of them."""
    rows = LoraRows([(matrices, own.tolist()) for matrices, own in groups if matrices is not None])
    num_rows = sum(len(own) for _, own in groups)
    return StepAdapters(rows, num_rows, None if read is None else rows.of(read.tolist()))


def _by_handle(handles: IntArray, starts: IntArray) -> list[tuple[int, Rows]]:
    of_rows = np.repeat(handles, np.diff(starts))
    return [(int(handle), np.flatnonzero(of_rows == handle)) for handle in np.unique(handles)]
