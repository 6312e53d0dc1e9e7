"""Weights on their way to the device, by way of pinned memory.

Files are mapped, and copies out of ordinary memory go through a small buffer of the driver's, one after another. Here
each thread that loads layers has pieces of pinned memory of its own: it fills one while the copy engine takes another.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

_PIECE = 16 << 20  # bytes
_PIECES = 3  # of a thread: one is filled, the others are on their way
_SMALL = 1 << 16  # bytes that are not worth it


class _Pieces:
    """Of one thread."""

    def __init__(self) -> None:
        self._memory = torch.empty(_PIECES, _PIECE, dtype=torch.uint8, pin_memory=True)
        self._taken = [torch.cuda.Event() for _ in range(_PIECES)]
        self._turn = 0

    def copy(self, place: Tensor, values: Tensor) -> None:
        """To `place` on the device, on the current stream."""
        turn, self._turn = self._turn, (self._turn + 1) % _PIECES
        self._taken[turn].synchronize()
        piece = self._memory[turn, : place.nbytes].view(place.dtype).view(place.shape)
        if values.dtype == place.dtype and values.is_contiguous():
            # Not torch: it would share the bytes out to threads, of which there are enough.
            np.copyto(piece.view(torch.uint8).numpy(), values.view(torch.uint8).numpy())
        else:
            piece.copy_(values)
        place.copy_(piece, non_blocking=True)
        self._taken[turn].record()


class Uploads:
    """Of one load: the pinned memory goes with it."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def copy(self, place: Tensor, values: Tensor) -> None:
        """Values of any dtype to contiguous rows [N, …] on the device, on the current stream."""
        assert place.is_contiguous() and place.shape == values.shape, (place.shape, values.shape)
        row = place.nbytes // max(len(place), 1)
        if not values.is_cpu or place.nbytes < _SMALL or row > _PIECE:
            place.copy_(values, non_blocking=True)
            return
        if not hasattr(self._of_thread, "pieces"):
            self._of_thread.pieces = _Pieces()
        step = _PIECE // row
        for begin in range(0, len(place), step):
            self._of_thread.pieces.copy(place[begin : begin + step], values[begin : begin + step])
