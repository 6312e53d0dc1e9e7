"""Items of the Responses API ↔ messages of a chat template.

Items are what clients send and get back: messages, function calls, their outputs, reasoning, and references to them.
`input_items` makes them complete (an id, a type, a status, a list of parts), so that the same form is stored, listed,
and turned into messages.
Whatever this server puts into `output` is accepted back; nulls and unknown fields inside items are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bequest.server.asks.image_parts import given_image
from bequest.server.asks.messages import string_at, wrong_type
from bequest.server.wire.errors import invalid, missing
from bequest.server.wire.names import new_id
from bequest.server.wire.reading import shorten

Item = dict[str, Any]

_ROLES = ("user", "system", "developer", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_IMAGE = "input_image"
REFERENCE = "item_reference"
_STATUSES = ("in_progress", "completed", "incomplete")


def input_items(given: str | list[dict[str, Any]] | None) -> list[Item]:
    """The items of a request's `input`, complete."""
    if given is None:
        return []
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def output_message(item_id: str, text: str, logprobs: Sequence[Any], status: str) -> Item:
    """The message that a response says."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def output_reasoning(item_id: str, text: str, status: str) -> Item:
    """What a response thinks."""
    part = {"type": "reasoning_text", "text": text}
    return {"id": item_id, "type": "reasoning", "summary": [], "status": status, "content": [part]}


def output_call(item_id: str, call_id: str, name: str, arguments: str, status: str) -> Item:
    """A function that a response calls."""
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **call}


def begun_item(item: Item) -> Item:
    """What a whole item was when it began."""
    empty: Item = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, "status": "in_progress", **empty}


def without_logprobs(item: Item) -> Item:
    """An item of the output as the conversation keeps it."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def messages_of(items: Sequence[Item], num_stored: int = 0) -> list[dict[str, Any]]:
    """The conversation as a template takes it. The first `num_stored` items are not of this request.

    A turn of the assistant is one message there: its reasoning, its text and its calls are drawn together.
    """
    _check_ids(items, num_stored)
    _check_outputs(items, num_stored)
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of functions, by the id of the call
    thought: list[str] = []  # waits for the message it led to
    for number, item in enumerate(items, -num_stored):
        path = f"input[{number}]" if number >= 0 else "previous_response_id"
        if item["type"] == "reasoning":
            thought.extend(part["text"] for part in item.get("content") or item["summary"])
            continue
        if item["type"] == "function_call_output":
            call_id = item["call_id"]
            message = {"role": "tool", "tool_call_id": call_id, "content": _content(item["output"], f"{path}.output")}
            messages.append({**message, "name": names[call_id]} if call_id in names else message)
        elif item["type"] == "function_call":
            names[item["call_id"]] = item["name"]
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if thought or not messages or messages[-1]["role"] != "assistant":
                messages.append(_spoken({"role": "assistant", "content": ""}, thought))
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item["role"] == "assistant":
            messages.append(_spoken({"role": "assistant", "content": _content(item["content"], path)}, thought))
        else:
            messages.append({"role": item["role"], "content": _content(item["content"], f"{path}.content")})
        thought = []
    return messages


def _check_ids(items: Sequence[Item], num_stored: int) -> None:
    """Each of this request's has an id of its own: where two share one, a page of the list that ends at the first has
    the second behind it for ever. And an item that comes again would be said twice."""
    seen = {item["id"] for item in items[:num_stored]}
    for number, item in enumerate(items[num_stored:]):
        if item["id"] in seen:
            param = f"input[{number}].id"
            raise invalid(
                f"Duplicate item found with id {shorten(item['id'], 100)}: `{param}` is that of an earlier item of "
                "`input`, or of what `previous_response_id` continues. Send each item once.",
                param,
            )
        seen.add(item["id"])


def _check_outputs(items: Sequence[Item], num_stored: int) -> None:
    """Each of this request's belongs to a call of the conversation: a model could not tell what else it is."""
    calls = {item["call_id"] for item in items if item["type"] == "function_call"}
    for number, item in enumerate(items[num_stored:]):
        if item["type"] == "function_call_output" and item["call_id"] not in calls:
            param = f"input[{number}].call_id"
            raise invalid(
                f"No tool call found for function call output with call_id {shorten(item['call_id'], 100)}: "
                f"`{param}` must be that of a `function_call` in `input`, or in what `previous_response_id` continues.",
                param,
            )


def _spoken(message: dict[str, Any], thought: list[str]) -> dict[str, Any]:
    return {**message, "reasoning_content": "\n".join(thought)} if thought else message


def _content(content: str | list[dict[str, Any]], path: str) -> str | list[dict[str, Any]]:
    """One text is a string to a template; of several parts, the template decides how they are joined."""
    if isinstance(content, str):
        return content
    parts = [_shown(part, f"{path}[{index}]") for index, part in enumerate(content)]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _shown(part: dict[str, Any], path: str) -> dict[str, Any]:
    if part["type"] == _IMAGE:
        return given_image(part, path)
    return {"type": "text", "text": part["refusal"] if part["type"] == "refusal" else part["text"]}


def _item(item: Item, path: str) -> Item:
    given = {name: value for name, value in item.items() if value is not None}
    kind = given.get("type", _untyped(given))
    if kind is None:
        raise missing(f"{path}.type")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise invalid(
            f"`{path}.type` is {shorten(repr(kind))}; this server takes items of type {', '.join(_READERS)}.",
            f"{path}.type",
        )
    return read(given, path)


def _untyped(given: Item) -> str | None:
    return "message" if "role" in given else REFERENCE if given.keys() == {"id"} else None


def _reference(given: Item, path: str) -> Item:
    """It stands for an item that a response said: server/responses/prompt.py puts that in its place."""
    return {"type": REFERENCE, "id": string_at(given, "id", path)}


def _message(given: Item, path: str) -> Item:
    role = string_at(given, "role", path)
    if role not in _ROLES:
        raise invalid(f"`{path}.role` must be one of {', '.join(_ROLES)}, not {shorten(repr(role))}.", f"{path}.role")
    if "content" not in given:
        raise missing(f"{path}.content")
    kind = "output_text" if role == "assistant" else "input_text"
    content = _parts(given["content"], f"{path}.content", kind)
    return {**_base(given, path, "msg_"), "type": "message", "role": role, "content": content}


def _function_call(given: Item, path: str) -> Item:
    return {
        **_base(given, path, "fc_"),
        "type": "function_call",
        "call_id": string_at(given, "call_id", path),
        "name": string_at(given, "name", path),
        "arguments": string_at(given, "arguments", path),
    }


def _function_call_output(given: Item, path: str) -> Item:
    output = given.get("output")
    if output is None:
        raise missing(f"{path}.output")
    return {
        **_base(given, path, "fco_"),
        "type": "function_call_output",
        "call_id": string_at(given, "call_id", path),
        "output": output if isinstance(output, str) else _parts(output, f"{path}.output", "input_text"),
    }


def _reasoning(given: Item, path: str) -> Item:
    """What is encrypted was so by another server: nobody here can read it, and it is left out."""
    item = {
        **_base(given, path, "rs_"),
        "type": "reasoning",
        "summary": _parts(given.get("summary", []), f"{path}.summary", "summary_text"),
    }
    if "content" in given:
        item["content"] = _parts(given["content"], f"{path}.content", "reasoning_text")
    return item


_READERS: dict[str, Callable[[Item, str], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
    REFERENCE: _reference,
}


def _base(given: Item, path: str, prefix: str) -> Item:
    status = given.get("status", "completed")
    if status not in _STATUSES:
        allowed = ", ".join(_STATUSES)
        raise invalid(f"`{path}.status` must be one of {allowed}, not {shorten(repr(status))}.", f"{path}.status")
    return {"id": string_at(given, "id", path) if given.get("id") else new_id(prefix), "status": status}


def _parts(content: Any, path: str, kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text_part(content, kind)]
    if not isinstance(content, list):
        raise wrong_type(path, "a string or a list of parts")
    return [_part(part, f"{path}[{index}]", kind) for index, part in enumerate(content)]


def _part(part: Any, path: str, kind: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object with `type` and `text`")
    given = string_at(part, "type", path)
    if given == "refusal":
        refusal = string_at(part, "refusal", path)
        return {"type": "refusal", "refusal": refusal} if kind == "output_text" else _text_part(refusal, kind)
    if given == _IMAGE and kind == "input_text":
        given_image(part, path)
        return {"type": _IMAGE, "image_url": part["image_url"], "detail": part.get("detail") or "auto"}
    if given not in _TEXT_PARTS:
        raise invalid(
            f"`{path}.type` is {shorten(repr(given))}; send '{kind}' or, to a model that sees, '{_IMAGE}'.",
            f"{path}.type",
        )
    return _text_part(string_at(part, "text", path), kind)


def _text_part(text: str, kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "output_text" else part
