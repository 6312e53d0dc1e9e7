"""Log-mel features against transformers' WhisperFeatureExtractor."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from bequest.engine.audio import LogMel
from bequest.engine.audio.mel import mel_filters

RATE = 16000


def speech_like(seconds: float) -> np.ndarray:
    rng = np.random.default_rng(3)
    time = np.arange(int(seconds * RATE)) / RATE
    tone = sum(np.sin(2 * np.pi * hertz * time) / hertz for hertz in (120, 800, 2500, 6000))
    return (0.3 * tone * np.sin(5 * time) + 1e-3 * rng.standard_normal(len(time))).astype(np.float32)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_filters(num_mels: int) -> None:
    oracle = WhisperFeatureExtractor(feature_size=num_mels).mel_filters.T
    np.testing.assert_allclose(mel_filters(num_mels), oracle, atol=1e-8)


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.0001, 0.5, 7.3, 30.0, 31.0])
def test_features(num_mels: int, seconds: float) -> None:
    samples = speech_like(seconds)
    oracle = WhisperFeatureExtractor(feature_size=num_mels)(samples, sampling_rate=RATE, return_tensors="np")
    features = LogMel(num_mels)(samples, 3000)
    assert features.shape == (num_mels, 3000) and features.dtype == np.float32
    np.testing.assert_allclose(features, oracle.input_features[0], atol=2e-4)


@pytest.mark.parametrize("samples", [np.zeros(0, np.float32), np.zeros(RATE, np.float32)])
def test_silence_is_level(samples: np.ndarray) -> None:
    np.testing.assert_allclose(LogMel(80)(samples, 3000), -1.5, rtol=1e-6)


def test_shorter_windows_of_small_models() -> None:
    samples = speech_like(2.0)
    oracle = WhisperFeatureExtractor(chunk_length=1)(samples, sampling_rate=RATE, return_tensors="np")
    np.testing.assert_allclose(LogMel(80)(samples, 100), oracle.input_features[0], atol=2e-4)
