"""A step that is launched in pieces, between which others are. Device thread.

The device always has a piece that runs and, for most of that time, one behind it. So it does not wait for the host, and
whoever comes waits for two pieces at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from bequest.engine.kernels.streams import record
from bequest.engine.runner.cuda_buffers import StepBuffers
from bequest.engine.types import StepPlan

_AHEAD = 1  # pieces that are launched and not done, when others are let in


class Pieces:
    """Is called behind each layer, on the step's stream."""

    def __init__(self, between: Callable[[], None], buffers: StepBuffers, tokens_of_piece: int, plan: StepPlan) -> None:
        """`buffers`: that no other step writes meanwhile; `tokens_of_piece`: a layer of so many is a piece."""
        self.buffers = buffers
        self.began = torch.cuda.Event(enable_timing=True)
        record(self.began)
        self._between = between
        self._layers_each = max(1, tokens_of_piece // plan.num_tokens)
        self._num_layers = 0
        self._launched: deque[torch.cuda.Event] = deque()

    def end(self) -> torch.cuda.Event:
        """All of the step is launched."""
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        record(ended)
        return ended

    def __call__(self) -> None:
        self._num_layers += 1
        if self._num_layers % self._layers_each:
            return
        done = torch.cuda.Event(blocking=True)
        record(done)
        self._launched.append(done)
        if len(self._launched) > _AHEAD:
            self._launched.popleft().synchronize()
        with torch.inference_mode(mode=False):  # others keep tensors that they make
            self._between()
