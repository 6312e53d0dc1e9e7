"""POST /v1/messages, streaming or not; POST /v1/messages/count_tokens.

The events of a stream, in their order:

    message_start, ping, for each block: content_block_start, content_block_delta …, content_block_stop,
    message_delta, message_stop

A failure in mid-stream is `error`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from bequest.engine.types import ChoiceDelta, Delta, Usage
from bequest.server.answers.report import report_of
from bequest.server.answers.running import collect
from bequest.server.answers.streams import send_stream
from bequest.server.answers.thought_tokens import ThoughtTokens
from bequest.server.asks.call import COUNT_PREFIX, HttpCall, begin
from bequest.server.asks.reading import Reading
from bequest.server.doors.messages.answer import Answer, Event
from bequest.server.doors.messages.asks import MessageAsk, message_ask
from bequest.server.doors.messages.body import CountTokensBody, MessagesBody
from bequest.server.doors.messages.caching import CacheWriter
from bequest.server.doors.messages.errors import error_event
from bequest.server.doors.messages.known_turns import KNOWN_TURNS
from bequest.server.doors.messages.prompt import count_tokens as counted
from bequest.server.doors.messages.thinking import thinking_of
from bequest.server.doors.messages.tools import message_tools
from bequest.server.transport.replies import json_response
from bequest.server.transport.sse import ChunkFormat, EventStream
from bequest.server.transport.work import apart
from bequest.server.wire.errors import ApiError


async def create(http: web.Request) -> web.StreamResponse:
    call = await begin(http, MessagesBody, "msg_")
    reading = await _reading(call)
    thinking = thinking_of(call.body, reading)
    asked = await message_ask(call, reading, thinking)
    context, request = call.context, asked.ask.requests[0]
    counts = ThoughtTokens(context.text.tokenizer, reading.shows_special) if reading.shows_thoughts else None
    answer = Answer(call.id, reading.reader(asked.prompt.prompt), thinking, counts)
    making = _Making(call, asked, answer, CacheWriter(context, request, asked.prompt.to_cache))
    if request.terms.keep_record:
        http.app[KNOWN_TURNS].put(call.tenant, asked.prompt.digest, call.id)
    headers = {**call.headers, "request-id": call.id}
    if not call.body.stream:
        return json_response(await making.whole(), headers)
    events = MessageFormat(making)
    stream = EventStream(events, context.config.sse_keep_alive_interval)
    source = stream.add_source(events)
    return await send_stream(context.engine, http, [request], [source], stream, headers)


async def count_tokens(http: web.Request) -> web.Response:
    """How many tokens the same body would have as its prompt."""
    call = await begin(http, CountTokensBody, COUNT_PREFIX)
    reading = await _reading(call)
    known, thinking = http.app[KNOWN_TURNS], thinking_of(call.body, reading)
    count = await counted(call.context, call.tenant, call.body, reading, thinking, known)
    return json_response({"input_tokens": count}, call.headers)


async def _reading(call: HttpCall[MessagesBody] | HttpCall[CountTokensBody]) -> Reading:
    tools = await apart(call.context, lambda: message_tools(call.body))
    return Reading(call.context, tools, template=None)


@dataclass(frozen=True, slots=True)
class _Making:
    """A message on its way."""

    call: HttpCall[MessagesBody]
    asked: MessageAsk
    answer: Answer
    cache: CacheWriter

    async def whole(self) -> dict[str, Any]:
        [result] = await collect(self.call.context.engine, self.asked.ask.requests)
        self.cache.write()
        self.answer.take(result.choices[0])
        assert result.usage is not None
        report, delivery = report_of(self.asked.ask), result.delivery
        return {
            **self.head(result.usage),
            "content": self.answer.content(),
            **self.answer.ending(self.asked.shortened),
            **report.continuation(delivery),
            **report.retained(delivery),
        }

    def head(self, usage: Usage) -> dict[str, Any]:
        """The object before anything is known of the answer."""
        return {
            "id": self.call.id,
            "type": "message",
            "role": "assistant",
            "model": self.call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(usage),
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        told = {**self.cache.usage(usage), "service_tier": "standard"}
        if self.call.body.thinking is not None:
            told["output_tokens_details"] = {"thinking_tokens": self.answer.num_thoughts}
        return told

    def first_usage(self, opening: Delta) -> Usage:
        """As far as the first delivery tells."""
        if opening.usage is not None:
            return opening.usage
        written = sum(len(choice.token_ids) for choice in opening.choices)
        return Usage(len(self.asked.prompt.prompt.token_ids), written, opening.cached_tokens)


class MessageFormat(ChunkFormat):
    """The events of a streamed message: a ChunkFormat and the stream's Ending."""

    def __init__(self, making: _Making) -> None:
        self._making = making

    def event(self, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None) -> bytes:
        making, events = self._making, list[Event]()
        if opening is not None:
            # After the delivery, which the engine is in the middle of.
            asyncio.get_running_loop().call_soon(making.cache.write)
            head = making.head(making.first_usage(opening))
            told = report_of(making.asked.ask).continuation(opening)
            events += [{"type": "message_start", "message": {**head, **told}}, {"type": "ping"}]
        if choices:
            events += making.answer.take(choices[0])
        if ending is not None:
            events += self._end(ending)
        return b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), orjson.dumps(e)) for e in events)

    def _end(self, ending: Delta) -> list[Event]:
        making = self._making
        assert ending.usage is not None
        told = report_of(making.asked.ask).retained(ending)
        delta = making.answer.ending(making.asked.shortened)
        last = {"type": "message_delta", "delta": delta, "usage": making.usage(ending.usage), **told}
        return [last, {"type": "message_stop"}]

    def finished(self, endings: Sequence[Delta]) -> bytes:
        return b""  # the last event says so itself

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)
