"""The sound of a file, as the library gives it that reads its format, which is found by the file's content."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from typing import Protocol

import soundfile

from bequest.engine.audio.containers import ContainerTrack, container_of
from bequest.engine.audio.refusals import not_read, reads_containers, unreadable
from bequest.engine.audio.resample import Samples

_UNKNOWN_LENGTH = 1 << 62  # from which on libsndfile means that it does not know


class Track(Protocol):
    rate: int
    channels: int
    num_frames: int | None  # what the header says, which may be wrong

    def blocks(self, num_values: int) -> Iterator[Samples]:
        """[n, channels] float32 each, of so many values or a few more. Raises InvalidAudio."""

    def close(self) -> None: ...


def open_track(data: bytes | bytearray) -> AbstractContextManager[Track]:
    """Raises InvalidAudio."""
    container = container_of(data)
    if container is None:
        return closing(_SoundFile(data))
    if not reads_containers():
        raise not_read(container.words)
    return closing(ContainerTrack(data, container))


class _SoundFile:
    """A file that libsndfile reads."""

    def __init__(self, data: bytes | bytearray) -> None:
        try:
            self._file = soundfile.SoundFile(io.BytesIO(data))
        except soundfile.LibsndfileError as error:
            raise unreadable(error.error_string) from error
        self.rate: int = self._file.samplerate
        self.channels: int = self._file.channels
        self.num_frames: int | None = self._file.frames if self._file.frames < _UNKNOWN_LENGTH else None

    def blocks(self, num_values: int) -> Iterator[Samples]:
        at_once = max(1, num_values // self.channels)
        try:
            while len(block := self._file.read(at_once, dtype="float32", always_2d=True)):
                yield block
        except soundfile.LibsndfileError as error:
            raise unreadable(error.error_string) from error

    def close(self) -> None:
        self._file.close()
