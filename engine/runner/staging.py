"""A step's data on its way to the device: every array at a fixed place of one buffer, so that one copy brings them all.

Graphs read the arrays at these places; a step writes what it has and leaves the rest as padding. Pinned buffers take
turns, because a copy out of one may still be under way when the next step is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import _C

_ALIGNMENT = 256
_TURNS = 3  # one on its way, one behind it, one being written


@dataclass(frozen=True, slots=True)
class Field:
    """An array in the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StagingLayout:
    """Where each field lies. The fields that steps fill least should be the last: only what is used is copied."""

    def __init__(self, fields: list[Field]) -> None:
        self.places: dict[str, tuple[int, Field]] = {}
        offset = 0
        for field in fields:
            self.places[field.name] = (offset, field)
            offset += -(-self.size(field.name) // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset

    def size(self, name: str) -> int:
        """Bytes of the field."""
        field = self.places[name][1]
        return math.prod(field.shape) * field.dtype.itemsize

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """The field as a tensor over a buffer of bytes."""
        offset, field = self.places[name]
        return buffer[offset : offset + self.size(name)].view(field.dtype).view(field.shape)


class Staging:
    """The device buffer of a layout, and the pinned ones that feed it."""

    def __init__(self, layout: StagingLayout, device: torch.device) -> None:
        self.layout = layout
        self.device_buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_TURNS)]
        self._arrays = [{name: layout.view(buffer, name).numpy() for name in layout.places} for buffer in self._pinned]
        self._sent = [torch.cuda.Event() for _ in range(_TURNS)]
        self._turn = 0

    def on_device(self, name: str) -> Tensor:
        return self.layout.view(self.device_buffer, name)

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays of the next step, to be written in place; waits until their last copy is done."""
        self._sent[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, num_bytes: int, rare: str | None = None, stream: torch.cuda.Stream | None = None) -> None:
        """Queues the copy of the first `num_bytes`, and of a field that few steps fill; on the current stream if None.

        A step of a small model has little time for this: `copy_` of two slices takes four times as long to queue.
        """
        stream = stream or torch.cuda.current_stream()
        pinned, device = self._pinned[self._turn].data_ptr(), self.device_buffer.data_ptr()
        assert num_bytes <= self.layout.num_bytes
        _C.cuda_copy(device, pinned, num_bytes, stream.cuda_stream)
        if rare is not None:
            offset, size = self.layout.places[rare][0], self.layout.size(rare)
            _C.cuda_copy(device + offset, pinned + offset, size, stream.cuda_stream)
        self._sent[self._turn].record(stream)
        self._turn = (self._turn + 1) % _TURNS

    def used_bytes(self, last: str, rows: int) -> int:
        """Bytes up to and with the first `rows` rows of the last field."""
        offset, field = self.layout.places[last]
        return offset + rows * math.prod(field.shape[1:]) * field.dtype.itemsize
