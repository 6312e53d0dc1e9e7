"""Products of many bfloat16 rows: torch's, or those of another algorithm where that has been measured to be faster.

cuBLAS guesses an algorithm by the shape, and for some shapes it guesses badly: on an H200 2,048 rows times 3584 × 18944
take 445 µs where another algorithm takes 362. So when a server starts, shapes that graphs will hold are measured once.
From then on each shape has one algorithm, for as long as the process lives: the same rows get the same bits.
Device thread. Dims as in cuda_linear.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.kernels import cublas_lt

_BF16 = torch.bfloat16
_FEWEST_ROWS = 512  # fewer are bound by the bytes of the weight
_FEWEST_ELEMENTS = 8 << 20  # of a weight: a model of smaller ones starts fast
_CANDIDATES = 8
_ROUNDS = 2
_MOST_SECONDS = 1.0  # of a start: shapes that come later are torch's; large ones come first
_GAIN = 0.97  # of torch's time, at the most: less is within what a clock changes from run to run
_Shape = tuple[int, int, int, bool]  # T, N, K, whether there is a bias


@dataclass(frozen=True, slots=True)
class Chosen:
    product: cublas_lt.Product
    candidate: cublas_lt.Candidate

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        self.product.launch(self.candidate, x, weight, bias, out)
        return out


class Choices:
    """Of one device."""

    def __init__(self) -> None:
        self._chosen: dict[_Shape, Chosen | None] = {}  # None: torch's
        self._measures = False
        self._seconds_left = _MOST_SECONDS

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within it a shape that is new is measured when it is multiplied. REQUIRES: no graph is captured"""
        self._measures = os.environ.get("WINDOW_CHOICES") != "off"
        try:
            yield
        finally:
            self._measures = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] · weight [N, K]ᵀ + bias [N] → [T, N], all of them on the device."""
        shape = x.shape[0], weight.shape[0], weight.shape[1], bias is not None
        chosen = self._chosen.get(shape)
        if chosen is None and self._measures and shape not in self._chosen:
            chosen = self._measured(shape, x, weight, bias)
        if chosen is None or not _is_dense(x, weight, bias):
            return F.linear(x, weight, bias)
        return chosen(x, weight, bias)

    def _measured(self, shape: _Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Chosen | None:
        is_large = shape[0] >= _FEWEST_ROWS and weight.numel() >= _FEWEST_ELEMENTS
        if self._seconds_left < 0 or not is_large or not _is_dense(x, weight, bias) or cublas_lt.library() is None:
            return None
        began = time.perf_counter()
        self._chosen[shape] = chosen = choose(torch.randn_like(x), weight, bias)
        self._seconds_left -= time.perf_counter() - began
        return chosen


def _is_dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = (x, weight) if bias is None else (x, weight, bias)
    return all(
        each.dtype is _BF16 and each.is_contiguous() and each.data_ptr() % cublas_lt.ALIGNMENT == 0 for each in given
    )


def choose(x: Tensor, weight: Tensor, bias: Tensor | None) -> Chosen | None:
    """The fastest way to multiply; None: torch's. REQUIRES: there is a library, and all are dense in bfloat16"""
    product = cublas_lt.Product(x.shape[0], *weight.shape, has_bias=bias is not None)
    offered = [Chosen(product, each) for each in product.candidates(_CANDIDATES)]
    calls = [lambda: F.linear(x, weight, bias), *(lambda by=by: by(x, weight, bias) for by in offered)]
    times = measured_times(calls, _ROUNDS)
    best = min(range(len(calls)), key=times.__getitem__)
    return offered[best - 1] if times[best] < _GAIN * times[0] else None


def measured_times(calls: Sequence[Callable[[], Tensor]], rounds: int) -> list[float]:
    """Milliseconds of each, the best of some rounds. They take turns: a clock that changes is the same to all."""
    for call in calls:
        call()  # loads its kernel
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)] for _ in range(rounds)]
    for each in marks:
        calls[0]()  # the device has something to do while the next ones are launched
        each[0].record()
        for call, mark in zip(calls, each[1:], strict=True):
            call()
            mark.record()
    marks[-1][-1].synchronize()
    return [min(each[i].elapsed_time(each[i + 1]) for each in marks) for i in range(len(calls))]


CHOICES = Choices()
