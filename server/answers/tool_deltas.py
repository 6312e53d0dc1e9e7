"""Tool calls as chat shows them: in a message, or in the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bequest.engine.text.tool_calls import CallArguments, CallBegun, Content, ToolCallReader, ToolEvent
from bequest.server.wire.names import new_id


def reason_with_calls(reason: str | None, reader: ToolCallReader | None) -> str | None:
    """An answer with calls ends for them, unless it was cut."""
    return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason


def whole_message(events: Sequence[ToolEvent]) -> dict[str, Any]:
    """`content`, and `tool_calls` if there are any."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append(_call(event.name))
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    if not calls:
        return {"content": content}
    return {"content": content or None, "tool_calls": calls}


class DeltaMaker:
    """One choice of a stream. A name and an id come once: clients put the strings of deltas together."""

    def __init__(self, reader: ToolCallReader | None) -> None:
        assert reader is not None
        self._reader = reader

    def deltas(self, text: str, first: bool, last: bool) -> list[dict[str, Any]]:
        events = self._reader.feed(text)
        if last:
            events += self._reader.finish()
        deltas = [_delta(event) for event in events]
        if not first:
            return deltas
        if deltas and "content" in deltas[0]:
            return [{"role": "assistant", **deltas[0]}, *deltas[1:]]
        return [{"role": "assistant", "content": None}, *deltas]

    def reason(self, reason: str | None) -> str | None:
        return reason_with_calls(reason, self._reader)


def _delta(event: ToolEvent) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, CallBegun):
        return {"tool_calls": [{"index": event.index, **_call(event.name)}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _call(name: str) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": {"name": name, "arguments": ""}}
