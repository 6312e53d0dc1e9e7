"""The masks of a step on their way to the device: queued with the step, they are made and sent while it runs.

The copy of a plain step waits on the device, so that the thread that launches steps can go on with the next one; on a
stream of its own beside the forward, so that sampling finds the masks where it needs them.
While it waits, nothing may be asked of the driver that waits for the device: the first use of a kernel, for example, or
memory. So whoever is about to do more than to replay a graph lets the masks come first (`settle`).
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from bequest.engine.kernels import cuda as kernels
from bequest.engine.types import ComingMasks, IntArray, MaskSource, MaskSpec, mask_words

_TURNS = 3  # one being copied, one behind it, one to be queued
# Rows whose masks are copied behind the forward, not beside it: the products of so few need every multiprocessor
# (csrc/model/cuda/skinny_chain.cu), and whoever waits on one of them beside the forward holds all of it up.
_FEW = 4


class DeviceMasks:
    """Takes its memory when the first grammar comes: most servers see none. Drafts may need more of it."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """`num_rows`: of steps without drafts, at most."""
        self._num_rows, self._num_words = num_rows, mask_words(vocab_size)
        self._device = device
        self._buffers: _Buffers | None = None
        self._source: MaskSource | None = None
        self._coming: deque[ComingMasks] = deque(maxlen=_TURNS)

    def connect(self, source: MaskSource) -> None:
        self._source = source

    def send(self, spec: MaskSpec, plain: bool) -> Tensor:
        """Queues the copy of the masks, for a `plain` step before they are there; int32 [rows, words] on the device."""
        buffers = self._buffers
        if buffers is None or spec.num_rows > buffers.num_rows:
            buffers = self._buffers = self._allocate(spec.num_rows)
            plain = False  # the first time loads kernels
        assert self._source is not None
        masks = self._source.of(spec.number)
        if not plain:
            masks.wait()
        self._coming.append(masks)
        return buffers.send(masks, spec.num_rows)

    def _allocate(self, num_rows: int) -> _Buffers:
        if self._buffers is not None:
            self.settle()
            torch.cuda.synchronize(self._device)  # the device reads and writes the old ones
            num_rows = max(num_rows, 2 * self._buffers.num_rows)
        return _Buffers((max(num_rows, self._num_rows), self._num_words), self._device)

    def settle(self) -> None:
        """Waits until no copy waits on the device."""
        while self._coming:
            self._coming.popleft().wait()


class _Buffers:
    """Pinned memory and places on the device, which take turns, and the stream of their copies."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.num_rows = shape[0]
        self._shape = shape
        words = shape[0] * shape[1]
        places = [torch.zeros(words, dtype=torch.int32, device=device) for _ in range(_TURNS)]
        pinned = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(_TURNS)]
        self._places = [place.view(shape) for place in places]
        self._arrays: list[IntArray] = [buffer.view(shape).numpy() for buffer in pinned]
        self._copies = [kernels.LateCopy(*pair) for pair in zip(pinned, places, strict=True)]
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._count = 0  # of the sends: what a flag is set to
        self._turn = 0
        self._copies[0].pass_by()  # from here on the places are these masks', and zero

    def send(self, masks: ComingMasks, num_rows: int) -> Tensor:
        self._count = self._count % (2**31 - 1) + 1
        before, self._turn = self._copies[self._turn], (self._turn + 1) % _TURNS
        copy, num_words = self._copies[self._turn], num_rows * self._shape[1]
        if num_rows <= _FEW:
            copy.queue(num_words, self._count)
        else:
            copy.queue_beside(before, num_words, self._count, self._stream.cuda_stream)
        masks.send_to(self._arrays[self._turn][:num_rows], copy.flag(self._count))
        return self._places[self._turn][:num_rows]
