"""A message as chat shows it, whole or in the deltas of a stream: thoughts, content and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bequest.engine.dialects.events import AnswerEvent, CallArguments, CallBegun, Content, Thought
from bequest.engine.dialects.reader import AnswerReader
from bequest.server.wire.names import new_id


def reason_with_calls(reason: str | None, reader: AnswerReader | None) -> str | None:
    """An answer with calls ends for them, unless it was cut."""
    return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason


def whole_message(events: Sequence[AnswerEvent], with_thoughts: bool = True) -> dict[str, Any]:
    """`content`, and thoughts and `tool_calls` if there are any."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    thoughts = "".join(event.text for event in events if isinstance(event, Thought)) if with_thoughts else ""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append(_call(event.name))
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    message = {"content": content or None, "tool_calls": calls} if calls else {"content": content}
    return {**message, **_thinking(thoughts)} if thoughts else message


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
        return _thinking(event.text)
    if isinstance(event, CallBegun):
        return {"tool_calls": [{"index": event.index, **_call(event.name)}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _thinking(text: str) -> dict[str, Any]:
    """Some clients read the one name, and newer ones the other."""
    return {"reasoning_content": text, "reasoning": text}


def _call(name: str) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": {"name": name, "arguments": ""}}
