"""The masks of a step on their way to the device: queued with the step, they are made while it runs.

The copy of a plain step waits on the device, so that the thread that launches steps can go on with the next one.
While it waits, nothing may be asked of the driver that waits for the device: the first use of a kernel, for example, or
memory. So whoever is about to do more than to replay a graph lets the masks come first (`settle`).
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
from torch import Tensor

from engine.constraints.masks import StepMasks, mask_words
from engine.kernels import cuda as kernels
from engine.kernels.streams import record
from engine.types import IntArray

_TURNS = 3  # one being copied, one behind it, one to be queued
_VECTOR = 4  # words of what is copied at once


class DeviceMasks:
    """Takes its memory when the first grammar comes: most servers see none."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_rows, mask_words(vocab_size))
        self._device = device
        self._buffers: _Buffers | None = None
        self._coming: deque[StepMasks] = deque(maxlen=_TURNS)

    def send(self, masks: StepMasks, plain: bool) -> Tensor:
        """Queues the copy of the masks, for a `plain` step before they are there; int32 [rows, words] on the device."""
        buffers = self._buffers
        if buffers is None:
            buffers = self._buffers = _Buffers(self._shape, self._device)
            plain = False  # the first time loads kernels
        if not plain:
            masks.wait()
        self._coming.append(masks)
        return buffers.send(masks)

    def settle(self) -> None:
        """Waits until no copy waits on the device."""
        while self._coming:
            self._coming.popleft().wait()


class _Buffers:
    """Pinned memory that takes turns, and the place on the device that all of it goes to."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._shape = shape
        size = -(-shape[0] * shape[1] // _VECTOR) * _VECTOR
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(_TURNS)]
        self._arrays: list[IntArray] = [buffer.numpy() for buffer in pinned]
        self._copies = [kernels.LateCopy(buffer, self._on_device) for buffer in pinned]
        self._copied = [torch.cuda.Event() for _ in range(_TURNS)]
        self._count = 0

    def send(self, masks: StepMasks) -> Tensor:
        self._count = self._count % (2**31 - 1) + 1
        turn = self._count % _TURNS
        if not self._copied[turn].query():  # mostly it is: to wait would give the interpreter's lock away
            self._copied[turn].synchronize()
        words = masks.num_rows * self._shape[1]
        copy = self._copies[turn]
        place = self._arrays[turn][:words].reshape(masks.num_rows, self._shape[1])
        masks.send_to(place, partial(copy.publish, self._count))
        copy.queue(-(-words // _VECTOR) * _VECTOR, self._count)
        record(self._copied[turn])
        return self._on_device[:words].view(masks.num_rows, self._shape[1])
