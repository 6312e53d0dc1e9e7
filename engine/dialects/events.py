"""What an answer is made of, in the order in which it was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


# Where an answer stands: its thoughts may come, are being written, or are over.
Stage = Literal["before", "inside", "said"]
AnswerEvent = Thought | Content | CallBegun | CallArguments


def joined(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Neighbours of the same kind as one."""
    whole: list[AnswerEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, Content) and isinstance(last, Content):
            whole[-1] = Content(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            whole[-1] = Thought(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            whole[-1] = CallArguments(event.index, last.text + event.text)
        else:
            whole.append(event)
    return whole
