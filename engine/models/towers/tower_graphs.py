"""Runs of a tower as CUDA graphs, one for each size of its input. A tower has some hundred small kernels, and launching
them takes longer than they run.

A size has a graph from its second run on: many images come once. The graphs share their memory with those of steps, so
what one made is copied before anything else runs. Owned by the device thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine.kernels.cuda_capture import Pool, captured

_MOST_KEPT = 8  # sizes
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    given: Tensor  # what it reads
    made: Tensor  # what it leaves
    held: object  # what lies at addresses that it knows

    def run(self, given: Tensor) -> Tensor:
        self.given.copy_(given)
        self.graph.replay()
        return self.made.clone()


class TowerGraphs:
    def __init__(self, run: Callable[[Tensor], Tensor], held: Callable[[_Shape], object], pool: Pool) -> None:
        """`held`: what runs of an input of this shape read, beside the input and the weights. `pool`: of the memory of
        graphs that never run at the same time."""
        self._run = run
        self._held = held
        self._pool = pool
        self._kept: OrderedDict[_Shape, _Graph | None] = OrderedDict()  # None: it ran once

    def run(self, given: Tensor) -> Tensor:
        shape = tuple(given.shape)
        if shape not in self._kept:
            made, self._kept[shape] = self._run(given), None
        else:
            graph = self._kept[shape] or self._captured(given)
            made, self._kept[shape] = graph.run(given), graph
        self._kept.move_to_end(shape)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return made

    def _captured(self, given: Tensor) -> _Graph:
        """REQUIRES: an input of this shape was run before, which has loaded its kernels"""
        own = given.clone()
        with captured(self._pool, "thread_local") as graph:  # other threads wait for events meanwhile
            made = self._run(own)
        return _Graph(graph, own, made, self._held(tuple(given.shape)))
