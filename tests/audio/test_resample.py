"""The resampler against the ideal: tones below the band edge come through, those above do not come back."""

from __future__ import annotations

import numpy as np
import pytest

from bequest.engine.audio.resample import Resampler

RATES = [8000, 11025, 16001, 22050, 24000, 32000, 44100, 48000, 96000]


def resampled(signal: np.ndarray, old: int, new: int = 16000, piece: int | None = None) -> np.ndarray:
    resampler = Resampler(old, new)
    step = piece or max(len(signal), 1)
    parts = [resampler.push(signal[i : i + step].astype(np.float32)) for i in range(0, len(signal), step)]
    return np.concatenate([*parts, resampler.finish()])


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("share", [0.01, 0.3, 0.85])
def test_tones_keep_their_phase_and_level(rate: int, share: float) -> None:
    hertz = share * min(rate, 16000) / 2
    out = resampled(np.sin(2 * np.pi * hertz * np.arange(rate) / rate), rate)
    assert len(out) == 16000
    expected = np.sin(2 * np.pi * hertz * np.arange(16000) / 16000)
    np.testing.assert_allclose(out[500:-500], expected[500:-500], atol=2e-4)


@pytest.mark.parametrize("rate", [22050, 44100, 48000, 96000])
def test_tones_that_would_fold_back_are_80_db_down(rate: int) -> None:
    hertz = (8500 + rate / 2) / 2
    out = resampled(np.sin(2 * np.pi * hertz * np.arange(rate) / rate), rate)
    assert np.abs(out[500:-500]).max() < 1e-4


@pytest.mark.parametrize("rate", RATES)
def test_a_constant_stays_one(rate: int) -> None:
    out = resampled(np.ones(rate), rate)
    np.testing.assert_allclose(out[500:-500], 1, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
@pytest.mark.parametrize("length", [1, 2, 99, 1000, 30011])
def test_pieces_make_no_difference(rate: int, length: int) -> None:
    signal = np.random.default_rng(1).uniform(-1, 1, length)
    whole = resampled(signal, rate)
    assert len(whole) == -(-length * 16000 // rate)
    for piece in (1, 7, 1000) if length < 2000 else (9999,):
        np.testing.assert_allclose(resampled(signal, rate, piece=piece), whole, atol=1e-6)


def test_nothing_comes_of_nothing() -> None:
    assert len(resampled(np.zeros(0), 44100)) == 0


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_each_output_is_its_own_sum(rate: int) -> None:
    """The slow obvious way, one output at a time."""
    from bequest.engine.audio.resample import _taps

    signal = np.random.default_rng(2).uniform(-1, 1, 900)
    divisor = np.gcd(rate, 16000)
    up, down = 16000 // divisor, rate // divisor
    taps = _taps(up, down).astype(np.float64)
    half = taps.shape[1] // 2
    padded = np.pad(signal, (half, half + down))
    out = resampled(signal, rate)
    for n in range(len(out)):
        base = n * down // up + half  # of the padded signal
        window = padded[base - half + 1 : base + half + 1]
        assert abs(out[n] - window @ taps[n % up]) < 1e-5
