"""The events of a response, in their order:

    response.created, response.in_progress,
    for each item: response.output_item.added, then
        of a message: response.content_part.added, response.output_text.delta …, response.output_text.done,
            response.content_part.done,
        of a thought: the same with response.reasoning_text.delta and response.reasoning_text.done,
        of a call: response.function_call_arguments.delta …, response.function_call_arguments.done,
        response.output_item.done,
    response.completed | response.incomplete

A failure in mid-stream is `response.failed`, then `error`. Numbers run from 0 without a gap. What a stream sent is
not kept: it follows from the finished object and the lengths of its deltas, and is made again from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from bequest.engine.types import ChoiceDelta, Delta
from bequest.server.responses import document
from bequest.server.responses.answer import Answer, Change
from bequest.server.responses.items import Item, begun_item
from bequest.server.transport.sse import ChunkFormat
from bequest.server.wire.errors import ApiError


class EventWriter:
    """Numbers and formats the events of a response. A plain delta costs two formattings."""

    def __init__(self) -> None:
        self._next = 0
        self._index = -1  # of the item that is being written
        self._item: Item = {}
        self._plain = b""

    def opening(self, head: dict[str, Any]) -> list[bytes]:
        shown = orjson.Fragment(orjson.dumps(head))
        return [self._event("response.created", response=shown), self._event("response.in_progress", response=shown)]

    def begin(self, item: Item) -> list[bytes]:
        """The next item; `item` as it is at its end."""
        self._index += 1
        self._item = item
        added = [self._event("response.output_item.added", output_index=self._index, item=begun_item(item))]
        if item["type"] == "function_call":
            return added
        kind = f"response.{_text_kind(item)}.delta"
        without: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        place = orjson.dumps({"type": kind, **self._place, **without})
        self._plain = f"event: {kind}\ndata: ".encode() + place[:-1] + b',"sequence_number":%d,"delta":%b}\n\n'
        part = {**item["content"][0], "text": "", **without}
        return [*added, self._event("response.content_part.added", **self._place, part=part)]

    def delta(self, text: str, logprobs: Sequence[dict[str, Any]]) -> bytes:
        if self._item["type"] == "function_call":
            return self._event("response.function_call_arguments.delta", **self._place, delta=text)
        if logprobs:
            return self._event("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)
        number, self._next = self._next, self._next + 1
        return self._plain % (number, orjson.dumps(text))

    def end(self, item: Item) -> list[bytes]:
        """The item that was begun last is whole."""
        done = self._event
        if item["type"] == "function_call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            events = [done("response.function_call_arguments.done", **self._place, **told)]
        else:
            part = item["content"][0]
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [
                done(f"response.{_text_kind(item)}.done", **self._place, **told),
                done("response.content_part.done", **self._place, part=part),
            ]
        return [*events, done("response.output_item.done", output_index=self._index, item=item)]

    def closing(self, response: dict[str, Any], body: bytes) -> list[bytes]:
        """`body` is the response as JSON."""
        return [self._event(f"response.{response['status']}", response=orjson.Fragment(body))]

    def failure(self, response: dict[str, Any], error: bytes) -> list[bytes]:
        """Clients look for the one or the other: most do not take `response.failed` for an error."""
        nested = orjson.loads(error)["error"]
        shown = {name: nested[name] for name in ("code", "message", "param")}
        return [self._event("response.failed", response=response), self._event("error", **shown, error=nested)]

    @property
    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._item["id"], "output_index": self._index}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _text_kind(item: Item) -> str:
    return "reasoning_text" if item["type"] == "reasoning" else "output_text"


class ResponseFormat(ChunkFormat):
    """The events of a streamed response: a ChunkFormat and the stream's Ending."""

    def __init__(self, answer: Answer, finish: Callable[[Delta], tuple[dict[str, Any], bytes]]) -> None:
        """`finish` makes the finished object, as such and as JSON, from the last delivery."""
        self._answer = answer
        self._finish = finish
        self._writer = EventWriter()
        self._opened = False

    def event(self, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None) -> bytes:
        events: list[bytes] = []
        if opening is not None:
            self._answer.begin(opening)
            self._opened = True
            events += self._writer.opening(self._answer.head)
            events += self._tell(self._answer.open_message())
        if choices:
            events += self._tell(self._answer.take(choices[0]))
        if ending is not None:
            response, body = self._finish(ending)
            events += self._writer.end(response["output"][-1])
            events += self._writer.closing(response, body)
        return b"".join(events)

    def _tell(self, changes: Sequence[Change]) -> list[bytes]:
        events: list[bytes] = []
        for change in changes:
            if change.begins is not None:
                if change.ends is not None:
                    events += self._writer.end(change.ends)
                events += self._writer.begin(change.begins)
            if change.text:
                events.append(self._writer.delta(change.text, change.logprobs))
        return events

    def finished(self, endings: Sequence[Delta]) -> bytes:
        return b""  # the last event says so itself

    def failed(self, error: ApiError) -> bytes:
        answer = self._answer
        # A stream that has said nothing but that it is alive begins as any other.
        opening = [] if self._opened else self._writer.opening(answer.head)
        response = document.failed(answer.head, answer.items("incomplete"), error.message)
        return b"".join([*opening, *self._writer.failure(response, error.body())])


def failed_at_once(head: dict[str, Any], error: ApiError) -> bytes:
    """The events of a response of which there is nothing to tell but that it failed."""
    writer = EventWriter()
    return b"".join([*writer.opening(head), *writer.failure(document.failed(head, [], error.message), error.body())])


def replay(body: bytes, pieces: Sequence[int], failure: bytes) -> list[bytes]:
    """The events of a finished response once more, each at the place of its number."""
    response = orjson.loads(body)
    writer = EventWriter()
    events = writer.opening(document.begun(response))
    lengths = list(zip(pieces[::2], pieces[1::2], strict=True))
    items, has_failed = response["output"], response["status"] in ("failed", "cancelled")
    for item in items:
        events += writer.begin(item)
        part = {"text": item["arguments"]} if item["type"] == "function_call" else item["content"][0]
        chars = tokens = 0
        while chars < len(part["text"]):
            text_len, num_logprobs = lengths.pop(0)
            logprobs = part.get("logprobs", [])[tokens : tokens + num_logprobs]
            events.append(writer.delta(part["text"][chars : chars + text_len], logprobs))
            chars, tokens = chars + text_len, tokens + num_logprobs
        if not has_failed or item is not items[-1]:  # nobody was told the end of what a failure cut
            events += writer.end(item)
    if has_failed:
        error = failure or _failure(response)
        message = orjson.loads(error)["error"]["message"]
        return events + writer.failure(document.failed(response, items, message), error)
    return events + writer.closing(response, body)


def _failure(response: dict[str, Any]) -> bytes:
    """What ended a response before its end, where a file of an earlier version does not say it."""
    if response["status"] == "cancelled":
        return cancelled(response["id"]).body()
    return ApiError(500, "internal_error", response["error"]["message"]).body()


def cancelled(response_id: str) -> ApiError:
    message = f"Response '{response_id}' was cancelled by another request."
    return ApiError(409, "response_cancelled", message, headers={"x-should-retry": "false"})
