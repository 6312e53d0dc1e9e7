"""A message of the assistant, as chat shows it and as templates take it: thoughts, content and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bequest.engine.dialects.events import AnswerEvent, CallArguments, CallBegun, Content, Thought
from bequest.server.wire.names import new_id


def whole_message(events: Sequence[AnswerEvent], with_thoughts: bool = True) -> dict[str, Any]:
    """`content`, and thoughts and `tool_calls` if there are any."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    thoughts = "".join(event.text for event in events if isinstance(event, Thought)) if with_thoughts else ""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append(begun_call(event.name))
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    message = {"content": content or None, "tool_calls": calls} if calls else {"content": content}
    return {**message, **thinking(thoughts)} if thoughts else message


def thinking(text: str) -> dict[str, Any]:
    """Some clients read the one name, and newer ones the other."""
    return {"reasoning_content": text, "reasoning": text}


def begun_call(name: str) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": {"name": name, "arguments": ""}}
