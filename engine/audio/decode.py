"""An audio file's bytes → mono samples at 16 kHz. libsndfile reads the file and finds its format by its content."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import soundfile

from bequest.engine.audio.resample import Resampler, Samples
from bequest.engine.errors import InvalidAudio

SAMPLE_RATE = 16_000
_RATES = range(1_000, 384_001)
_VALUES_AT_ONCE = 1 << 20  # samples of all channels that are decoded at a time
_SAMPLE_BYTES = 4
_PIECES = 8  # of that length, on their way from the file's rate to ours
_READ = "wav, flac, mp3, ogg (Vorbis, Opus) and aiff"
_CONTAINERS = {(4, b"ftyp"): "an MP4 or M4A file", (0, b"\x1a\x45\xdf\xa3"): "a WebM or Matroska file"}


def decode(data: bytes | bytearray, max_seconds: float) -> Samples:
    """[N] float32 from -1 to 1, the mean of all channels. Raises InvalidAudio."""
    if not data:
        raise InvalidAudio("The audio file is empty: it has no bytes.", field="audio")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            samples = _joined([*_at_our_rate(file, max_seconds)])
    except soundfile.LibsndfileError as error:
        raise _unreadable(data, error) from error
    if not len(samples):
        raise InvalidAudio("The audio file is empty: it has no samples.", field="audio")
    return np.clip(samples, -1, 1, out=samples)


def decoded_bytes(data: bytes | bytearray, max_seconds: float) -> int:
    """Memory that `decode` takes, at the most: a few kilobytes may be hours. 0 where it will complain."""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            seconds = min(file.frames / file.samplerate, max_seconds)
    except soundfile.LibsndfileError:
        return 0
    return int(seconds * SAMPLE_RATE) * _SAMPLE_BYTES + _PIECES * _VALUES_AT_ONCE * _SAMPLE_BYTES


def _joined(pieces: list[Samples]) -> Samples:
    """Each piece is let go when it is copied: the memory of both would add up."""
    samples = np.empty(sum(map(len, pieces)), np.float32)
    end = len(samples)
    while pieces:
        piece = pieces.pop()
        samples[end - len(piece) : end] = piece
        end -= len(piece)
    return samples


def _at_our_rate(file: soundfile.SoundFile, max_seconds: float) -> Iterator[Samples]:
    if file.samplerate not in _RATES:
        raise InvalidAudio(
            f"The audio has {file.samplerate} samples per second; from {_RATES[0]} to {_RATES[-1]} are supported.",
            field="audio",
        )
    pieces = _mono(file, int(max_seconds * file.samplerate), max_seconds)
    if file.samplerate == SAMPLE_RATE:
        yield from pieces
        return
    resampler = Resampler(file.samplerate, SAMPLE_RATE)
    for piece in pieces:
        yield resampler.push(piece)
    yield resampler.finish()


def _mono(file: soundfile.SoundFile, most: int, max_seconds: float) -> Iterator[Samples]:
    """At most `most` samples of each channel. What the header says of the length may be wrong: what is decoded counts,
    but a header that says too much saves the decoding."""
    if most < file.frames < 1 << 62:  # above that libsndfile means that it does not know
        raise _too_long(file.frames / file.samplerate, max_seconds)
    at_once = max(1, _VALUES_AT_ONCE // file.channels)
    decoded = 0
    while len(block := file.read(at_once, dtype="float32", always_2d=True)):  # [n, channels]
        decoded += len(block)
        if decoded > most:
            raise _too_long(None, max_seconds)
        mono = block[:, 0] if file.channels == 1 else block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise InvalidAudio("The audio has samples that are not finite numbers.", field="audio")
        yield mono


def _too_long(seconds: float | None, most: float) -> InvalidAudio:
    length = "longer" if seconds is None else f"{seconds:.0f} s long"
    return InvalidAudio(
        f"The audio is {length}, at most {most:.0f} s.",
        reason="audio_too_long",
        field="audio",
        details={"limit": most} if seconds is None else {"limit": most, "seconds": round(seconds, 3)},
        length=length,
    )


def _unreadable(data: bytes | bytearray, error: soundfile.LibsndfileError) -> InvalidAudio:
    for (offset, magic), name in _CONTAINERS.items():
        if data[offset : offset + len(magic)] == magic:
            return InvalidAudio(
                f"The audio is {name}, which is not read; {_READ} are.",
                reason="audio_container",
                field="audio",
                container=name,
                formats=_READ,
            )
    return InvalidAudio(
        f"This is not audio in {_READ}, or it is damaged: {error.error_string}",
        reason="audio_unreadable",
        field="audio",
        formats=_READ,
        why=error.error_string,
    )
