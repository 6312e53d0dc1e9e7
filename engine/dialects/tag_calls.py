"""Calls in tags, an argument in each pair: a value stands there as it is, and the function's schema says what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bequest.engine.dialects.call_reader import Calls, Functions, Region
from bequest.engine.dialects.marks import first_of, partial
from bequest.engine.dialects.values import json_of_text, properties_of, types_of, written

_BLANK = " \t\r\n"
_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True)
class TagCalls:
    """Each pair of marks stands around what its field says. `name` may end with a blank or the next tag.

    A mark in `begins` that also begins a name, as `<function=`, is for models that leave the outer one out.
    """

    begins: tuple[str, ...]
    end: str
    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    call_end: str

    def opens_bare(self, text: str, functions: Functions) -> bool | None:
        return False

    def region(self, mark: str, functions: Functions) -> Region:
        return _TagRegion(self, mark, functions)


class _TagRegion:
    """Between calls, in a name, between arguments, in a key, or in a value."""

    def __init__(self, syntax: TagCalls, mark: str, functions: Functions) -> None:
        self.ended = False
        self._syntax = syntax
        self._mark = mark
        self._functions = functions
        self._properties: Mapping[str, Any] = {}
        self._state: Literal["between", "name", "arguments", "key", "to_value", "value"] = "between"
        self._alone = mark == syntax.name[0]  # without the outer marks
        if self._alone:
            self._state = "name"
        self._first = True  # nothing is certain yet
        self._key = ""
        self._argument: _Argument | None = None
        self._num_arguments = 0

    def feed(self, text: str, calls: Calls) -> str:
        more = True
        while text and more and not self.ended:
            text, more = self._read(text, calls)
        return text

    def _read(self, text: str, calls: Calls) -> tuple[str, bool]:
        match self._state:
            case "between":
                return self._in_between(text, calls)
            case "name":
                return self._in_name(text, calls)
            case "arguments":
                return self._in_arguments(text, calls)
            case "key":
                return self._in_key(text)
            case "to_value":
                return self._in_to_value(text)
            case "value":
                return self._in_value(text, calls)

    def finish(self, text: str, calls: Calls) -> None:
        if self._first:
            calls.say(self._mark + text)

    # Each returns what is left of the text, and whether more can be read now.

    def _in_between(self, text: str, calls: Calls) -> tuple[str, bool]:
        opening, end = self._syntax.name[0], self._syntax.end
        text = text.lstrip(_BLANK)
        if end and text.startswith(end) and not self._first:
            self.ended = True
            return text[len(end) :], False
        if opening and text.startswith(opening):
            self._state = "name"
            return text[len(opening) :], True
        if not opening and text and self._first and text[0] not in "{[<":
            self._state = "name"
            return text, True
        if any(mark.startswith(text) for mark in (opening, end) if mark):
            return text, False
        return self._no_call(text, calls)

    def _in_name(self, text: str, calls: Calls) -> tuple[str, bool]:
        ends = (self._syntax.name[1],) if self._syntax.name[1] else ("\n", "<")
        at = min((text.find(end) for end in ends if end in text), default=-1)
        if at < 0:
            return (text, False) if len(text) <= _LONGEST_NAME else self._no_call(text, calls)
        name = text[:at].strip()
        if not name or any(char in _BLANK for char in name):
            return self._no_call(text, calls)
        self._first = False
        self._state, self._num_arguments = "arguments", 0
        self._properties = properties_of(self._functions.get(name))
        calls.begin(name)
        return text[at + len(self._syntax.name[1]) :], True

    def _no_call(self, text: str, calls: Calls) -> tuple[str, bool]:
        """Nothing that could be a call follows: the rest of the answer is as it is."""
        self.ended = True
        if self._first:
            calls.say(self._mark)
        return text, False

    def _in_arguments(self, text: str, calls: Calls) -> tuple[str, bool]:
        text = text.lstrip(_BLANK)
        key, end = self._syntax.key[0], self._syntax.call_end
        if text.startswith(key):
            self._state = "key"
            return text[len(key) :], True
        if text.startswith(end):
            if self._num_arguments:
                calls.argue("}")
            calls.end()
            self._state = "between"
            self.ended = self._alone or end == self._syntax.end
            return text[len(end) :], True
        # What stands between arguments is nothing.
        found = first_of(text, (key, end))
        if found is not None:
            return text[found[0] :], True
        kept = partial(text, (key, end))
        return text[len(text) - kept :], False

    def _in_key(self, text: str) -> tuple[str, bool]:
        key, mark, rest = text.partition(self._syntax.key[1])
        if not mark:
            return text, False
        self._key, self._state = key.strip(), "to_value"
        return rest, True

    def _in_to_value(self, text: str) -> tuple[str, bool]:
        opening = self._syntax.value[0]
        if opening:
            text = text.lstrip(_BLANK)
            if not text.startswith(opening):
                if opening.startswith(text):
                    return text, False
                self._state = "arguments"  # a key without a value
                return text, True
        schema = self._properties.get(self._key)
        separator = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._argument = _Argument(f"{separator}{written(self._key)}: ", schema)
        self._state = "value"
        return text[len(opening) :], True

    def _in_value(self, text: str, calls: Calls) -> tuple[str, bool]:
        argument, end = self._argument, self._syntax.value[1]
        assert argument is not None
        value, mark, rest = text.partition(end)
        if mark:
            calls.argue(argument.last(value))
            self._state = "arguments"
            return rest, True
        kept = partial(text, (end, "\n" + end, "\r\n" + end))
        calls.argue(argument.more(text[: len(text) - kept]))
        return text[len(text) - kept :], False


class _Argument:
    """A value as JSON. A string is passed on as it comes; anything else when it is whole.

    One line break at each end belongs to the tags.
    """

    def __init__(self, head: str, schema: Any) -> None:
        self._head = head
        self._schema = schema
        self._streams = types_of(schema) == {"string"}
        self._text = ""  # read and not passed on
        self._begun = False

    def more(self, text: str) -> str:
        self._text += text
        return self._passed(last=False) if self._streams and self._text else ""

    def last(self, text: str) -> str:
        self._text += text
        if self._streams:
            return self._passed(last=True) + '"'
        value = self._text.removeprefix("\n").removesuffix("\n")
        return self._head + json_of_text(value, self._schema)

    def _passed(self, last: bool) -> str:
        opening = "" if self._begun else self._head + '"'
        text = self._text if self._begun else self._text.removeprefix("\n")
        self._begun, self._text = True, ""
        return opening + json.dumps(text.removesuffix("\n") if last else text, ensure_ascii=False)[1:-1]
