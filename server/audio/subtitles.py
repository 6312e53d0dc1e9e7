"""A transcript in the formats of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from bequest.engine.text.languages import language_name

SEGMENTS, WORDS = ("segment",), ("word",)  # `timestamp_granularities`


@dataclass(frozen=True, slots=True)
class Word:
    """Times in seconds from the beginning of the audio."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech; times in seconds from the beginning of the audio."""

    start: float
    end: float
    text: str  # as the model wrote it, usually with a space first
    token_ids: tuple[int, ...]
    seek: int  # the first frame (10 ms) of the window it was heard in
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()  # where somebody wants their times


@dataclass(frozen=True, slots=True)
class TokenUsage:
    audio: int = 0  # positions of the encoder
    text: int = 0  # of decoder prompts
    output: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(self.audio + other.audio, self.text + other.text, self.output + other.output)

    def as_json(self) -> dict[str, Any]:
        given = self.audio + self.text
        return {
            "type": "tokens",
            "input_tokens": given,
            "output_tokens": self.output,
            "total_tokens": given + self.output,
            "input_token_details": {"audio_tokens": self.audio, "text_tokens": self.text},
        }


@dataclass(frozen=True, slots=True)
class Transcript:
    language: str  # code
    duration: float  # seconds
    segments: tuple[Segment, ...]
    usage: TokenUsage

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


def as_json(transcript: Transcript) -> dict[str, Any]:
    return {"text": transcript.text, "usage": _duration(transcript)}


def as_verbose_json(transcript: Transcript, task: str, granularities: Collection[str] = SEGMENTS) -> dict[str, Any]:
    told: dict[str, Any] = {
        "task": task,
        # A translation's language is that of its text.
        "language": "english" if task == "translate" else language_name(transcript.language),
        "duration": transcript.duration,
        "text": transcript.text,
    }
    if "segment" in granularities:
        told["segments"] = [_segment(index, segment) for index, segment in enumerate(transcript.segments)]
    if "word" in granularities:
        told["words"] = [_word(word) for segment in transcript.segments for word in segment.words]
    return {**told, "usage": _duration(transcript)}


def as_srt(segments: Sequence[Segment]) -> str:
    return "".join(
        f"{number}\n{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}\n{_line(segment)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def as_vtt(segments: Sequence[Segment]) -> str:
    cues = (
        f"{_clock(segment.start, '.')} --> {_clock(segment.end, '.')}\n{_line(segment)}\n\n" for segment in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _segment(index: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": index,
        "seek": segment.seek,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)}


def _duration(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.duration)}


def _clock(seconds: float, point: str) -> str:
    """01:02:03,456"""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def _line(segment: Segment) -> str:
    """In one line, and without what would read as the times of a next one."""
    return " ".join(segment.text.split()).replace("-->", "->")
