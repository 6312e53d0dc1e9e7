"""Anthropic's content blocks → messages as templates take them, and the places where `cache_control` stands.

A turn of the assistant is one message: its thoughts, its text and its calls. Results of calls are messages of their
own. Whatever this server puts into a message is accepted back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from bequest.server.asks.messages import string_at, wrong_type
from bequest.server.asks.tools import Tools
from bequest.server.doors.messages.body import ConversingBody
from bequest.server.doors.messages.cache_marks import Place, ttl_of
from bequest.server.doors.messages.images import image_part
from bequest.server.wire.errors import invalid, missing
from bequest.server.wire.reading import shorten

_ROLES = ("user", "assistant", "system")
_SHOWN = ("document", "image")  # what a user shows, beside text
_USER_BLOCKS = "text, image, document and tool_result"
_UNREADABLE = ("redacted_thinking",)  # encrypted by another server: nobody here can read it, and it is left out


@dataclass(slots=True)
class Turn:
    """A message of the template's."""

    role: str
    parts: list[dict[str, Any]] = field(default_factory=list)  # texts and images, as a template takes them
    calls: list[dict[str, Any]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)  # the call that it is the result of

    def message(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"role": self.role, **self.about}
        # One text is a string to a template; of several parts, the template decides how they are joined.
        alone = len(self.parts) < 2 and all("text" in part for part in self.parts)
        shown["content"] = "".join(part["text"] for part in self.parts) if alone else self.parts
        if self.thoughts:
            shown["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            shown["tool_calls"] = self.calls
        return shown


@dataclass(frozen=True, slots=True)
class Said:
    """A conversation, read."""

    turns: tuple[Turn, ...]
    places: tuple[Place, ...]  # in their order, those of `tools` first

    def messages(self) -> list[dict[str, Any]]:
        return [turn.message() for turn in self.turns]

    def marked(self, place: Place, mark: str) -> list[dict[str, Any]]:
        """The messages with a word more at a place in them."""
        messages, turn = self.messages(), self.turns[place.turn]
        parts, calls = turn.parts[: place.part], turn.calls[: place.call]
        if calls:
            function = calls[-1]["function"]
            arguments = {**function["arguments"], mark: mark}
            calls[-1] = {**calls[-1], "function": {**function, "arguments": arguments}}
        elif parts and "text" in parts[-1]:
            parts[-1] = text_part(parts[-1]["text"] + mark)
        else:
            parts.append(text_part(mark))
        more = replace(turn, parts=parts + turn.parts[place.part :], calls=calls + turn.calls[place.call :])
        messages[place.turn] = more.message()
        return messages

    def seen(self, messages: Sequence[Mapping[str, Any]]) -> Said:
        """With the parts of its messages whose images have been found."""
        contents = [message["content"] for message in messages]
        turns = (
            replace(turn, parts=content) if isinstance(content, list) else turn
            for turn, content in zip(self.turns, contents, strict=True)
        )
        return replace(self, turns=tuple(turns))

    def digests(self, tools: Tools, variables: Mapping[str, Any] | None) -> list[bytes]:
        """Of each beginning of it, one message long and longer: equal where the same was said."""
        digest = hashlib.blake2b(_json([tools.for_template(), variables]), digest_size=16)
        found = []
        for message in self.messages():
            digest.update(_json(message))
            found.append(digest.copy().digest())
        return found


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS, default=str)
    except orjson.JSONEncodeError:  # an integer of more than 64 bits
        return json.dumps(value, sort_keys=True, default=str).encode()


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def read_conversation(body: ConversingBody) -> Said:
    return _Reader(body).said()


class _Reader:
    def __init__(self, body: ConversingBody) -> None:
        self._body = body
        self._turns: list[Turn] = []
        self._places: list[Place] = []
        self._names: dict[str, str] = {}  # of functions, by the id of the call

    def said(self) -> Said:
        body = self._body
        for index, tool in enumerate(body.tools or []):
            if isinstance(tool, dict) and (ttl := ttl_of(tool, f"tools[{index}]")):
                self._places.append(Place(ttl, tool=index))
        if body.system:
            self._speak("system", body.system, "system")
        if not body.messages:
            raise missing("messages", "`messages` is missing or empty: send a list of {role, content}.")
        for index, message in enumerate(body.messages):
            path = f"messages[{index}]"
            role = string_at(message, "role", path)
            if role not in _ROLES:
                given = shorten(repr(role))
                raise invalid(f"`{path}.role` must be 'user' or 'assistant', not {given}.", f"{path}.role")
            if message.get("content") is None:
                raise missing(f"{path}.content")
            self._speak(role, message["content"], f"{path}.content")
        if ttl := ttl_of({"cache_control": body.cache_control}, ""):
            self._mark(ttl)
        return Said(tuple(self._turns), tuple(self._places))

    def _speak(self, role: str, content: Any, path: str) -> None:
        if isinstance(content, str):
            self._turn(role).parts.append(text_part(content))
            return
        if not isinstance(content, list):
            raise wrong_type(path, "a string or a list of blocks")
        if role == "assistant":
            self._turn(role)  # it may have said nothing
        elif not content:
            raise invalid(f"`{path}` must have at least one block.", path)
        for index, block in enumerate(content):
            at = f"{path}[{index}]"
            if not isinstance(block, dict):
                raise wrong_type(at, "an object with `type`")
            self._block(role, block, at)
            if ttl := ttl_of(block, at):
                self._mark(ttl)

    def _turn(self, role: str) -> Turn:
        """The one that is being said: turns of one role in a row are one."""
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(Turn(role))
        return self._turns[-1]

    def _mark(self, ttl: str) -> None:
        """What was read last ends here."""
        turn = self._turns[-1]
        self._places.append(Place(ttl, turn=len(self._turns) - 1, part=len(turn.parts), call=len(turn.calls)))

    def _block(self, role: str, block: dict[str, Any], path: str) -> None:
        kind = string_at(block, "type", path)
        if kind == "text":
            self._turn(role).parts.append(text_part(string_at(block, "text", path)))
        elif kind in _SHOWN and role == "user":
            self._turn(role).parts.append(_shown(kind, block, path))
        elif kind == "tool_result" and role == "user":
            self._result(block, path)
        elif kind == "thinking" and role == "assistant":
            self._turn(role).thoughts.append(string_at(block, "thinking", path))
        elif kind == "tool_use" and role == "assistant":
            self._call(block, path)
        elif kind not in _UNREADABLE or role != "assistant":
            raise _unknown(kind, role, path)

    def _call(self, block: dict[str, Any], path: str) -> None:
        name, call_id = string_at(block, "name", path), string_at(block, "id", path)
        given = block.get("input")
        if given is not None and not isinstance(given, dict):
            raise wrong_type(f"{path}.input", "an object")
        self._names[call_id] = name
        function = {"name": name, "arguments": given or {}}
        self._turn("assistant").calls.append({"id": call_id, "type": "function", "function": function})

    def _result(self, block: dict[str, Any], path: str) -> None:
        call_id = string_at(block, "tool_use_id", path)
        if call_id not in self._names:
            place = f"{path}.tool_use_id"
            message = f"`{place}` is {shorten(repr(call_id))}, but no `tool_use` block before it has that `id`."
            raise invalid(message, place)
        turn = Turn("tool", about={"tool_call_id": call_id, "name": self._names[call_id]})
        turn.parts = list(_result_parts(block.get("content"), f"{path}.content"))
        is_error = block.get("is_error")
        if is_error is not None and not isinstance(is_error, bool):
            raise wrong_type(f"{path}.is_error", "true or false")
        if is_error:
            turn.parts = _as_error(turn.parts)
        self._turns.append(turn)


def _as_error(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Templates know no errors: the model reads it."""
    if parts and "text" in parts[0]:
        return [text_part("Error: " + parts[0]["text"]), *parts[1:]]
    return [text_part("Error"), *parts]


def _result_parts(content: Any, path: str) -> Iterator[dict[str, Any]]:
    if content is None:
        return
    if isinstance(content, str):
        yield text_part(content)
        return
    if not isinstance(content, list):
        raise wrong_type(path, "a string or a list of blocks")
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        if not isinstance(block, dict):
            raise wrong_type(at, "an object with `type`")
        kind = string_at(block, "type", at)
        if kind in _SHOWN:
            yield _shown(kind, block, at)
        elif kind != "text":
            raise _unknown(kind, "user", at)
        else:
            yield text_part(string_at(block, "text", at))


def _shown(kind: str, block: dict[str, Any], path: str) -> dict[str, Any]:
    return image_part(block, path) if kind == "image" else text_part(_document(block, path))


def _document(block: dict[str, Any], path: str) -> str:
    """One of plain text, with what is told of it."""
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "text":
        kind = shorten(repr(source.get("type") if isinstance(source, dict) else None))
        message = f"`{path}.source.type` is {kind}; this model reads text alone: send a source of type 'text'."
        raise invalid(message, f"{path}.source.type")
    about = [string_at(block, name, path) for name in ("title", "context") if block.get(name) is not None]
    return "\n".join(filter(None, [*about, string_at(source, "data", f"{path}.source")]))


def _unknown(kind: str, role: str, path: str) -> Exception:
    param = f"{path}.type"
    takes = {"assistant": "text, thinking and tool_use", "system": "text"}.get(role, _USER_BLOCKS)
    return invalid(f"`{param}` is {shorten(repr(kind))}; a message of the {role} takes blocks of type {takes}.", param)
