"""POST /api/chat and /api/generate, streamed unless the client says otherwise."""

from __future__ import annotations

from typing import Any, TypeVar

from aiohttp import web

from bequest.server.answers.running import collect
from bequest.server.answers.streams import send_stream
from bequest.server.asks.ask import Ask
from bequest.server.asks.call import HttpCall
from bequest.server.asks.reading import Reading
from bequest.server.asks.tools import Tools, chat_tools
from bequest.server.doors.ollama.answer import Answer, Lines, loaded
from bequest.server.doors.ollama.asks import chat_ask, generate_ask
from bequest.server.doors.ollama.body import OllamaChatBody, OllamaGenerateBody
from bequest.server.doors.ollama.models import begin_named
from bequest.server.doors.ollama.replies import NDJSON, one_line
from bequest.server.transport.replies import json_response
from bequest.server.transport.sse import EventStream
from bequest.server.transport.work import apart

_Body = TypeVar("_Body", OllamaChatBody, OllamaGenerateBody)


async def chat(http: web.Request) -> web.StreamResponse:
    call = await begin_named(http, OllamaChatBody)
    body = call.body
    if not body.messages:
        return one_line(loaded(call, {"message": {"role": "assistant", "content": ""}}), body.stream, call.headers)
    tools = await apart(call.context, lambda: chat_tools(body.tools, None, None))
    reading = Reading(call.context, tools, template=None)
    return await _answered(call, await chat_ask(call, reading), reading)


async def generate(http: web.Request) -> web.StreamResponse:
    call = await begin_named(http, OllamaGenerateBody)
    body = call.body
    if not body.prompt and not body.suffix:
        return one_line(loaded(call, {"response": ""}), body.stream, call.headers)
    reading = Reading(call.context, Tools(), template=None)
    return await _answered(call, await generate_ask(call, reading), reading)


async def _answered(call: HttpCall[Any], ask: Ask, reading: Reading) -> web.StreamResponse:
    answer = Answer(call, ask, reading)
    engine = call.context.engine
    if not call.body.stream:
        [result] = await collect(engine, ask.requests)
        assert result.usage is not None
        return json_response(answer.whole(result.choices[0], result.usage), call.headers)
    lines = Lines(answer)
    stream = EventStream(lines, keep_alive=0.0)  # a line of JSON has no comments
    source = stream.add_source(lines)
    return await send_stream(engine, call.http, ask.requests, [source], stream, {**call.headers, **NDJSON})
