"""Harmony, as gpt-oss writes it: messages to channels.

    <|channel|>analysis<|message|>…<|end|>                                        a thought
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

A prompt ends with `<|start|>assistant`, so an answer begins in a header. What the model says in `commentary` to nobody
is content. The tokens that end an answer (`<|return|>`, `<|call|>`) are not in its text.
"""

from __future__ import annotations

import re

from bequest.engine.dialects.call_reader import Calls
from bequest.engine.dialects.events import AnswerEvent, Content, Stage, Thought, joined
from bequest.engine.dialects.marks import first_of, partial

MESSAGE = "<|message|>"
CHANNEL = "<|channel|>"
START = "<|start|>"
END = "<|end|>"
_ENDS = (END, "<|return|>", "<|call|>", START)
MARKS = (MESSAGE, CHANNEL, "<|constrain|>", *_ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([A-Za-z]+)")
_LONGEST_HEADER = 512


class HarmonyReader:
    """One answer, with its thoughts and its calls. Without `reads_calls` a call is content, without `thinks` a thought
    is."""

    def __init__(
        self, reads_calls: bool, most_calls: int | None = None, only_calls: bool = False, thinks: bool = True
    ) -> None:
        self._reads_calls = reads_calls
        self._thinks = thinks
        self._only_calls = only_calls
        self._most_calls = most_calls
        self._calls = Calls(most_calls)
        self._rest = ""
        self._kind = ""  # of the message that is being read; "": its header is
        self._read = 0  # characters
        self._began = 0  # where the message's header began
        self.spans: list[tuple[int, int]] = []  # of the text, that are thoughts

    @property
    def num_calls(self) -> int:
        return self._calls.num_ended

    @property
    def stage(self) -> Stage:
        if self._kind:
            return "inside" if self._kind == "analysis" else "said"
        return "before"

    def prime(self, text: str) -> None:
        """Takes a beginning of the answer that its prompt has; it is not told again."""
        self.feed(text)
        self._calls = Calls(self._most_calls)
        self._kind = "final" if self._kind == "call" else self._kind
        self._read = self._began = 0
        self.spans = [(0, 0)] if self._kind == "analysis" else []

    def feed(self, text: str) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        self._rest += text
        while self._rest and (self._body(events) if self._kind else self._header(events)):
            pass
        return joined(events)

    def finish(self) -> list[AnswerEvent]:
        """The answer has ended, maybe in the middle of a message."""
        events: list[AnswerEvent] = []
        if self._kind:
            self._tell(events, self._rest)
        elif self._rest and CHANNEL not in self._rest and START not in self._rest and not self._only_calls:
            events.append(Content(self._rest))  # a model that was not taught the format
        self._take(len(self._rest))
        self._end_message(events, whole=False)
        return joined(events)

    def _take(self, count: int) -> None:
        self._rest, self._read = self._rest[count:], self._read + count

    def _header(self, events: list[AnswerEvent]) -> bool:
        at = self._rest.find(MESSAGE)
        if not 0 <= at <= _LONGEST_HEADER:
            plain = len(self._rest) > _LONGEST_HEADER + len(MESSAGE)
            if plain:
                self._kind = "final"
            return plain
        header = self._rest[:at]
        self._begin(header, events)
        self._take(at + len(MESSAGE))
        return True

    def _begin(self, header: str, events: list[AnswerEvent]) -> None:
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        name = channel[1] if channel else "final"
        if recipient is not None and recipient[1] != "assistant" and self._reads_calls:
            self._kind = "call"
            self._calls.begin(recipient[1].removeprefix("functions."))
            self._flush(events)
        elif name == "analysis" and recipient is None and self._thinks:
            self._kind = "analysis"
            self.spans.append((self._began, self._began))
        else:
            self._kind = "final"

    def _body(self, events: list[AnswerEvent]) -> bool:
        found = first_of(self._rest, _ENDS)
        if found is None:
            kept = partial(self._rest, _ENDS)
            self._tell(events, self._rest[: len(self._rest) - kept])
            self._take(len(self._rest) - kept)
            return False
        at, mark = found
        self._tell(events, self._rest[:at])
        self._take(at + (0 if mark == START else len(mark)))
        self._end_message(events, whole=True)
        return True

    def _end_message(self, events: list[AnswerEvent], whole: bool) -> None:
        if self._kind == "analysis":
            self.spans[-1] = (self.spans[-1][0], self._read)
        elif self._kind == "call":
            self._calls.end(whole)
            self._flush(events)
        self._kind, self._began = "", self._read

    def _tell(self, events: list[AnswerEvent], text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._calls.argue(text)
            self._flush(events)
        elif self._kind == "analysis":
            events.append(Thought(text))
        elif not self._only_calls:
            events.append(Content(text))

    def _flush(self, events: list[AnswerEvent]) -> None:
        events += [told for told in self._calls.told if not isinstance(told, str)]
        self._calls.told.clear()
