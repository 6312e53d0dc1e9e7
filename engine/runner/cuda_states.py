"""Hidden states on a device: the ring that norms store them in, and their way to the host.

Launched on the device thread, read elsewhere. Steps take turns in the two halves of the ring and in two pinned buffers:
the step before may still be on its way, and the one before that has been read. Mostly that is so because its result
came before this step was planned; a generation that wants states behind two steps that yield waits for it. The copy
runs on a stream of its own, beside the next step.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.runner.feature_tap import FeatureRows, Places
from bequest.engine.types.hidden import NOT_TAPPED, StepTaps
from bequest.engine.types.states import StatesArray

_TURNS = 2


class PendingStates:
    """Rows on their way to the host; `read` them when the copy is done."""

    __slots__ = ("_copied", "_host", "_taps", "is_read")

    def __init__(self, taps: StepTaps, host: Tensor, copied: torch.cuda.Event) -> None:
        self._taps = taps
        self._host = host
        self._copied = copied
        self.is_read = threading.Event()

    def read(self) -> tuple[StatesArray, ...]:
        """Each sequence's in memory of its own: who reads slowly keeps no others'. Layer by layer, as answers have it:
        what one step brings whole is not copied again."""
        self._copied.synchronize()
        host = self._host if self._host.dtype is torch.float32 else self._host.view(torch.uint16)
        layered = [rows.transpose(1, 0, 2).copy() for rows in self._taps.split(host.numpy())]
        self.is_read.set()
        return tuple(rows.transpose(1, 0, 2) for rows in layered)


class StatesRing:
    def __init__(
        self,
        rows_per_step: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: tuple[int, ...] = (),
        most_tokens: int = 0,
    ) -> None:
        """`rows_per_step`: of requests; `layers`: those of a head that drafts, which it reads of all `most_tokens`."""
        rows_per_step += len(layers) * most_tokens
        self._rows_per_step = rows_per_step
        self._ring = torch.zeros(_TURNS * rows_per_step, hidden, dtype=dtype, device=device)
        self._host = [torch.empty(0, hidden, dtype=dtype) for _ in range(_TURNS)]  # pinned; grows when it must
        self._stream = torch.cuda.Stream(device)
        self._turn = 0
        self._sent: list[PendingStates | None] = [None] * _TURNS
        self._layers = layers
        self._features: FeatureRows | None = None  # of the step that was staged last

    def table(self, rows: Tensor, layers: Tensor) -> HiddenTap:
        """The staged arrays of a step, [T] and [T, 2], with the ring they point into."""
        return HiddenTap(rows, layers, self._ring)

    @property
    def rows(self) -> Tensor:
        """[rows per step, H]: the half of the ring that is the next step's."""
        first = self._first
        return self._ring[first : first + self._rows_per_step]

    def stage(self, taps: StepTaps | None, rows: np.ndarray, layers: np.ndarray) -> None:
        """Writes the table of a step into its staging arrays, which are padded: rows [T'], layers [T', 2]."""
        rows[:] = NOT_TAPPED
        if taps is None:
            return
        self._wait_for_turn()
        assert taps.num_rows <= self._rows_per_step, "the scheduler planned more states than the ring holds"
        num = len(taps.rows)
        rows[:num] = np.where(taps.rows == NOT_TAPPED, NOT_TAPPED, taps.rows + self._first)
        layers[:num] = taps.layers.view(np.int64)

    def stage_features(self, taps: StepTaps | None, num_tokens: int, rows: np.ndarray, layers: np.ndarray) -> None:
        """The same with the states that a head reads of all tokens."""
        rows[num_tokens:] = NOT_TAPPED
        self._wait_for_turn()
        features = self._features = FeatureRows(taps, self._layers, num_tokens)
        assert features.num_rows <= self._rows_per_step
        rows[:num_tokens] = features.rows + self._first
        layers[:num_tokens] = features.masks.view(np.int64)

    def features(self, taps: StepTaps | None) -> Tensor:
        """[T, layers × H] of the step that was staged last, for its head. REQUIRES: `send` comes later"""
        assert self._features is not None
        if taps is None:  # nothing lies between them
            num_rows, hidden = self._features.num_rows, self._ring.shape[1]
            return self._ring[self._first : self._first + num_rows].view(-1, len(self._layers) * hidden)
        return self._ring[self._places(self._features.of_head())].flatten(1)

    def _places(self, places: Places) -> Tensor:
        return torch.from_numpy(places + self._first).pin_memory().to(self._ring.device, non_blocking=True)

    def _wait_for_turn(self) -> None:
        """Until the memory of the next step has been read."""
        if (before := self._sent[self._turn]) is not None:
            before.is_read.wait()
            self._sent[self._turn] = None

    @property
    def _first(self) -> int:
        """Row of the next step."""
        return self._turn * self._rows_per_step

    def send(self, taps: StepTaps) -> PendingStates:
        """Queues the copy of what the step, queued on the current stream, stores."""
        first, num_rows = self._first, taps.num_rows
        stored = self._ring[first : first + num_rows]
        if self._features is not None:  # those of the head lie between them
            stored = self._ring[self._places(self._features.of_requests())]
            stored.record_stream(self._stream)
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        if len(self._host[turn]) < num_rows:
            most = min(self._rows_per_step, 1 << (num_rows - 1).bit_length())
            self._host[turn] = torch.empty(most, self._ring.shape[1], dtype=self._ring.dtype, pin_memory=True)
        host = self._host[turn][:num_rows]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(stored, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        sent = self._sent[turn] = PendingStates(taps, host, copied)
        return sent
