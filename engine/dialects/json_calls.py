"""Calls that are JSON objects, with the name and the arguments in them: alone, in a list, or one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.dialects.call_reader import Calls, Functions
from bequest.engine.dialects.json_scan import CallScanner

_BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`end`: the mark after a region; "": there is none. `bare`: an answer that begins with "{" is a call."""

    begins: tuple[str, ...]
    end: str = ""
    bare: bool = False

    def opens_bare(self, text: str, functions: Functions) -> bool | None:
        return self.bare and text.startswith("{")

    def region(self, mark: str, functions: Functions) -> JsonRegion:
        return JsonRegion(self.end, bare=not mark)


class JsonRegion:
    def __init__(self, end: str, bare: bool = False) -> None:
        self.ended = False
        self._end = end
        self._bare = bare
        self._scanner: CallScanner | None = None
        self._begun = False  # the scanner's call was told of
        self._closed = False  # the list of calls; its bracket may be gone from the text

    def feed(self, text: str, calls: Calls) -> str:
        while text and not self.ended:
            if self._scanner is None:
                text, more = self._between_calls(text)
                if not more:
                    break
                continue
            text = text[self._scanner.feed(text) :]
            self._tell(self._scanner, calls)
            if self._scanner.ended:
                self._end_call(calls)
        return text

    def finish(self, text: str, calls: Calls) -> None:
        if self._scanner is not None:
            self._end_call(calls)

    def _between_calls(self, text: str) -> tuple[str, bool]:
        """The text without what separates calls, and whether more can be read now."""
        end, text = self._end, text if self._closed else text.lstrip(_BLANK + ",;[")
        if text.startswith("{") and not self._closed:
            self._scanner, self._begun = CallScanner(), False
            return text, True
        behind = text.lstrip("]" + _BLANK)
        self._closed = self._closed or (text.startswith("]") and not self._bare)
        if end and behind.startswith(end):
            self.ended = True
            return behind[len(end) :], False
        waits = text in "]" if self._bare else not behind
        if waits or (end and end.startswith(behind)):
            return (text if self._bare else behind), False
        # Nothing that could be a call follows: the rest of the answer is as it is.
        self.ended = True
        return (text if self._bare else behind), False

    def _tell(self, scanner: CallScanner, calls: Calls) -> None:
        """What is known of the call by now."""
        if scanner.name is None:
            return
        if not self._begun:
            self._begun = True
            calls.begin(scanner.name)
        calls.argue(scanner.take_arguments())

    def _end_call(self, calls: Calls) -> None:
        scanner, self._scanner = self._scanner, None
        assert scanner is not None
        if self._begun:
            calls.end(whole=scanner.ended)
        else:
            calls.say("".join(scanner.raw))  # an object without a name is no call
