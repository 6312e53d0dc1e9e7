"""Reads a tool call out of JSON that is still being written: `{"name": …, "arguments": {…}}`, piece by piece.

A call's name is known when its string ends; its arguments are passed on as they come, character for character, so that
a stream of pieces gives the same text as the whole. The scanner follows strings and nesting and checks nothing else:
what a model writes without a grammar may be broken, and is then passed on as broken.
"""

from __future__ import annotations

import json
from typing import Literal

from bequest.engine.dialects.values import well_formed

_BLANK = " \t\r\n"
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """One object. `feed` takes text until the object's end; after each piece, `name` and `take_arguments` tell.

    What is written twice counts once: it may have been told of when the second comes.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.ended = False
        self._argued = False  # the arguments are whole
        self.raw: list[str] = []  # everything, for the case that it was no call
        self._state: Literal["start", "key", "colon", "value", "after"] = "start"
        self._key = ""
        self._value: list[str] = []
        self._depth = 0  # inside the value
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []

    def feed(self, text: str) -> int:
        """Takes characters up to the end of the object; returns how many."""
        for position, char in enumerate(text):
            self._step(char)
            if self.ended:
                self.raw.append(text[: position + 1])
                return position + 1
        self.raw.append(text)
        return len(text)

    def take_arguments(self) -> str:
        """What came of the arguments since the last call."""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def _step(self, char: str) -> None:
        if self._state in ("key", "value"):
            self._inside(char)
        elif self._state == "start":
            if char == "{":
                self._state = "after"
        elif self._state == "after":
            if char == "}":
                self.ended = True
            elif char == '"':
                self._state, self._value, self._in_string = "key", ['"'], True
        elif self._state == "colon" and char == ":":
            self._state, self._value, self._depth = "value", [], 0

    def _inside(self, char: str) -> None:
        """A key or a value: its end is found by its nesting."""
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                self._end_if_whole()
            return
        if not self._value and char in _BLANK:
            return
        if self._depth == 0 and char in ",}":  # behind a number or a literal
            self._finish()
            self.ended = char == "}"
            return
        self._keep(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._end_if_whole()

    def _keep(self, char: str) -> None:
        self._value.append(char)
        # Arguments that are a string are JSON inside JSON: they are read when they are whole.
        if self._is_argument and self._value[0] != '"':
            self._arguments.append(char)

    def _end_if_whole(self) -> None:
        if self._depth == 0:
            self._finish()

    def _finish(self) -> None:
        text = "".join(self._value).rstrip(_BLANK)
        if self._state == "key":
            self._key, self._state = _unquoted(text), "colon"
            return
        if self._key in _NAMES and self.name is None:
            self.name = _unquoted(text)
        elif self._is_argument:
            self._argued = True
            if text.startswith('"'):
                self._arguments.append(_unquoted(text))
        self._state = "after"

    @property
    def _is_argument(self) -> bool:
        """Whether the value that is being read is the arguments."""
        return self._state == "value" and self._key in _ARGUMENTS and not self._argued


class ObjectScanner:
    """Finds the end of one JSON object. It follows strings and nesting and checks nothing else."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """Takes characters up to the end of the object; returns how many."""
        for position, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.ended = True
                    return position + 1
        return len(text)


def _unquoted(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text.strip('"')
    return well_formed(value) if isinstance(value, str) else text
