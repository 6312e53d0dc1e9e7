"""The masks of a step on their way to the device: queued with the step, they are made while it runs.

The copy of a plain step waits on the device, so that the thread that launches steps can go on with the next one.
While it waits, nothing may be asked of the driver that waits for the device: the first use of a kernel, for example, or
memory. So whoever is about to do more than to replay a graph lets the masks come first (`settle`).
"""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.kernels import cuda as kernels
from engine.masks import StepMasks, mask_words
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
    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._words = shape[1]
        size = -(-shape[0] * shape[1] // _VECTOR) * _VECTOR
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = torch.zeros(_TURNS, size, dtype=torch.int32, pin_memory=True)
        self._arrays: IntArray = self._pinned.numpy()
        self._flags = torch.zeros(_TURNS, dtype=torch.int32, pin_memory=True)
        self._copied = [torch.cuda.Event() for _ in range(_TURNS)]
        self._count = 0

    def send(self, masks: StepMasks) -> Tensor:
        self._count = self._count % (2**31 - 1) + 1
        turn = self._count % _TURNS
        self._copied[turn].synchronize()
        words = masks.num_rows * self._words
        masks.when_filled(partial(self._write, turn, words, self._count))
        whole = -(-words // _VECTOR) * _VECTOR
        flag = self._flags[turn : turn + 1]
        kernels.late_copy(self._pinned[turn, :whole], self._on_device[:whole], flag, self._count)
        self._copied[turn].record()
        return self._on_device[:words].view(masks.num_rows, self._words)

    def _write(self, turn: int, words: int, value: int, filled: IntArray) -> None:
        """Any thread."""
        np.copyto(self._arrays[turn, :words], filled.reshape(-1))
        kernels.publish(self._flags[turn : turn + 1], value)
