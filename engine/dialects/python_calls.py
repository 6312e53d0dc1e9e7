"""Calls that are Python: `[look(at="sea"), go(to=[1, 2])]`, or one to a line. A call is told of when all are written:
only then is it known that they are calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from bequest.engine.dialects.call_reader import Calls, Functions, Region
from bequest.engine.dialects.values import properties_of, python_value, written

_BARE = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_MAYBE_BARE = re.compile(r"\[\s*([A-Za-z_][\w.]*)?")
_LONGEST = 1 << 16  # characters that are parsed: about 50 ms, for which all others wait


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """`end`: the mark after the calls; "": they are a list, and end with it. `bare`: an answer may be such a list."""

    begins: tuple[str, ...]
    end: str = ""
    bare: bool = False

    def opens_bare(self, text: str, functions: Functions) -> bool | None:
        if not self.bare or not text.startswith("["):
            return False
        if _BARE.match(text):
            return True
        return None if _MAYBE_BARE.fullmatch(text) else False

    def region(self, mark: str, functions: Functions) -> Region:
        return _PythonRegion(self.end, mark, functions)


class _PythonRegion:
    def __init__(self, end: str, mark: str, functions: Functions) -> None:
        self.ended = False
        self._end = end
        self._mark = mark
        self._functions = functions
        self._list_end = _ListEnd()

    def feed(self, text: str, calls: Calls) -> str:
        """Nothing is taken before it is whole. What was searched is not searched again."""
        at = text.find(self._end) if self._end else self._list_end.find(text)
        if at < 0:
            return text
        source = text[:at]
        if not _tell(source, calls, self._functions):
            calls.say(self._mark + source + self._end)
        self.ended = True
        return text[at + len(self._end) :]

    def finish(self, text: str, calls: Calls) -> None:
        """An end that is missing is no fault where the calls are whole."""
        if not _tell(text, calls, self._functions):
            calls.say(self._mark + text)


class _ListEnd:
    """Where the bracket that begins a text is closed."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find(self, text: str) -> int:
        """The position behind it, or -1. REQUIRES: the text only grows."""
        for position in range(self._at, len(text)):
            char = text[position]
            if self._quote:
                if char == self._quote and not self._escaped:
                    self._quote = ""
                self._escaped = char == "\\" and not self._escaped
            elif char in "\"'":
                self._quote = char
            elif char in "[({":
                self._depth += 1
            elif char in "])}":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        self._at = len(text)
        return -1


def _tell(source: str, calls: Calls, functions: Functions) -> bool:
    """Whether the source is calls; then they are told."""
    try:
        found = list(_calls(source, functions))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for name, arguments in found:
        calls.begin(name)
        calls.argue(arguments)
        calls.end()
    return bool(found)


def _calls(source: str, functions: Functions) -> Iterator[tuple[str, str]]:
    if len(source) > _LONGEST:
        raise ValueError("too long")
    for statement in ast.parse(source.strip()).body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("no expression")
        value = statement.value
        for node in value.elts if isinstance(value, ast.List) else [value]:
            yield _call(node, functions)


def _call(node: ast.expr, functions: Functions) -> tuple[str, str]:
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    name = ast.unparse(node.func)
    if name == "print" and name not in functions and len(node.args) == 1:
        return _call(node.args[0], functions)  # as some are taught to show what comes back
    names = list(properties_of(functions.get(name)))
    if len(node.args) > len(names):
        raise ValueError("an argument without a name")
    arguments = {key: python_value(arg) for key, arg in zip(names, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no name")
        arguments[keyword.arg] = python_value(keyword.value)
    return name, written(arguments)
