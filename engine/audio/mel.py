"""Log-mel features as Whisper's encoder was trained on them: windows of 25 ms every 10 ms, Slaney's mel scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bequest.engine.audio.resample import Samples

Features = npt.NDArray[np.float32]

_RATE = 16_000
_WINDOW = 400  # samples of one transform
HOP = 160  # samples from one frame to the next
_LEAST_POWER = 1e-10
_DECADES = 8.0  # what lies further below the loudest is raised to there

# Slaney's scale: linear up to 1 kHz, where it has 15 mels, logarithmic above.
_LINEAR_HZ, _LINEAR_MEL = 1000.0, 15.0
_HZ_PER_MEL = _LINEAR_HZ / _LINEAR_MEL
_LOG_STEP = np.log(6.4) / 27.0


class LogMel:
    """The features of stretches of audio; one object serves any number of threads."""

    def __init__(self, num_mels: int) -> None:
        self._filters = mel_filters(num_mels)  # [num_mels, bins]
        self._hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)).astype(np.float32)

    def __call__(self, samples: Samples, num_frames: int) -> Features:
        """[num_mels, num_frames] of the first `num_frames` · 10 ms; silence follows where `samples` [N] end."""
        length = num_frames * HOP
        padded = np.zeros(length, np.float32)
        padded[: len(samples)] = samples[:length]
        mirrored = np.pad(padded, _WINDOW // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(mirrored, _WINDOW)[::HOP][:num_frames]
        spectrum = np.fft.rfft(frames * self._hann)  # [num_frames, bins]
        power = spectrum.real**2 + spectrum.imag**2
        levels = np.log10(np.maximum(self._filters @ power.T, _LEAST_POWER))
        features: Features = (np.maximum(levels, levels.max() - _DECADES) + 4.0) / 4.0
        return features.astype(np.float32, copy=False)


def mel_filters(num_mels: int) -> Features:
    """[num_mels, bins] triangles from 0 Hz to half the rate, each of the same area."""
    bins = np.linspace(0, _RATE / 2, _WINDOW // 2 + 1)
    corners = _to_hz(np.linspace(0, float(_to_mel(np.array(_RATE / 2))), num_mels + 2))
    rising = (bins - corners[:-2, None]) / np.diff(corners)[:-1, None]
    falling = (corners[2:, None] - bins) / np.diff(corners)[1:, None]
    area = 2 / (corners[2:] - corners[:-2])
    filters: Features = (np.maximum(0, np.minimum(rising, falling)) * area[:, None]).astype(np.float32)
    return filters


def _to_mel(hz: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = _LINEAR_MEL + np.log(np.maximum(hz, _LINEAR_HZ) / _LINEAR_HZ) / _LOG_STEP
    return np.where(hz < _LINEAR_HZ, hz / _HZ_PER_MEL, above)


def _to_hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = _LINEAR_HZ * np.exp(_LOG_STEP * (mel - _LINEAR_MEL))
    return np.where(mel < _LINEAR_MEL, mel * _HZ_PER_MEL, above)
