"""Files → samples: every kind of wav against its own arithmetic, lossless flac, and what is no audio."""

from __future__ import annotations

import contextlib
import io
import struct

import numpy as np
import pytest
import soundfile

from bequest.engine.audio import SAMPLE_RATE, decode
from bequest.engine.errors import InvalidAudio

RNG = np.random.default_rng(5)
HOUR = 3600.0
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE


def wav(data: bytes, channels: int, rate: int, bits: int, kind: int = PCM, extensible: bool = False) -> bytes:
    """A RIFF file, written out by hand."""
    frame = channels * bits // 8
    head = struct.pack("<HHIIHH", EXTENSIBLE if extensible else kind, channels, rate, rate * frame, frame, bits)
    if extensible:
        guid = struct.pack("<H", kind) + bytes.fromhex("000000001000800000aa00389b71")
        head += struct.pack("<HHI", 22, bits, 0) + guid
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def pcm(values: np.ndarray, bits: int) -> bytes:
    """Integers of 2^(bits - 1) for 1.0; 8 bits are unsigned, the others signed little-endian."""
    if bits == 8:
        return (values + 128).astype(np.uint8).tobytes()
    return b"".join(int(value).to_bytes(bits // 8, "little", signed=True) for value in values.ravel())


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_integer_wavs(bits: int, channels: int, extensible: bool) -> None:
    scale = 2 ** (bits - 1)
    values = RNG.integers(-scale, scale, (77, channels))
    samples = decode(wav(pcm(values, bits), channels, SAMPLE_RATE, bits, extensible=extensible), HOUR)
    np.testing.assert_allclose(samples, (values / scale).mean(axis=1), atol=2e-7)
    assert samples.dtype == np.float32


@pytest.mark.parametrize("kind", ["<f4", "<f8"])
@pytest.mark.parametrize("extensible", [False, True])
def test_float_wavs_are_clipped_to_one(kind: str, extensible: bool) -> None:
    values = np.array([0.25, -0.5, 1.5, -3.0, 0.0], kind)
    bits = values.itemsize * 8
    samples = decode(wav(values.tobytes(), 1, SAMPLE_RATE, bits, FLOAT, extensible), HOUR)
    np.testing.assert_array_equal(samples, np.array([0.25, -0.5, 1.0, -1.0, 0.0], np.float32))


@pytest.mark.parametrize(("subtype", "bits"), [("PCM_16", 16), ("PCM_24", 24)])
def test_flac_is_lossless(subtype: str, bits: int) -> None:
    values = RNG.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5000, 2))
    file = io.BytesIO()
    soundfile.write(file, (values << (32 - bits)).astype(np.int32), SAMPLE_RATE, format="FLAC", subtype=subtype)
    samples = decode(file.getvalue(), HOUR)
    np.testing.assert_allclose(samples, (values / 2 ** (bits - 1)).mean(axis=1), atol=1e-6)


@pytest.mark.parametrize("kind", ["MP3", "OGG", "AIFF"])
def test_other_formats_are_found_by_their_content(kind: str) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(2 * SAMPLE_RATE) / SAMPLE_RATE)
    file = io.BytesIO()
    soundfile.write(file, tone, SAMPLE_RATE, format=kind)
    samples = decode(bytearray(file.getvalue()), HOUR)
    assert abs(len(samples) - len(tone)) < 4000
    spectrum = np.abs(np.fft.rfft(samples[: 2 * SAMPLE_RATE - 4000]))
    assert abs(np.argmax(spectrum) * SAMPLE_RATE / (2 * SAMPLE_RATE - 4000) - 440) < 2


def test_another_rate_is_resampled() -> None:
    values = np.round(20000 * np.sin(2 * np.pi * 1000 * np.arange(44100) / 44100))
    samples = decode(wav(pcm(values, 16), 1, 44100, 16), HOUR)
    assert len(samples) == SAMPLE_RATE
    expected = 20000 / 32768 * np.sin(2 * np.pi * 1000 * np.arange(SAMPLE_RATE) / SAMPLE_RATE)
    np.testing.assert_allclose(samples[200:-200], expected[200:-200], atol=1e-3)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no bytes"),
        (wav(b"", 1, SAMPLE_RATE, 16), "no samples"),
        (b"this is a text and no audio at all", "This is not audio in wav"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "This is not audio in wav"),
        (wav(pcm(np.zeros(9), 16), 1, 500, 16), "500 samples per second"),
        (wav(np.array([0, np.nan], "<f4").tobytes(), 1, SAMPLE_RATE, 32, FLOAT), "not finite"),
        (wav(np.array([0, np.inf], "<f4").tobytes(), 1, SAMPLE_RATE, 32, FLOAT), "not finite"),
    ],
)
def test_what_is_no_audio(data: bytes, words: str) -> None:
    with pytest.raises(InvalidAudio, match=words) as caught:
        decode(data, HOUR)
    assert caught.value.code == "invalid_audio" and caught.value.field == "audio"


def test_a_damaged_flac_is_refused_or_shorter_but_never_more() -> None:
    file = io.BytesIO()
    soundfile.write(file, RNG.uniform(-1, 1, 20000), SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    whole = file.getvalue()
    for _ in range(40):
        broken = bytearray(whole)
        broken[int(RNG.integers(42, len(whole)))] ^= 0xFF
        with contextlib.suppress(InvalidAudio):
            assert 1 <= len(decode(broken[: int(RNG.integers(60, len(whole)))], HOUR)) <= 20000 + 65536


def test_three_hours_are_refused_by_the_header() -> None:
    silence = np.zeros(60 * SAMPLE_RATE, np.int16)
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", SAMPLE_RATE, 1, format="FLAC", subtype="PCM_16") as writer:
        for _ in range(180):
            writer.write(silence)
    with pytest.raises(InvalidAudio, match="10800 s long, at most 7200 s") as caught:
        decode(file.getvalue(), 2 * HOUR)
    assert caught.value.details == {"limit": 2 * HOUR, "seconds": 10800.0}


def test_the_limit_counts_to_the_sample() -> None:
    data = wav(bytes(2 * SAMPLE_RATE), 1, SAMPLE_RATE, 16)
    assert len(decode(data, 1.0)) == SAMPLE_RATE
    with pytest.raises(InvalidAudio):
        decode(data, 1.0 - 1 / SAMPLE_RATE)
