"""POST /v1/responses, streaming or not; POST /v1/responses/input_tokens. What is stored: server/responses/stored.py."""

from __future__ import annotations

import orjson
from aiohttp import web
from msgspec import structs

from bequest.server.answers.logprobs import Spelling
from bequest.server.answers.report import report_of
from bequest.server.answers.thought_tokens import ThoughtTokens
from bequest.server.asks.call import COUNT_PREFIX, Call, HttpCall, begin
from bequest.server.asks.reading import Reading
from bequest.server.asks.terms import record_terms
from bequest.server.asks.tools import Tools, response_tools
from bequest.server.responses.answer import Answer
from bequest.server.responses.asks import Waiting, at_rest, kept_open, response_ask, response_length
from bequest.server.responses.background import begin_apart, follow
from bequest.server.responses.body import check_body
from bequest.server.responses.making import Making
from bequest.server.responses.prompt import response_prompt
from bequest.server.stores.responses import RunningResponse
from bequest.server.transport.replies import json_response
from bequest.server.transport.work import apart
from bequest.server.wire.bodies import ResponseBody
from bequest.server.wire.errors import unsupported


async def create(http: web.Request) -> web.StreamResponse:
    call = await _begin(http, "resp_")
    making = await _asked(call, kept_open(call))
    if call.body.background:
        return await _in_background(call, making)
    with making.registered():
        if call.body.stream:
            return await making.stream(http, call.headers)
        return json_response(orjson.Fragment(await making.whole()), call.headers)


async def _in_background(call: HttpCall[ResponseBody], making: Making) -> web.StreamResponse:
    """It runs on whether its client stays or not. Who asked for a stream hears it from the beginning."""
    log = begin_apart(making, call.caller)
    if call.body.stream:
        return await follow(call.http, log, after=-1, headers=call.headers)
    return json_response(making.running.head, call.headers)


async def whole_response(call: Call[ResponseBody]) -> bytes:
    """The answer as JSON, for whoever keeps it."""
    if call.body.background:
        raise unsupported("background", "`background` cannot be used in a batch: nobody waits for it. Leave it out.")
    await apart(call.context, lambda: check_body(call.body))
    making = await _asked(call, at_rest)
    with making.registered():
        return await making.whole()


async def _asked(call: Call[ResponseBody], waiting: Waiting) -> Making:
    body = call.body
    reading = Reading(call.context, await _tools(call), template=None)
    asked = await response_ask(call, reading, waiting)
    spelling = Spelling(call.context.text.tokenizer, body.return_tokens_as_token_ids)
    logprobs = asked.ask.params[0].logprobs is not None
    thoughts = ThoughtTokens(call.context.text.tokenizer, reading.shows_special) if reading.shows_thoughts else None
    reader = reading.reader(asked.prompt.prompt)
    answer = Answer(asked.head, report_of(asked.ask), spelling if logprobs else None, reader, thoughts)
    return Making(call.context, asked.ask.requests[0], asked.prompt, answer, RunningResponse(call.id, asked.head))


async def input_tokens(http: web.Request) -> web.Response:
    """How many tokens the same body would have as its prompt."""
    call = await _begin(http, COUNT_PREFIX)
    body = call.body
    reading = Reading(call.context, await _tools(call), template=None)
    terms = record_terms(call, response_length(body).open_ended)
    prompt = await response_prompt(call.context, terms, body, reading, answered=False)
    count = {"object": "response.input_tokens", "input_tokens": len(prompt.prompt.token_ids)}
    return json_response(count, call.headers)


async def _begin(http: web.Request, prefix: str) -> HttpCall[ResponseBody]:
    call = await begin(http, ResponseBody, prefix)
    ignored = await apart(call.context, lambda: check_body(call.body))
    return structs.replace(call, ignored=(*call.ignored, *ignored))


async def _tools(call: Call[ResponseBody]) -> Tools:
    body = call.body
    return await apart(call.context, lambda: response_tools(body.tools, body.tool_choice, body.parallel_tool_calls))
