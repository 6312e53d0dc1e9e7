"""MP4, M4A and WebM, read by FFmpeg through PyAV where that is installed (the extra `audio`).

FFmpeg reads hundreds of formats, and not all of its readers were written with strangers' files in mind. So it is asked
for two containers and a few codecs of sound alone, and it may open nothing but the bytes that it is given.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bequest.engine.audio.refusals import unreadable
from bequest.engine.audio.resample import Samples
from bequest.engine.errors import InvalidAudio

if TYPE_CHECKING:
    import av

_CODECS = ("aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "libvorbis", "pcm_s16le", "pcm_s16be")


@dataclass(frozen=True, slots=True)
class Container:
    words: str
    demuxer: str
    offset: int
    magic: bytes


_CONTAINERS = (
    Container("an MP4 or M4A file", "mp4", 4, b"ftyp"),
    Container("a WebM or Matroska file", "matroska", 0, b"\x1a\x45\xdf\xa3"),
)


def container_of(data: bytes | bytearray) -> Container | None:
    return next((c for c in _CONTAINERS if data[c.offset : c.offset + len(c.magic)] == c.magic), None)


class ContainerTrack:
    """The first sound of a container."""

    def __init__(self, data: bytes | bytearray, container: Container) -> None:
        import av  # an extra, and slow to import

        limits = {"protocol_whitelist": "none", "codec_whitelist": ",".join(_CODECS)}
        try:
            self._file = av.open(io.BytesIO(data), "r", format=container.demuxer, container_options=limits)
        except av.FFmpegError as error:
            raise unreadable(error.strerror or str(error)) from error
        try:
            self._stream = _sound(self._file.streams.audio, container.words)
        except InvalidAudio:
            self._file.close()
            raise
        self.rate: int = self._stream.rate
        self.channels: int = self._stream.channels
        seconds = (self._file.duration or 0) / 1_000_000  # a browser's recording does not say
        self.num_frames: int | None = math.floor(seconds * self.rate) or None

    def blocks(self, num_values: int) -> Iterator[Samples]:
        """FFmpeg's own pieces are of a thousand samples, too few to be worth resampling."""
        pieces: list[Samples] = []
        num_frames = 0
        for piece in self._pieces():
            pieces.append(piece)
            num_frames += len(piece)
            if num_frames * self.channels >= num_values:
                yield np.concatenate(pieces)
                pieces, num_frames = [], 0
        if pieces:
            yield np.concatenate(pieces)

    def close(self) -> None:
        self._file.close()

    def _pieces(self) -> Iterator[Samples]:
        """Whatever the codec gives, as float32 of the rate and the channels that the file promised."""
        import av

        plain = av.AudioResampler(format="fltp", layout=self._stream.layout, rate=self.rate)
        try:
            for frame in self._file.decode(self._stream):
                yield from map(_samples, plain.resample(frame))
            yield from map(_samples, plain.resample(None))
        except av.FFmpegError as error:
            raise unreadable(error.strerror or str(error)) from error
        except ValueError as error:  # another rate or layout in the middle of the file
            raise unreadable(str(error)) from error


def _samples(piece: av.AudioFrame) -> Samples:
    return np.asarray(piece.to_ndarray(), np.float32).T


def _sound(streams: Sequence[av.AudioStream], container: str) -> av.AudioStream:
    if not streams:
        raise unreadable(f"it is {container} without sound")
    codec = streams[0].codec_context.codec.name
    if codec not in _CODECS:
        raise unreadable(f"it is {container} with sound in {codec}, which is not read")
    if not streams[0].rate or not streams[0].channels:
        raise unreadable(f"it is {container} that does not say how its sound is stored")
    return streams[0]
