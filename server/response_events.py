"""The events of a response, in their order:

    response.created, response.in_progress, response.output_item.added, response.content_part.added,
    response.output_text.delta …,
    response.output_text.done, response.content_part.done, response.output_item.done,
    response.completed | response.incomplete

A failure in mid-stream is `response.failed`, then `error`. Numbers run from 0 without a gap. What a stream sent is
not kept: it follows from the finished object and the lengths of its deltas, and is made again from them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from engine.types import ChoiceDelta, Delta, FinishReason, StopReason
from server import response_object
from server.errors import ApiError
from server.logprobs import Spelling, chat_logprobs
from server.names import new_id
from server.report import Report
from server.response_items import output_message


class EventWriter:
    """Numbers and formats the events of a response with one message. A plain delta costs two formattings."""

    def __init__(self, item_id: str) -> None:
        self._item_id = item_id
        self._place = {"item_id": item_id, "output_index": 0, "content_index": 0}
        self._next = 0
        kind = "response.output_text.delta"
        place = orjson.dumps({"type": kind, **self._place, "logprobs": []})
        self._plain = f"event: {kind}\ndata: ".encode() + place[:-1] + b',"sequence_number":%d,"delta":%b}\n\n'

    def opening(self, head: dict[str, Any]) -> list[bytes]:
        item = {**output_message(self._item_id, "", [], "in_progress"), "content": []}
        part = output_message(self._item_id, "", [], "")["content"][0]
        shown = orjson.Fragment(orjson.dumps(head))
        return [
            self._event("response.created", response=shown),
            self._event("response.in_progress", response=shown),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=part),
        ]

    def delta(self, text: str, logprobs: Sequence[dict[str, Any]]) -> bytes:
        if logprobs:
            return self._event("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)
        number, self._next = self._next, self._next + 1
        return self._plain % (number, orjson.dumps(text))

    def closing(self, response: dict[str, Any], body: bytes) -> list[bytes]:
        """`body` is the response as JSON."""
        item = response["output"][0]
        part = item["content"][0]
        return [
            self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response['status']}", response=orjson.Fragment(body)),
        ]

    def failure(self, response: dict[str, Any], error: ApiError) -> list[bytes]:
        """Clients look for the one or the other: most do not take `response.failed` for an error."""
        shown = {"code": error.code, "message": error.message, "param": error.param}
        nested = orjson.loads(error.body())["error"]
        return [self._event("response.failed", response=response), self._event("error", **shown, error=nested)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class Answer:
    """A response in the making: gathers what its one choice gains, and ends as an object."""

    def __init__(self, head: dict[str, Any], report: Report, spelling: Spelling | None) -> None:
        """`spelling`: how tokens are shown in log-probabilities; None if those were not asked for."""
        self.head = head
        self.item_id = new_id("msg_")
        self._report = report
        self.token_ids: list[int] = []
        self.pieces = array("I")  # characters and log-probabilities of each delta
        self._spelling = spelling
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._unsent = 0  # log-probabilities at the end whose text has not come
        self._finish_reason: FinishReason | None = None
        self._stop_reason: StopReason = None

    def begin(self, opening: Delta) -> None:
        """Takes what the first delivery tells."""
        self.head = {**self.head, **self._report.continuation(opening)}

    def take(self, choice: ChoiceDelta) -> tuple[str, Sequence[dict[str, Any]]]:
        """Returns the delta to show: its text, empty if there is none yet, and its log-probabilities."""
        self.token_ids += choice.token_ids
        if choice.finish_reason is not None:
            self._finish_reason, self._stop_reason = choice.finish_reason, choice.stop_reason
        if self._spelling is not None:
            shown = chat_logprobs(choice.logprobs or (), self._spelling)["content"]
            self._logprobs += shown
            self._unsent += len(shown)
        if not choice.text:
            return "", ()
        self._text.append(choice.text)
        sent, self._unsent = self._unsent, 0
        self.pieces.append(len(choice.text))
        self.pieces.append(sent)
        return choice.text, self._logprobs[len(self._logprobs) - sent :]

    @property
    def text(self) -> str:
        return "".join(self._text)

    def finish(self, ending: Delta) -> dict[str, Any]:
        """The object, with what the last delivery tells."""
        assert ending.usage is not None
        response = response_object.finished(
            self.head,
            output_message(self.item_id, self.text, self._logprobs, "completed"),
            self._finish_reason or "length",
            ending.usage,
            int(time.time()),
        )
        return {**response, "stop_reason": self._stop_reason, **self._report.retained(ending)}


class ResponseFormat:
    """The events of a streamed response: a ChunkFormat and the stream's Ending."""

    def __init__(self, answer: Answer, finish: Callable[[Delta], tuple[dict[str, Any], bytes]]) -> None:
        """`finish` makes the finished object, as such and as JSON, from the last delivery."""
        self._answer = answer
        self._finish = finish
        self._writer = EventWriter(answer.item_id)

    def event(self, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None) -> bytes:
        if opening is None and ending is None:
            return self._delta(choices)
        events = []
        if opening is not None:
            self._answer.begin(opening)
            events += self._writer.opening(self._answer.head)
        events.append(self._delta(choices))
        if ending is not None:
            events += self._writer.closing(*self._finish(ending))
        return b"".join(events)

    def _delta(self, choices: Sequence[ChoiceDelta]) -> bytes:
        if not choices:
            return b""
        text, logprobs = self._answer.take(choices[0])
        return self._writer.delta(text, logprobs) if text else b""

    def finished(self, endings: Sequence[Delta]) -> bytes:
        return b""  # the last event says so itself

    def failed(self, error: ApiError) -> bytes:
        answer = self._answer
        response = response_object.failed(answer.head, answer.item_id, answer.text, error.message)
        return b"".join(self._writer.failure(response, error))


def replay(body: bytes, pieces: Sequence[int]) -> list[bytes]:
    """The events of a finished response once more, each at the place of its number."""
    response = orjson.loads(body)
    item = response["output"][0]
    part = item["content"][0]
    writer = EventWriter(item["id"])
    events = writer.opening(response_object.begun(response))
    chars = tokens = 0
    for text_len, num_logprobs in zip(pieces[::2], pieces[1::2], strict=True):
        text = part["text"][chars : chars + text_len]
        events.append(writer.delta(text, part["logprobs"][tokens : tokens + num_logprobs]))
        chars, tokens = chars + text_len, tokens + num_logprobs
    return events + writer.closing(response, body)
