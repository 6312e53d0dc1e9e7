"""What is read, and what is said of a file that is not."""

from __future__ import annotations

import importlib.util

from bequest.engine.errors import InvalidAudio

_READ = "wav, flac, mp3, ogg (Vorbis, Opus) and aiff"
_READ_TOO = "wav, flac, mp3, ogg (Vorbis, Opus), aiff, mp4, m4a and webm"


def reads_containers() -> bool:
    """Whether PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def not_read(container: str) -> InvalidAudio:
    return InvalidAudio(
        f"The audio is {container}, which is not read without the extra `bequest[audio]`; {_READ} are.",
        reason="audio_container",
        field="audio",
        container=container,
        formats=_READ,
    )


def unreadable(why: str) -> InvalidAudio:
    read = _READ_TOO if reads_containers() else _READ
    return InvalidAudio(
        f"This is not audio in {read}, or it is damaged: {why}",
        reason="audio_unreadable",
        field="audio",
        formats=read,
        why=why,
    )
