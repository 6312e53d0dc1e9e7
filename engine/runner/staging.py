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

from bequest.engine.kernels.streams import copy_bytes, record

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
        self.sizes: dict[str, int] = {}  # in bytes
        offset = 0
        for field in fields:
            self.places[field.name] = (offset, field)
            size = self.sizes[field.name] = math.prod(field.shape) * field.dtype.itemsize
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """The field as a tensor over a buffer of bytes."""
        offset, field = self.places[name]
        return buffer[offset : offset + self.sizes[name]].view(field.dtype).view(field.shape)


class Staging:
    """The device buffer of a layout, and the pinned ones that feed it."""

    def __init__(self, layout: StagingLayout, device: torch.device) -> None:
        self.layout = layout
        self.device_buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_TURNS)]
        self._arrays = [{name: layout.view(buffer, name).numpy() for name in layout.places} for buffer in self._pinned]
        self._on_device = {name: layout.view(self.device_buffer, name) for name in layout.places}
        self._sent = [torch.cuda.Event() for _ in range(_TURNS)]
        self._addresses = [buffer.data_ptr() for buffer in self._pinned]
        self._device_address = self.device_buffer.data_ptr()
        self._turn = 0
        self._is_free = True  # the buffer whose turn it is

    def on_device(self, name: str) -> Tensor:
        return self._on_device[name]

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays of the next step, to be written in place; waits until their last copy is done."""
        if not self._is_free:
            sent = self._sent[self._turn]
            if not sent.query():  # mostly it is: to wait would give the interpreter's lock away
                sent.synchronize()
            self._is_free = True
        return self._arrays[self._turn]

    def send(self, num_bytes: int, rare: str | None = None, num_rare: int = 0) -> None:
        """Queues the copy of the first `num_bytes`, and of the first `num_rare` of a field that few steps fill, on the
        current stream."""
        pinned = self._addresses[self._turn]
        copy_bytes(self._device_address, pinned, num_bytes)
        if rare is not None:
            offset = self.layout.places[rare][0]
            assert num_rare <= self.layout.sizes[rare]
            copy_bytes(self._device_address + offset, pinned + offset, num_rare)
        record(self._sent[self._turn])
        self._turn = (self._turn + 1) % _TURNS
        self._is_free = False

    def used_bytes(self, last: str, rows: int) -> int:
        """Bytes up to and with the first `rows` rows of the last field."""
        offset, field = self.layout.places[last]
        return offset + rows * (self.layout.sizes[last] // field.shape[0])
