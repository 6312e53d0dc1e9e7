"""A message in the deltas of a stream: thoughts, content and calls."""

from __future__ import annotations

from typing import Any

from bequest.engine.dialects.events import AnswerEvent, CallBegun, Content, Thought
from bequest.engine.dialects.reader import AnswerReader
from bequest.server.asks.spoken import begun_call, thinking


def reason_with_calls(reason: str | None, reader: AnswerReader | None) -> str | None:
    """An answer with calls ends for them, unless it was cut."""
    return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason


class DeltaMaker:
    """One choice of a stream. A name and an id come once: clients put the strings of deltas together."""

    def __init__(self, reader: AnswerReader, with_thoughts: bool = True) -> None:
        self._reader = reader
        self._with_thoughts = with_thoughts

    def deltas(self, text: str, first: bool, last: bool) -> list[dict[str, Any]]:
        events = self._reader.feed(text)
        if last:
            events += self._reader.finish()
        deltas = [_delta(event) for event in events if self._with_thoughts or not isinstance(event, Thought)]
        if not first:
            return deltas
        if deltas and "tool_calls" not in deltas[0]:
            return [{"role": "assistant", "content": None, **deltas[0]}, *deltas[1:]]
        return [{"role": "assistant", "content": None}, *deltas]

    def reason(self, reason: str | None) -> str | None:
        return reason_with_calls(reason, self._reader)


def _delta(event: AnswerEvent) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Thought):
        return thinking(event.text)
    if isinstance(event, CallBegun):
        return {"tool_calls": [{"index": event.index, **begun_call(event.name)}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
