"""Reads tool calls out of an answer, whole or piece by piece.

An answer is content and regions. A region begins with a mark of the model's format, or, in some formats, with the
answer itself; what stands in it is the business of the format (`Region`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bequest.engine.dialects.events import AnswerEvent, CallArguments, CallBegun, Content, joined
from bequest.engine.dialects.marks import first_of, partial

# The functions that an answer may call: name → JSON schema of the arguments.
Functions = Mapping[str, Mapping[str, Any]]


class Calls:
    """What a region tells: calls in their order, and what turned out to be none. Those after `most` are left out."""

    def __init__(self, most: int | None) -> None:
        self.num_ended = 0
        self.told: list[AnswerEvent | str] = []  # a string is text that stays text
        self._most = most
        self._named = False
        self._argued = False

    @property
    def full(self) -> bool:
        return self._most is not None and self.num_ended >= self._most

    def begin(self, name: str) -> None:
        self._named, self._argued = True, False
        if not self.full:
            self.told.append(CallBegun(self.num_ended, name))

    def argue(self, text: str) -> None:
        self._argued = self._argued or bool(text)
        if text and not self.full:
            self.told.append(CallArguments(self.num_ended, text))

    def end(self, whole: bool = True) -> None:
        """The call that was begun has ended; one without arguments has empty ones."""
        if whole and not self._argued:
            self.argue("{}")
        self._named = False
        if not self.full:
            self.num_ended += 1

    def cut(self) -> None:
        """The answer has ended in the middle of a call, or in front of one."""
        if self._named:
            self.end(whole=False)

    def say(self, text: str) -> None:
        if not self.full:
            self.told.append(text)


class Region(Protocol):
    ended: bool  # content follows

    def feed(self, text: str, calls: Calls) -> str:
        """Takes what it can. Returns the rest: what has to wait for more, or, once it has ended, what follows it."""

    def finish(self, text: str, calls: Calls) -> None:
        """The answer has ended, and `text` was the rest."""


class CallSyntax(Protocol):
    """How a format marks its calls."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The marks that begin a region."""

    def opens_bare(self, text: str, functions: Functions) -> bool | None:
        """Whether an answer that begins with `text`, without a blank, begins a region; None: not known yet."""

    def region(self, mark: str, functions: Functions) -> Region:
        """`mark`: the one that began it; "": the answer did."""


class CallReader:
    """One answer. What `feed` and `finish` return, put together, does not depend on how the text was cut.

    `only_calls`: the answer was held to calls, so that what is no whole call at its end is a part of one, not content.
    So is what a mark begins behind a call, where the answer's end cuts it. Blanks before and between calls are not
    content.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        functions: Functions | None = None,
        most_calls: int | None = None,
        only_calls: bool = False,
    ) -> None:
        self._syntax = syntax
        self._functions = functions or {}
        self._calls = Calls(most_calls)
        self._only_calls = only_calls
        self._rest = ""  # not read yet: it may be the beginning of a mark
        self._blanks = ""  # content if more follows, nothing before a call
        self._said_something = False
        self._region: Region | None = None
        self._marked = False  # whether a mark began it

    @property
    def num_calls(self) -> int:
        return self._calls.num_ended

    def feed(self, text: str) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        self._rest += text
        while self._rest and (self._read_content(events) if self._region is None else self._read_region(events)):
            pass
        return joined(events)

    def finish(self) -> list[AnswerEvent]:
        """The answer has ended, maybe in the middle of a call."""
        events: list[AnswerEvent] = []
        rest, self._rest = self._rest, ""
        if self._region is not None:
            self._region.finish(rest, self._calls)
            self._calls.cut()
            self._only_calls = self._only_calls or (self._marked and self.num_calls > 0)
            self._tell(events)
        elif rest:
            self._say(events, rest)
        if self._blanks and not self.num_calls and self._region is None:
            events.append(Content(self._blanks))
        return joined(events)

    # Both return whether there is more to read: the rest may have to wait for what follows.

    def _read_content(self, events: list[AnswerEvent]) -> bool:
        rest = self._rest
        if not self._said_something and not self.num_calls:
            stripped = rest.lstrip()
            opens = self._syntax.opens_bare(stripped, self._functions) if stripped else False
            if opens:
                self._begin_region("", stripped)
            if opens is not False:
                return bool(opens)
        found = first_of(rest, self._syntax.begins)
        if found is not None:
            at, mark = found
            if at + len(mark) == len(rest) and any(
                other != mark and other.startswith(rest[at:]) for other in self._syntax.begins
            ):
                return False
            self._say(events, rest[:at])
            self._begin_region(mark, rest[at + len(mark) :])
            return True
        kept = partial(rest, self._syntax.begins)
        self._say(events, rest[: len(rest) - kept])
        self._rest = rest[len(rest) - kept :]
        return False

    def _begin_region(self, mark: str, rest: str) -> None:
        self._region, self._rest = self._syntax.region(mark, self._functions), rest
        self._marked = bool(mark)

    def _read_region(self, events: list[AnswerEvent]) -> bool:
        region = self._region
        assert region is not None
        self._rest = region.feed(self._rest, self._calls)
        self._tell(events)
        if region.ended:
            self._region = None
            self._said_something = True  # what follows is no answer that begins with a call
        return region.ended

    def _tell(self, events: list[AnswerEvent]) -> None:
        for told in self._calls.told:
            if isinstance(told, str):
                self._say(events, told)
            else:
                self._blanks = "" if isinstance(told, CallBegun) else self._blanks
                events.append(told)
        self._calls.told.clear()

    def _say(self, events: list[AnswerEvent], text: str) -> None:
        # What is left out was said, too: it depends on no cut whether the answer begins with a call.
        self._said_something = self._said_something or bool(text.strip())
        whole = "" if self._only_calls else self._blanks + text
        said = whole.rstrip()
        self._blanks = whole[len(said) :]
        if said:
            events.append(Content(said))
