"""Gemma 4's calls: `<|tool_call>call:look{at:<|"|>sea<|"|>,deep:true}<tool_call|>`. Told of when they are whole."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from bequest.engine.dialects.call_reader import Calls, Functions, Region
from bequest.engine.dialects.values import no_number, written

_HEAD = re.compile(r"\s*call:(?P<name>[\w.\-]+)\s*(?=\{)")
_PLAIN = re.compile(r"[^,\]}]*")
_KEY = re.compile(r"\s*([^:,{}\[\]]+?)\s*:")
_DEEPEST = 64
_DECODER = json.JSONDecoder()
_PYTHON_NAMES = {"True": True, "False": False, "None": None}  # as its template writes them


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    begins: tuple[str, ...] = ("<|tool_call>",)
    end: str = "<tool_call|>"
    quote: str = '<|"|>'

    def opens_bare(self, text: str, functions: Functions) -> bool | None:
        return False

    def region(self, mark: str, functions: Functions) -> Region:
        return _GemmaRegion(self, mark)


class _GemmaRegion:
    def __init__(self, syntax: GemmaCalls, mark: str) -> None:
        self.ended = False
        self._syntax = syntax
        self._mark = mark

    def feed(self, text: str, calls: Calls) -> str:
        source, end, rest = text.partition(self._syntax.end)
        if not end:
            return text
        if not self._tell(source, calls):
            calls.say(self._mark + source + end)
        self.ended = True
        return rest

    def finish(self, text: str, calls: Calls) -> None:
        if not self._tell(text, calls):
            calls.say(self._mark + text)

    def _tell(self, source: str, calls: Calls) -> bool:
        head = _HEAD.match(source)
        if head is None:
            return False
        reader = _Values(source, head.end(), self._syntax.quote)
        try:
            arguments = reader.value(0)
        except ValueError:
            return False
        if source[reader.at :].strip():
            return False
        calls.begin(head["name"])
        calls.argue(written(arguments))
        calls.end()
        return True


class _Values:
    """Reads a value after the other. Raises ValueError for what is none."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self.at = at
        self._text = text
        self._quote = quote

    def value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("nested too deep")
        self._skip_blanks()
        for opening, read in (("{", self._object), ("[", self._list)):
            if self._take(opening):
                return read(depth + 1)
        if self._take(self._quote):
            end = self._text.find(self._quote, self.at)
            if end < 0:
                raise ValueError("a string without end")
            value, self.at = self._text[self.at : end], end + len(self._quote)
            return value
        if self._text.startswith('"', self.at):
            return self._json_string()
        return self._plain()

    def _json_string(self) -> str:
        """As a grammar writes the inside of objects."""
        value, self.at = _DECODER.raw_decode(self._text, self.at)
        return str(value)

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._closes("}", bool(found)):
            key = self._key()
            found[key] = self.value(depth)
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._closes("]", bool(found)):
            found.append(self.value(depth))
        return found

    def _closes(self, bracket: str, more: bool) -> bool:
        self._skip_blanks()
        if self._take(bracket):
            return True
        if more and not self._take(","):
            raise ValueError("no comma")
        return False

    def _key(self) -> str:
        self._skip_blanks()
        if self._text.startswith((self._quote, '"'), self.at):
            key = str(self.value(_DEEPEST))
            self._skip_blanks()
            if not self._take(":"):
                raise ValueError("no colon")
            return key
        match = _KEY.match(self._text, self.at)
        if match is None:
            raise ValueError("no key")
        self.at = match.end()
        return match[1]

    def _plain(self) -> Any:
        match = _PLAIN.match(self._text, self.at)
        text = match[0].strip() if match else ""
        if not text:
            raise ValueError("no value")
        self.at += len(match[0]) if match else 0
        try:
            value = json.loads(text, parse_constant=no_number)
        except ValueError:
            return _PYTHON_NAMES.get(text, text)
        return text if isinstance(value, float) and math.isinf(value) else value

    def _take(self, mark: str) -> bool:
        if not self._text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def _skip_blanks(self) -> None:
        while self.at < len(self._text) and self._text[self.at].isspace():
            self.at += 1
