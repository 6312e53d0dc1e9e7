"""Changes the sampling rate of a signal that comes in pieces: a polyphase filter, a Kaiser-windowed sinc.

With L / M the ratio of the rates in lowest terms, output n lies at the input's time n · M / L, and only L different
fractions of a sample occur: each has its K taps. Outputs are made `repeat · L` at a time from `repeat · M` inputs, with
`repeat` such that the inputs of two outputs of the same fraction do not overlap: all outputs of a fraction are then one
product of a strided matrix, which BLAS reads in place.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

_ZERO_CROSSINGS = 32  # of the sinc, on each side
_KAISER_BETA = 9.0  # what folds back is 90 dB down
_MOST_TAPS = 1 << 22  # of all fractions together
_ROWS_AT_ONCE = 256
_PASS_BAND = 0.95  # share of the narrower band; the rest is the filter's slope


class Resampler:
    """`push` pieces of any length, then `finish`; what they return, put together, is the signal at the new rate.

    It has ceil(N · new / old) samples of N, the first at the same time as the first of the old.
    """

    def __init__(self, old_rate: int, new_rate: int) -> None:
        divisor = math.gcd(old_rate, new_rate)
        self._up, self._down = new_rate // divisor, old_rate // divisor
        num_taps = 2 * _half(self._up, self._down)
        self._before = num_taps // 2 - 1  # inputs that an output needs ahead of its own time
        repeat = -(-num_taps // self._down)
        self._group_in, self._group_out = repeat * self._down, repeat * self._up
        self._first = np.arange(self._group_out) * self._down // self._up  # of each output's inputs in the group's
        self._taps, self._rows = _table(self._up, self._down, self._group_out)
        self._held: Samples = np.zeros(self._before, np.float32)
        self._num_in = self._num_out = 0

    def push(self, samples: Samples) -> Samples:
        self._num_in += len(samples)
        signal = np.concatenate([self._held, samples])
        reach = int(self._first[-1]) + self._taps.shape[1]
        groups = max(0, (len(signal) - reach) // self._group_in + 1)
        self._held = signal[groups * self._group_in :].copy()
        out = self._groups(signal, groups)
        self._num_out += len(out)
        return out

    def finish(self) -> Samples:
        """The outputs whose inputs reach beyond the end, where there is silence."""
        missing = -(-self._num_in * self._up // self._down) - self._num_out
        groups = -(-missing // self._group_out)
        reach = (groups - 1) * self._group_in + int(self._first[-1]) + self._taps.shape[1]
        silence = np.zeros(max(0, reach - len(self._held)), np.float32)
        return self._groups(np.concatenate([self._held, silence]), groups)[:missing]

    def _groups(self, signal: Samples, groups: int) -> Samples:
        out = np.empty((groups, self._group_out), np.float32)
        if groups:
            num_taps = self._taps.shape[1]
            strides = (self._group_in * signal.itemsize, signal.itemsize)
            for place, first in enumerate(self._first):
                inputs = np.lib.stride_tricks.as_strided(signal[first:], (groups, num_taps), strides, writeable=False)
                out[:, place] = inputs @ self._taps[self._rows[place]]
        return out.ravel()


def _table(up: int, down: int, num_outputs: int) -> tuple[Samples, npt.NDArray[np.int64]]:
    """The taps, and which row of them each output of a group has.

    An odd rate has thousands of fractions. Where it is high too, each has many taps, and the table would take a hundred
    megabytes; then the nearest of fewer fractions serves. So high a rate is far above the band that is kept: a shift by
    a ten-thousandth of its sample is nothing there.
    """
    outputs = np.arange(num_outputs)
    rows = _MOST_TAPS // (2 * _half(up, down))
    if up <= rows:
        return _taps(up, down), outputs % up
    places = np.arange(rows + 1) / rows
    return _taps_at(places, up, down), np.rint(outputs * down % up * (rows / up)).astype(np.int64)


def _half(up: int, down: int) -> int:
    """Half of the taps of a fraction."""
    return math.ceil(_ZERO_CROSSINGS / _cutoff(up, down))


def _cutoff(up: int, down: int) -> float:
    return _PASS_BAND * min(1.0, up / down)  # of the input's band


def _taps(up: int, down: int) -> Samples:
    """[L, K]: tap k of fraction f weighs the input at k - (K/2 - 1) samples from the one at or before the output."""
    return _taps_at(np.arange(up) * down % up / up, up, down)


def _taps_at(fractions: npt.NDArray[np.float64], up: int, down: int) -> Samples:
    """Of these fractions of a sample, some at a time: what they are made with takes several times their memory."""
    parts = range(0, len(fractions), _ROWS_AT_ONCE)
    return np.concatenate([_some_taps(fractions[start : start + _ROWS_AT_ONCE], up, down) for start in parts])


def _some_taps(fractions: npt.NDArray[np.float64], up: int, down: int) -> Samples:
    cutoff, half = _cutoff(up, down), _half(up, down)
    reach = _ZERO_CROSSINGS / cutoff
    fraction = fractions[:, None]
    distance = np.arange(1 - half, half + 1)[None, :] - fraction
    inside = np.clip(1 - (distance / reach) ** 2, 0, None)
    window = np.i0(_KAISER_BETA * np.sqrt(inside)) / np.i0(_KAISER_BETA) * (inside > 0)
    taps = cutoff * np.sinc(cutoff * distance) * window
    # Each fraction passes a constant unchanged: otherwise a steady level would come out with a tone in it.
    even: Samples = (taps / taps.sum(axis=1, keepdims=True)).astype(np.float32)
    return even
