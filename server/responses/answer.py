"""A response in the making: what its one choice gains becomes items, and at the end an object."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bequest.engine.dialects.events import AnswerEvent, CallArguments, CallBegun, Content
from bequest.engine.dialects.reader import AnswerReader
from bequest.engine.types import ChoiceDelta, Delta, FinishReason, StopReason
from bequest.server.answers.logprobs import Spelling, chat_logprobs
from bequest.server.answers.report import Report
from bequest.server.answers.thought_tokens import ThoughtTokens
from bequest.server.responses import document
from bequest.server.responses.items import Item, output_call, output_message, output_reasoning
from bequest.server.wire.names import new_id
from bequest.server.wire.replicas import tag_of

Kind = Literal["message", "reasoning", "call"]
_PREFIXES: dict[Kind, str] = {"message": "msg_", "reasoning": "rs_", "call": "fc_"}


class _Growing:
    """An item. A call has a name. Its id says which server has it, as that of its response does."""

    def __init__(self, kind: Kind, tag: str | None, name: str = "") -> None:
        self.kind = kind
        self._name = name
        self._id = new_id(_PREFIXES[kind], tag)
        self._call_id = new_id("call_")
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    def shown(self, status: str) -> Item:
        text = "".join(self.text)
        if self.kind == "message":
            return output_message(self._id, text, self.logprobs, status)
        if self.kind == "reasoning":
            return output_reasoning(self._id, text, status)
        return output_call(self._id, self._call_id, self._name, text, status)


@dataclass(frozen=True, slots=True)
class Change:
    """What an item gained. `begins`: it is a new one, and `ends` is the one before it, which is whole."""

    text: str = ""
    logprobs: Sequence[dict[str, Any]] = ()
    begins: Item | None = None
    ends: Item | None = None


class Answer:
    """Gathers what the choice gains. Without a reader it is one message, from the beginning."""

    def __init__(
        self,
        head: dict[str, Any],
        report: Report,
        spelling: Spelling | None,
        reader: AnswerReader | None = None,
        thoughts: ThoughtTokens | None = None,
    ) -> None:
        """`spelling`: how tokens are shown in log-probabilities; None if those were not asked for.

        `thoughts` counts tokens of the thoughts that the reader finds.
        """
        self.head = head
        self._tag = tag_of(head["id"])
        self._report = report
        self._reader = reader
        self._thoughts = thoughts
        self.token_ids: list[int] = []
        self.pieces = array("I")  # characters and log-probabilities of each delta
        self._spelling = spelling
        self._items: list[_Growing] = []
        self._unsent: list[dict[str, Any]] = []  # log-probabilities whose text has not come
        self._finish_reason: FinishReason | None = None
        self._stop_reason: StopReason = None

    def begin(self, opening: Delta) -> None:
        """Takes what the first delivery tells."""
        self.head = {**self.head, **self._report.continuation(opening)}

    def open_message(self) -> list[Change]:
        """The message that a stream begins with, if it cannot begin with anything else."""
        return [] if self._reader is not None or self._items else [self._begin_item(_Growing("message", self._tag))]

    def take(self, choice: ChoiceDelta) -> list[Change]:
        """What there is to show now."""
        self.token_ids += choice.token_ids
        if choice.finish_reason is not None:
            self._finish_reason, self._stop_reason = choice.finish_reason, choice.stop_reason
        if self._spelling is not None:
            self._unsent += chat_logprobs(choice.logprobs or (), self._spelling)["content"]
        changes: list[Change] = []
        for event in self._events(choice):
            if isinstance(event, CallBegun):
                changes.append(self._begin_item(_Growing("call", self._tag, event.name)))
                continue
            kind: Kind = "message" if isinstance(event, Content) else "reasoning"
            if not isinstance(event, CallArguments) and self._last_kind != kind:
                changes.append(self._begin_item(_Growing(kind, self._tag)))
            changes.append(self._grow(event.text))
        if self._reader is not None and self._thoughts is not None:
            self._thoughts.take(choice, self._reader)
        if choice.finish_reason is not None:
            changes += self._end()
        return changes

    def _end(self) -> list[Change]:
        """An answer that ended without a word is an empty message."""
        changes = [] if self._items else [self._begin_item(_Growing("message", self._tag))]
        if self._last_kind == "message":  # its end token has no text
            self._items[-1].logprobs += self._unsent
        return changes

    @property
    def _last_kind(self) -> Kind | None:
        return self._items[-1].kind if self._items else None

    def items(self, status: str) -> list[Item]:
        """The items as they stand; only the last one can be other than complete."""
        return [item.shown("completed" if item is not self._items[-1] else status) for item in self._items]

    def finish(self, ending: Delta) -> dict[str, Any]:
        """The object, with what the last delivery tells."""
        assert ending.usage is not None
        reason = self._finish_reason or "length"
        items = self.items("completed" if reason == "stop" else "incomplete")
        response = document.finished(self.head, items, reason, ending.usage, int(time.time()), self._num_thoughts)
        return {**response, "stop_reason": self._stop_reason, **self._report.retained(ending)}

    @property
    def _num_thoughts(self) -> int:
        return 0 if self._thoughts is None else self._thoughts.total

    def _events(self, choice: ChoiceDelta) -> list[AnswerEvent]:
        if self._reader is None:
            return [Content(choice.text)] if choice.text else []
        ended = choice.finish_reason is not None
        return [*self._reader.feed(choice.text), *(self._reader.finish() if ended else [])]

    def _begin_item(self, item: _Growing) -> Change:
        before = self._items[-1].shown("completed") if self._items else None
        self._items.append(item)
        return Change(begins=item.shown("in_progress"), ends=before)

    def _grow(self, text: str) -> Change:
        item = self._items[-1]
        # Only a message shows log-probabilities; those of a thought's and a call's tokens are nobody's.
        sent, self._unsent = (self._unsent if item.kind == "message" else []), []
        item.text.append(text)
        item.logprobs += sent
        self.pieces.append(len(text))
        self.pieces.append(len(sent))
        return Change(text, sent)
