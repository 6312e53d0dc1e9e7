"""Calls that are Python: `[look(at="sea"), go(to=[1, 2])]`, or one to a line. A call is told of when all are written:
only then is it known that they are calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bequest.engine.dialects.call_reader import Calls, Functions, Region
from bequest.engine.dialects.values import properties_of, python_value, written

_BARE = re.compile(r"\[\s*\w[\w.\-]*\(")
_MAYBE_BARE = re.compile(r"\[\s*(\w[\w.\-]*)?")
# Names of functions and of arguments, which need not be Python's: `brave-search(from="here")`. Strings are left alone.
# Nothing is searched twice: a model may write what it likes.
_WORD = r"""[^\s()\[\]{},='"]++"""
_NAMES = re.compile(
    r"""(?P<text>"{3}[\s\S]*?(?:"{3}|\Z)|'{3}[\s\S]*?(?:'{3}|\Z)"""
    r"""|"(?:\\[\s\S]|[^"\\])*+(?:"|\\?\Z)|'(?:\\[\s\S]|[^'\\])*+(?:'|\\?\Z))"""
    r"""|(?<![\w.\-])(?P<function>\w[\w.\-]*+)(?=\s*+\()"""
    rf"""|(?P<before>[(,]\s*+)(?P<key>{_WORD}(?: {_WORD})*)(?=\s*+=(?!=))"""
)
_ESCAPED = re.compile(r"\\([\s\S])")
_STAND_IN = re.compile(r"name_([0-9]+)_")
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
    names: list[str] = []
    plain = _NAMES.sub(lambda found: _named(found, names), source.strip())
    for statement in ast.parse(plain).body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("no expression")
        value = statement.value
        for node in value.elts if isinstance(value, ast.List) else [value]:
            yield _call(node, names, functions)


def _named(found: re.Match[str], names: list[str]) -> str:
    """What is found, with a stand-in for a name, which is added to `names`."""
    if found["text"] is not None:
        # JSON has an escape that Python has not.
        return _ESCAPED.sub(lambda escaped: "/" if escaped[1] == "/" else escaped[0], found["text"])
    names.append(found["function"] or found["key"])
    return f"{found['before'] or ''}name_{len(names) - 1}_"


def _call(node: ast.expr, names: Sequence[str], functions: Functions) -> tuple[str, str]:
    """`names`: those that have stand-ins."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("no call")
    name = _name_of(node.func.id, names)
    if name == "print" and name not in functions and len(node.args) == 1:
        return _call(node.args[0], names, functions)  # as some are taught to show what comes back
    listed = list(properties_of(functions.get(name)))
    if len(node.args) > len(listed):
        raise ValueError("an argument without a name")
    arguments = {key: python_value(arg) for key, arg in zip(listed, node.args, strict=False)}
    for keyword in node.keywords:
        arguments[_name_of(keyword.arg, names)] = python_value(keyword.value)
    return name, written(arguments)


def _name_of(given: str | None, names: Sequence[str]) -> str:
    found = _STAND_IN.fullmatch(given or "")
    if found is None or int(found[1]) >= len(names):
        raise ValueError("no name")
    return names[int(found[1])]
