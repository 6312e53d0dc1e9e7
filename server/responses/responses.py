"""POST /v1/responses, streaming or not; POST /v1/responses/input_tokens. What is stored: server/responses/stored.py."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import web

from bequest.engine.types import Delta, Request
from bequest.server.answers.logprobs import Spelling
from bequest.server.answers.report import report_of
from bequest.server.answers.running import Collector, Job
from bequest.server.answers.streams import send_stream
from bequest.server.answers.thought_tokens import ThoughtTokens
from bequest.server.asks.call import Call, HttpCall, begin
from bequest.server.asks.reading import Reading
from bequest.server.asks.terms import record_terms
from bequest.server.asks.tools import Tools, response_tools
from bequest.server.context import Context
from bequest.server.responses.answer import Answer
from bequest.server.responses.asks import Waiting, at_rest, kept_open, response_ask, response_length
from bequest.server.responses.body import check_body
from bequest.server.responses.events import ResponseFormat
from bequest.server.responses.items import without_logprobs
from bequest.server.responses.prompt import ResponsePrompt, response_prompt
from bequest.server.stores.responses import RunningResponse, StoredResponse, Turn
from bequest.server.transport.replies import json_response
from bequest.server.transport.sse import EventStream
from bequest.server.transport.work import apart
from bequest.server.wire.bodies import ResponseBody


async def create(http: web.Request) -> web.StreamResponse:
    call = await _begin(http, "resp_")
    making = await _asked(call, kept_open(call))
    with making.registered():
        if call.body.stream:
            return await making.stream(http, call.headers)
        return json_response(orjson.Fragment(await making.whole()), call.headers)


async def whole_response(call: Call[ResponseBody]) -> bytes:
    """The answer as JSON, for whoever keeps it."""
    await apart(call.context, lambda: check_body(call.body))
    making = await _asked(call, at_rest)
    with making.registered():
        return await making.whole()


async def _asked(call: Call[ResponseBody], waiting: Waiting) -> _Making:
    body = call.body
    reading = Reading(call.context, await _tools(call), template=None)
    asked = await response_ask(call, reading, waiting)
    spelling = Spelling(call.context.text.tokenizer, body.return_tokens_as_token_ids)
    logprobs = asked.ask.params[0].logprobs is not None
    thoughts = ThoughtTokens(call.context.text.tokenizer, reading.shows_special) if reading.shows_thoughts else None
    reader = reading.reader(asked.prompt.prompt)
    answer = Answer(asked.head, report_of(asked.ask), spelling if logprobs else None, reader, thoughts)
    return _Making(call.context, asked.ask.requests[0], asked.prompt, answer, RunningResponse(call.id, asked.head))


async def input_tokens(http: web.Request) -> web.Response:
    """How many tokens the same body would have as its prompt."""
    call = await _begin(http, "req-")
    body = call.body
    reading = Reading(call.context, await _tools(call), template=None)
    terms = record_terms(call, response_length(body).open_ended)
    prompt = await response_prompt(call.context, terms.tenant, body, reading, terms.deadline)
    count = {"object": "response.input_tokens", "input_tokens": len(prompt.prompt.token_ids)}
    return json_response(count, call.headers)


async def _begin(http: web.Request, prefix: str) -> HttpCall[ResponseBody]:
    call = await begin(http, ResponseBody, prefix)
    ignored = await apart(call.context, lambda: check_body(call.body))
    return replace(call, ignored=(*call.ignored, *ignored))


async def _tools(call: Call[ResponseBody]) -> Tools:
    body = call.body
    return await apart(call.context, lambda: response_tools(body.tools, body.tool_choice, body.parallel_tool_calls))


@dataclass(frozen=True, slots=True)
class _Making:
    """A response on its way: run, answered, and stored unless the client does not want that."""

    context: Context
    request: Request
    prompt: ResponsePrompt
    answer: Answer
    running: RunningResponse

    def registered(self) -> AbstractContextManager[None]:
        """While it runs it can be found, if it will be stored."""
        request = self.request
        if not request.terms.keep_record:
            return nullcontext()
        return self.context.running.begin(request.tenant, request.terms.name, self.running)

    async def whole(self) -> bytes:
        """The finished object as JSON."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.fail = lambda error: None if done.done() else done.set_exception(error)
        collector = Collector(done)
        with Job(self.context.engine, [self.request], [collector]):
            await done
        self.answer.begin(collector.delivery)
        self.answer.take(collector.choices[0])
        return self._finish(collector.delivery)[1]

    async def stream(self, http: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        events = ResponseFormat(self.answer, self._finish)
        stream = EventStream(events, self.context.config.sse_keep_alive_interval)
        self.running.fail = stream.fail
        source = stream.add_source(events)
        return await send_stream(self.context.engine, http, [self.request], [source], stream, headers)

    def _finish(self, ending: Delta) -> tuple[dict[str, Any], bytes]:
        """The object, as such and as JSON. It is stored first: the client may come back at once."""
        response = self.answer.finish(ending)
        body = orjson.dumps(response)
        if self.request.terms.keep_record and self.running.keep:
            self.context.stored.put(self._stored(response, body))
        return response, body

    def _stored(self, response: dict[str, Any], body: bytes) -> StoredResponse:
        request, prompt, parent = self.request, self.prompt, self.prompt.parent
        items = orjson.dumps([*prompt.items, *map(without_logprobs, response["output"])])
        return StoredResponse(
            id=request.id,
            name=request.terms.name,
            tenant=request.tenant,
            body=body,
            turn=Turn(None if parent is None else parent.turn, items, len(prompt.items)),
            token_ids=array("i", (*request.prompt_token_ids, *self.answer.token_ids)),
            num_prompt=len(request.prompt_token_ids),
            prompt_text=prompt.text,
            cache_salt=request.cache_salt,
            pieces=self.answer.pieces,
        )
