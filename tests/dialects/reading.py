"""Reads answers cut in every way, and puts the events together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from bequest.engine.dialects.events import CallArguments, CallBegun, Content, Thought
from bequest.engine.dialects.reader import AnswerReader


@dataclass
class Read:
    thoughts: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)


def read(reader: AnswerReader | None, text: str, cuts: list[int]) -> Read:
    assert reader is not None
    whole = Read()
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for event in [*(event for piece in pieces for event in reader.feed(piece)), *reader.finish()]:
        if isinstance(event, Content):
            whole.content += event.text
        elif isinstance(event, Thought):
            whole.thoughts += event.text
        elif isinstance(event, CallBegun):
            assert event.index == len(whole.calls)
            whole.calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            whole.calls[event.index][1] += event.text
    whole.spans = list(reader.spans)
    return whole


def read_cut_anywhere(make: Callable[[], AnswerReader | None], text: str) -> Read:
    """The same, however the text is cut."""
    whole = read(make(), text, [])
    draw = random.Random(text)
    assert read(make(), text, list(range(1, len(text)))) == whole, "a character at a time"
    for _ in range(100):
        cuts = sorted(draw.sample(range(len(text) + 1), draw.randint(0, len(text))))
        assert read(make(), text, cuts) == whole, cuts
    return whole
