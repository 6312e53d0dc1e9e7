"""Reads an answer: thoughts, content and calls, whole or piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from bequest.engine.dialects.call_reader import CallReader, Functions
from bequest.engine.dialects.events import AnswerEvent, Content, Stage, joined
from bequest.engine.dialects.formats import FORMATS, CallFormat
from bequest.engine.dialects.harmony import CHANNEL, MARKS, MESSAGE, HarmonyReader
from bequest.engine.dialects.recognise import HARMONY, thinking_format
from bequest.engine.dialects.thinking import ThinkingReader


class AnswerReader(Protocol):
    """One answer. What `feed` and `finish` return, put together, does not depend on how the text was cut."""

    def feed(self, text: str) -> list[AnswerEvent]: ...

    def finish(self) -> list[AnswerEvent]:
        """The answer has ended, wherever that is."""

    def prime(self, text: str) -> None:
        """Takes a beginning of the answer that its prompt has; it is not told again."""

    @property
    def stage(self) -> Stage: ...

    @property
    def num_calls(self) -> int: ...

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The parts of the text that are thoughts, marks included, in characters."""


@dataclass(frozen=True, slots=True)
class CallTerms:
    """What an answer may call: see CallReader."""

    functions: Functions = field(default_factory=dict)
    most: int | None = None
    only_calls: bool = False


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes. `reasoning` is the name of its parser; None: it shows no thoughts."""

    reasoning: str | None = None
    calls: CallFormat = FORMATS["hermes"]

    @property
    def is_harmony(self) -> bool:
        return self.reasoning == HARMONY

    def marks(self, calls: bool) -> tuple[str, ...]:
        """The marks that its readers look for; with those of calls."""
        if self.is_harmony or (calls and self.calls.syntax is None):
            return MARKS
        thinking = thinking_format(self.reasoning)
        thoughts = () if thinking is None else (thinking.begin, thinking.end, thinking.answer_begin)
        return (*filter(None, thoughts), *(self.calls.marks if calls else ()))

    def opening(self, prompt: str) -> str:
        """What a prompt's text says of the answer's thoughts, as the beginning of the answer."""
        thinking = thinking_format(self.reasoning)
        return "" if thinking is None else thinking.opening(prompt)

    def spoken(self, content: str) -> str:
        """What the model wrote to say so much of an answer."""
        return f"{CHANNEL}final{MESSAGE}{content}" if self.is_harmony and content else content

    def reader(self, terms: CallTerms | None) -> AnswerReader | None:
        """`terms` None: there is nothing to call. None: the answer is its text."""
        if self.is_harmony or (terms is not None and self.calls.syntax is None):
            if terms is None:
                return HarmonyReader(reads_calls=False)
            return HarmonyReader(True, terms.most, terms.only_calls, thinks=self.is_harmony)
        thinking = thinking_format(self.reasoning)
        if thinking is None and terms is None:
            return None
        calls = None
        if terms is not None and self.calls.syntax is not None:
            calls = CallReader(self.calls.syntax, terms.functions, terms.most, terms.only_calls)
        return PlainReader(None if thinking is None else ThinkingReader(thinking), calls)


class PlainReader:
    """Thoughts first, then text with calls in it."""

    def __init__(self, thinking: ThinkingReader | None, calls: CallReader | None) -> None:
        self._thinking = thinking
        self._calls = calls

    @property
    def stage(self) -> Stage:
        if self._thinking is None or self._thinking.state in ("after", "answering"):
            return "said"
        return "before" if self._thinking.state == "before" else "inside"

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(0, self._thinking.num_chars)] if self._thinking is not None and self._thinking.num_chars else []

    def prime(self, text: str) -> None:
        if self._thinking is not None:
            self._thinking.prime(text)

    def feed(self, text: str) -> list[AnswerEvent]:
        return self._with_calls([Content(text)] if self._thinking is None else self._thinking.feed(text))

    def finish(self) -> list[AnswerEvent]:
        events = [] if self._thinking is None else self._with_calls(self._thinking.finish())
        return joined([*events, *(() if self._calls is None else self._calls.finish())])

    def _with_calls(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        calls = self._calls
        if calls is None:
            return events
        read: list[AnswerEvent] = []
        for event in events:
            read += calls.feed(event.text) if isinstance(event, Content) else [event]
        return read
