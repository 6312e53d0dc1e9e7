"""Calls whose name stands in front of the arguments, which are a JSON object: `name[ARGS]{…}` and its kin."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from bequest.engine.dialects.call_reader import Calls, Functions, Region
from bequest.engine.dialects.json_calls import JsonRegion
from bequest.engine.dialects.json_scan import ObjectScanner

_LONGEST_HEAD = 512  # characters in front of the arguments


@dataclass(frozen=True, slots=True)
class HeadedCalls:
    """`head` matches what stands in front of the arguments, up to their "{", and has a group `name`.

    `end`: the mark after the last call; "": each region is one call. `lists`: what begins with "[" or "{" is JSON with
    the name in it, as older models of the family write it. `named`: an answer that begins with a line that is the name
    of a function is a call.
    """

    begins: tuple[str, ...]
    head: re.Pattern[str] = field(compare=False)
    end: str = ""
    lists: bool = False
    named: bool = False

    def opens_bare(self, text: str, functions: Functions) -> bool | None:
        if not self.named:
            return False
        line, newline, rest = text.partition("\n")
        if newline:
            return line.strip() in functions and (rest.lstrip()[:1] == "{" if rest.strip() else None)
        return None if any(name.startswith(line) for name in functions) else False

    def region(self, mark: str, functions: Functions) -> Region:
        return _HeadedRegion(self, mark)


class _HeadedRegion:
    def __init__(self, syntax: HeadedCalls, mark: str) -> None:
        self.ended = False
        self._syntax = syntax
        self._mark = mark
        self._json: JsonRegion | None = None
        self._scanner: ObjectScanner | None = None
        self._first = True

    def feed(self, text: str, calls: Calls) -> str:
        if self._first and self._syntax.lists and self._json is None and text.lstrip()[:1] in ("[", "{"):
            self._json = JsonRegion(self._syntax.end)
        if self._json is not None:
            text = self._json.feed(text, calls)
            self.ended = self._json.ended
            return text
        while text and not self.ended:
            if self._scanner is None:
                text, more = self._between_calls(text, calls)
                if not more:
                    break
            else:
                text = self._arguments(self._scanner, text, calls)
        return text

    def finish(self, text: str, calls: Calls) -> None:
        if self._json is not None:
            self._json.finish(text, calls)
        elif self._scanner is None and (self._first or self._syntax.named):
            calls.say((self._mark if self._first else "") + text)

    def _between_calls(self, text: str, calls: Calls) -> tuple[str, bool]:
        """The text without what stands in front of the arguments, and whether more can be read now."""
        end = self._syntax.end
        brace, stop = text.find("{"), text.find(end) if end else -1
        if stop >= 0 and (brace < 0 or stop < brace):
            self.ended = True
            return text[stop + len(end) :], False
        head = self._syntax.head.fullmatch(text[:brace]) if 0 <= brace <= _LONGEST_HEAD else None
        if head is not None:
            calls.begin(head["name"])
            self._scanner, self._first = ObjectScanner(), False
            return text[brace:], True
        if brace < 0 and len(text) <= _LONGEST_HEAD:
            return text, False
        self.ended = True  # nothing that could be a call follows
        if self._first:
            calls.say(self._mark)
        return text, False

    def _arguments(self, scanner: ObjectScanner, text: str, calls: Calls) -> str:
        taken = scanner.feed(text)
        calls.argue(text[:taken])
        if scanner.ended:
            self._scanner = None
            calls.end()
            self.ended = not self._syntax.end and not self._syntax.named
        return text[taken:]


_WORD = r"[\w.\-]+"
# [TOOL_CALLS]name[ARGS]{…}, with an id between them in some releases
MISTRAL_HEAD = re.compile(rf"\s*(?P<name>{_WORD})\s*(\[CALL_ID\][^\[{{]*)?(\[ARGS\])?\s*")
# <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, a fence of JSON; or name<｜tool▁sep｜>
DEEPSEEK_HEAD = re.compile(
    rf"[\s`]*(<｜tool▁call▁end｜>)?\s*<｜tool▁call▁begin｜>\s*(function<｜tool▁sep｜>)?(?P<name>{_WORD})"
    r"(<｜tool▁sep｜>)?\s*(```json)?\s*"
)
KIMI_HEAD = re.compile(
    rf"\s*(<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>\s*(functions\.)?(?P<name>{_WORD}):[0-9]+\s*"
    r"<\|tool_call_argument_begin\|>\s*"
)
NAME_LINE = re.compile(rf"\s*(?P<name>{_WORD})\s*\n\s*")
