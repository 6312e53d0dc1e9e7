"""An audio file's bytes → mono samples at 16 kHz."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bequest.engine.audio.resample import Resampler, Samples
from bequest.engine.audio.tracks import Track, open_track
from bequest.engine.errors import InvalidAudio

SAMPLE_RATE = 16_000
_RATES = range(1_000, 384_001)
_VALUES_AT_ONCE = 1 << 20  # samples of all channels that are decoded at a time
_SAMPLE_BYTES = 4
_PIECES = 8  # of that length, on their way from the file's rate to ours


def decode(data: bytes | bytearray, max_seconds: float) -> Samples:
    """[N] float32 from -1 to 1, the mean of all channels. Raises InvalidAudio."""
    if not data:
        raise InvalidAudio("The audio file is empty: it has no bytes.", field="audio")
    with open_track(data) as track:
        samples = _joined([*_at_our_rate(track, max_seconds)])
    if not len(samples):
        raise InvalidAudio("The audio file is empty: it has no samples.", field="audio")
    return np.clip(samples, -1, 1, out=samples)


def decoded_bytes(data: bytes | bytearray, max_seconds: float) -> int:
    """Memory that `decode` takes, at the most: a few kilobytes may be hours. 0 where it will complain."""
    try:
        with open_track(data) as track:
            told = max_seconds if track.num_frames is None else track.num_frames / track.rate
    except InvalidAudio:
        return 0
    seconds = min(told, max_seconds)
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


def _at_our_rate(track: Track, max_seconds: float) -> Iterator[Samples]:
    if track.rate not in _RATES:
        raise InvalidAudio(
            f"The audio has {track.rate} samples per second; from {_RATES[0]} to {_RATES[-1]} are supported.",
            field="audio",
        )
    pieces = _mono(track, int(max_seconds * track.rate), max_seconds)
    if track.rate == SAMPLE_RATE:
        yield from pieces
        return
    resampler = Resampler(track.rate, SAMPLE_RATE)
    for piece in pieces:
        yield resampler.push(piece)
    yield resampler.finish()


def _mono(track: Track, most: int, max_seconds: float) -> Iterator[Samples]:
    """At most `most` samples of each channel. What the header says of the length may be wrong: what is decoded counts,
    but a header that says too much saves the decoding."""
    if track.num_frames is not None and track.num_frames > most:
        raise _too_long(track.num_frames / track.rate, max_seconds)
    decoded = 0
    for block in track.blocks(_VALUES_AT_ONCE):  # [n, channels]
        decoded += len(block)
        if decoded > most:
            raise _too_long(None, max_seconds)
        mono = block[:, 0] if track.channels == 1 else block.mean(axis=1, dtype=np.float32)
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
