"""Tools for a chat template that knows nothing of them: told in the system message, calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bequest.engine.dialects.formats import FORMATS, Layout

_LAYOUT = FORMATS["hermes"].layout
_INTRODUCTION = """You may call functions to help with the request. They are described in JSON, one per line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between tags:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result comes back in the next message."""


def with_calls_spelled_out(messages: Sequence[Mapping[str, Any]], layout: Layout) -> list[Mapping[str, Any]]:
    """For a template that shows tools and no calls: the calls as the model wrote them."""
    return [_spelled_out(message, layout if layout.can_write else _LAYOUT) for message in messages]


def spelled_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with tools, calls and results as text that any template shows."""
    plain = with_calls_spelled_out(messages, _LAYOUT)
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=described)
    if plain and plain[0].get("role") in ("system", "developer"):
        first = plain[0]
        return [{**first, "content": _text(first.get("content")) + "\n\n" + introduction}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _spelled_out(message: Mapping[str, Any], layout: Layout) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [(call["function"]["name"], _json(call["function"].get("arguments"))) for call in message["tool_calls"]]
    said = _text(message.get("content"))
    written = layout.written(calls)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{said}\n{written}" if said else written}


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(part.get("text", "") for part in content)
