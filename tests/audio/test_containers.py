"""MP4, M4A and WebM → samples, where PyAV is installed; and what is said where it is not."""

from __future__ import annotations

import contextlib
import io
import sys

import numpy as np
import pytest

from bequest.engine.audio import SAMPLE_RATE, decode, decoded_bytes
from bequest.engine.errors import InvalidAudio

av = pytest.importorskip("av")

HOUR = 3600.0
RATE = 48_000
RNG = np.random.default_rng(7)
KINDS = [("mp4", "aac"), ("ipod", "aac"), ("mp4", "alac"), ("webm", "libopus"), ("matroska", "flac")]


def tones(seconds: float, channels: int) -> np.ndarray:
    """[channels, n]: 440 Hz, and an octave more in each further channel."""
    times = np.arange(int(seconds * RATE)) / RATE
    return np.stack([0.4 * np.sin(2 * np.pi * 440 * 2**channel * times) for channel in range(channels)])


def packed(kind: str, codec: str, values: np.ndarray, live: bool = False) -> bytes:
    """A file of this kind; a live one does not know its length when its head is written."""
    layout = "mono" if len(values) == 1 else "stereo"
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options={"live": "1"} if live else {}) as container:
        stream = container.add_stream(codec, rate=RATE, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values, np.float32), format="fltp", layout=layout)
        frame.sample_rate, frame.pts = RATE, 0
        resampler = av.AudioResampler(format=stream.format, layout=layout, rate=RATE)
        for piece in resampler.resample(frame):
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return file.getvalue()


def loudest(samples: np.ndarray) -> float:
    return float(np.argmax(np.abs(np.fft.rfft(samples))) * SAMPLE_RATE / len(samples))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_containers_are_found_by_their_content(kind: str, codec: str, channels: int) -> None:
    values = tones(2, channels)
    data = packed(kind, codec, values)
    samples = decode(bytearray(data), HOUR)
    assert samples.dtype == np.float32 and abs(len(samples) - 2 * SAMPLE_RATE) < 4000
    assert abs(loudest(samples) - 440) < 2 or channels == 2
    assert samples.nbytes < decoded_bytes(data, HOUR) < 1 << 27
    if codec in ("alac", "flac"):
        exact = decode_wav(values)
        np.testing.assert_allclose(samples[100 : len(exact) - 100], exact[100:-100], atol=1e-3)


def decode_wav(values: np.ndarray) -> np.ndarray:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, values.T, RATE, format="WAV", subtype="PCM_24")
    return decode(file.getvalue(), HOUR)


def test_a_recording_that_does_not_say_how_long_it_is() -> None:
    data = packed("webm", "libopus", tones(3, 1), live=True)
    assert decoded_bytes(data, HOUR) > HOUR * SAMPLE_RATE * 4, "it may be as long as is allowed"
    assert abs(len(decode(data, HOUR)) - 3 * SAMPLE_RATE) < 4000
    with pytest.raises(InvalidAudio, match="longer, at most 2 s"):
        decode(data, 2.0)


def test_the_header_saves_the_decoding() -> None:
    with pytest.raises(InvalidAudio, match="3 s long, at most 2 s") as caught:
        decode(packed("mp4", "aac", tones(3, 1)), 2.0)
    assert caught.value.reason == "audio_too_long"


def test_sound_that_is_not_read() -> None:
    with pytest.raises(InvalidAudio, match="an MP4 or M4A file with sound in ac3, which is not read"):
        decode(packed("mp4", "ac3", tones(1, 1)), HOUR)


@pytest.mark.parametrize("head", [b"\x00\x00\x00\x20ftypM4A ", b"\x1a\x45\xdf\xa3"])
def test_a_head_without_a_file(head: bytes) -> None:
    with pytest.raises(InvalidAudio, match="m4a and webm, or it is damaged: Invalid data"):
        decode(head + bytes(40), HOUR)


def test_a_film_without_sound() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width = stream.height = 16
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    with pytest.raises(InvalidAudio, match="without sound"):
        decode(file.getvalue(), HOUR)


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_a_damaged_file_is_refused_or_read_but_nothing_else(kind: str, codec: str) -> None:
    whole = packed(kind, codec, tones(1, 1))
    for _ in range(30):
        broken = bytearray(whole)
        for place in RNG.integers(12, len(whole), 3):
            broken[place] ^= int(RNG.integers(1, 256))
        end = len(whole) if RNG.random() < 0.5 else int(RNG.integers(60, len(whole)))
        decoded_bytes(broken[:end], HOUR)
        with contextlib.suppress(InvalidAudio):
            assert len(decode(broken[:end], 10.0)) <= 10 * SAMPLE_RATE


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for data in (packed_before["mp4"], packed_before["webm"]):
        with pytest.raises(InvalidAudio, match=r"not read without the extra `bequest\[audio\]`") as caught:
            decode(data, HOUR)
        assert caught.value.reason == "audio_container" and decoded_bytes(data, HOUR) == 0
    with pytest.raises(InvalidAudio, match="and aiff, or it is damaged"):
        decode(b"no audio at all", HOUR)


packed_before = {"mp4": packed("mp4", "aac", tones(1, 1)), "webm": packed("webm", "libopus", tones(1, 1))}
