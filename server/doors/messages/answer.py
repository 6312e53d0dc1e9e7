"""A message in the making: what its one choice gains becomes blocks, and events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from bequest.engine.dialects.events import AnswerEvent, CallArguments, CallBegun, Content
from bequest.engine.dialects.reader import AnswerReader
from bequest.engine.types import ChoiceDelta, FinishReason, StopReason
from bequest.server.answers.thought_tokens import ThoughtTokens
from bequest.server.doors.messages.thinking import Thinking
from bequest.server.wire.names import new_id
from bequest.server.wire.reading import arguments_of

Event = dict[str, Any]
_Kind = Literal["text", "thinking", "tool_use"]


class _Block:
    def __init__(self, kind: _Kind, about: dict[str, Any]) -> None:
        self.kind = kind
        self.about = about  # a call's id and name, a thought's signature
        self.text: list[str] = []

    def shown(self) -> dict[str, Any]:
        text = "".join(self.text)
        if self.kind == "text":
            return {"type": "text", "text": text, "citations": None}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, **self.about}
        return {"type": "tool_use", **self.about, "input": _input(text)}

    def begun(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"input": {}} if self.kind == "tool_use" else {self.kind: ""}
        signed = {"signature": ""} if self.kind == "thinking" else self.about
        return {"type": self.kind, **signed, **empty}

    def delta(self, text: str) -> dict[str, Any]:
        if self.kind == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.kind}_delta", self.kind: text}


def _input(text: str) -> dict[str, Any]:
    """A call's arguments. What a model wrote in vain is told in the form in which Anthropic wants it back."""
    try:
        given = arguments_of(text)
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {"INVALID_JSON": text}


class Answer:
    """Gathers what the choice gains. Without a reader it is one text."""

    def __init__(
        self, signature: str, reader: AnswerReader | None, thinking: Thinking, thoughts: ThoughtTokens | None
    ) -> None:
        """`signature`: what thoughts are signed with, and come back with. `thoughts` counts their tokens."""
        self._signature = signature
        self._reader = reader
        self._thinking = thinking
        self._thoughts = thoughts
        self._blocks: list[_Block] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: StopReason = None

    def take(self, choice: ChoiceDelta) -> list[Event]:
        """What there is to tell of it."""
        events = [event for read in self._read(choice) for event in self._told(read)]
        if self._reader is not None and self._thoughts is not None:
            self._thoughts.take(choice, self._reader)
        if choice.finish_reason is not None:
            self._finish_reason, self._stop_reason = choice.finish_reason, choice.stop_reason
            events += self._end_block()
        return events

    def content(self) -> list[dict[str, Any]]:
        return [block.shown() for block in self._blocks]

    @property
    def num_thoughts(self) -> int:
        """Tokens of the thoughts."""
        return 0 if self._thoughts is None else self._thoughts.total

    def ending(self, shortened: bool) -> dict[str, Any]:
        """Why it ended. `shortened`: the window had no room for all the tokens that were asked for."""
        stop, reason = self._stop_reason, "end_turn"
        if self._finish_reason == "length":
            reason = "model_context_window_exceeded" if shortened and stop != "deadline" else "max_tokens"
        elif isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        elif any(block.kind == "tool_use" for block in self._blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def _read(self, choice: ChoiceDelta) -> list[AnswerEvent]:
        if self._reader is None:
            return [Content(choice.text)] if choice.text else []
        ended = choice.finish_reason is not None
        return [*self._reader.feed(choice.text), *(self._reader.finish() if ended else [])]

    def _told(self, read: AnswerEvent) -> Iterator[Event]:
        if isinstance(read, CallBegun):
            yield from self._begin(_Block("tool_use", {"id": new_id("toolu_"), "name": read.name}))
            return
        kind: _Kind = "text" if isinstance(read, Content) else "thinking"
        if isinstance(read, CallArguments):
            yield self._grown(read.text)
            return
        if kind == "thinking" and not self._thinking.asked:
            return  # nobody wants to see it
        if not self._blocks or self._blocks[-1].kind != kind:
            yield from self._begin(_Block(kind, {"signature": self._signature} if kind == "thinking" else {}))
        if kind == "text" or self._thinking.told:
            yield self._grown(read.text)

    def _begin(self, block: _Block) -> Iterator[Event]:
        yield from self._end_block()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.begun()}

    def _grown(self, text: str) -> Event:
        self._blocks[-1].text.append(text)
        return self._delta(self._blocks[-1].delta(text))

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end_block(self) -> list[Event]:
        if not self._blocks:
            return []
        end = {"type": "content_block_stop", "index": len(self._blocks) - 1}
        if self._blocks[-1].kind != "thinking":
            return [end]
        return [self._delta({"type": "signature_delta", "signature": self._signature}), end]
