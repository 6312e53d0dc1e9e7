"""Chat messages as clients send them → as templates take them: roles, parts, tool calls.

Whatever this server puts into a message is accepted back; nulls and unknown fields inside messages are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bequest.server.asks.image_parts import IMAGE_PARTS, given_image
from bequest.server.wire.errors import ApiError, invalid, missing
from bequest.server.wire.reading import shorten

MESSAGE_CHARS = 20  # that reading a message takes as long as
ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_STRINGS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


def conversation(messages: list[dict[str, Any]] | None, name: str = "messages") -> list[dict[str, Any]]:
    """The messages in the field `name`."""
    if messages is None:
        raise missing(name, f"`{name}` is missing: send a list of {{role, content}}.")
    if not messages:
        raise invalid(f"`{name}` is empty; send at least one message.", name)
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def check_results(messages: Sequence[Mapping[str, Any]], name: str) -> None:
    """Each result of a tool belongs to a call before it: a model could not tell what else it is. Calls without ids
    leave it open to which of them a result belongs."""
    calls: set[str] = set()
    for index, message in enumerate(messages):
        ids = [call["id"] for call in message.get("tool_calls", ())]
        if None in ids:
            return
        calls.update(ids)
        result = message.get("tool_call_id") if message["role"] == "tool" else None
        if result and result not in calls:
            param = f"{name}[{index}].tool_call_id"
            raise invalid(
                f"`{param}` is {shorten(repr(result), 100)}, which is of no call before it: a message of the role "
                "'tool' follows one of the assistant that has the call in its `tool_calls`.",
                param,
            )


def text_length(messages: Sequence[Mapping[str, Any]], enough: int) -> int:
    """Characters, near enough to tell a long conversation from a short one; not counted further than `enough`."""
    length = 0
    for message in messages:
        length += MESSAGE_CHARS + sum(len(v) if isinstance(v, str) else len(str(v)) for v in message.values())
        if length > enough:
            break
    return length


def check_roles_shown(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Roles that few templates know: one that leaves such a message out would do so without a word."""
    for index, message in enumerate(messages):
        if message["role"] not in ROLES and any(part not in text for part in _texts(message.get("content"))):
            role = shorten(repr(message["role"]))
            raise invalid(
                f"`messages[{index}].role` is {role}, which the chat template does not show; it is one of "
                f"{', '.join(ROLES)}.",
                f"messages[{index}].role",
            )


def _texts(content: str | list[dict[str, Any]] | None) -> list[str]:
    parts = [content or ""] if not isinstance(content, list) else [part.get("text", "") for part in content]
    return [part.strip() for part in parts]


def text_of(content: Any, path: str) -> str:
    """A string, or the text of its parts."""
    given = _content(content, path)
    if isinstance(given, str):
        return given
    if (index := next((i for i, part in enumerate(given) if "text" not in part), None)) is not None:
        raise invalid(f"`{path}[{index}].type` must be 'text' here.", f"{path}[{index}].type")
    return "".join(part["text"] for part in given)


def _message(message: dict[str, Any], path: str) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None}
    role = string_at(given, "role", path)
    if not _ROLE.fullmatch(role):
        known = f"one of {', '.join(ROLES)}, or a word that the chat template knows"
        raise invalid(f"`{path}.role` must be {known}, not {shorten(repr(role))}.", f"{path}.role")
    plain: dict[str, Any] = {"role": role}
    if "content" in given:
        plain["content"] = _content(given["content"], f"{path}.content")
    elif role == "assistant":
        plain["content"] = ""  # it called tools and said nothing
    else:
        raise missing(f"{path}.content")
    for name in _STRINGS:
        if name in given:
            plain[name] = string_at(given, name, path)
    if given.get("tool_calls"):
        plain["tool_calls"] = _tool_calls(given["tool_calls"], f"{path}.tool_calls")
    return plain


def _content(content: Any, path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(path, "a string or a list of parts")
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, path: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object with `type` and `text`")
    kind = string_at(part, "type", path)
    if kind in IMAGE_PARTS:
        return given_image(part, path)
    if kind not in _TEXT_PARTS:
        raise invalid(
            f"`{path}.type` is {shorten(repr(kind))}; send parts of type 'text' or, to a model that sees, 'image_url'.",
            f"{path}.type",
        )
    return {"type": "text", "text": string_at(part, _TEXT_PARTS[kind], path)}


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Calls the assistant made. `arguments` may be anything: a model may have written broken JSON there."""
    if not isinstance(calls, list):
        raise wrong_type(path, "a list")
    plain = []
    for index, call in enumerate(calls):
        at = f"{path}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise wrong_type(f"{at}.function", "an object with `name` and `arguments`")
        call_id = string_at(call, "id", at) if call.get("id") is not None else None
        name = string_at(function, "name", f"{at}.function")
        arguments = function.get("arguments")
        shown = {"name": name, "arguments": {} if arguments is None else arguments}
        plain.append({"id": call_id, "type": "function", "function": shown})
    return plain


def string_at(given: dict[str, Any], name: str, path: str) -> str:
    value = given.get(name)
    if value is None:
        raise missing(f"{path}.{name}")
    if not isinstance(value, str):
        raise wrong_type(f"{path}.{name}", "a string")
    return value


def wrong_type(param: str, wanted: str) -> ApiError:
    return ApiError(400, "invalid_type", f"`{param}` must be {wanted}.", param=param)
