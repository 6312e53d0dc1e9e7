"""The answer to a generation, whole or streamed: what completions and chats have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import orjson
from aiohttp import web

from bequest.engine.types import Usage
from bequest.server.answers.generated_states import GeneratedStates, generated_states
from bequest.server.answers.report import Report, report_of
from bequest.server.answers.running import Collector, collect
from bequest.server.answers.streams import open_stream, send_stream
from bequest.server.answers.usage import usage_object
from bequest.server.answers.whole import written
from bequest.server.asks.ask import Ask
from bequest.server.asks.call import Call, HttpCall
from bequest.server.transport.sse import ChunkFormat
from bequest.server.wire.bodies import SampledBody

Head = dict[str, Any]


def head_of(call: Call[SampledBody], kind: str) -> Head:
    """What an answer, or each of its chunks, begins with."""
    return {
        "id": call.id,
        "object": kind,
        "created": int(time.time()),
        "model": call.model,
        "system_fingerprint": call.context.fingerprint,
    }


class Shape(Protocol):
    """What the choices of an endpoint look like."""

    def chunks(self, head: Head, index: int, report: Report) -> ChunkFormat:
        """The events of the request with this index; `head` is what each of them begins with."""

    def choices(self, results: Sequence[Collector]) -> list[dict[str, Any]] | orjson.Fragment:
        """Of a whole answer."""

    def extras(self, results: Sequence[Collector]) -> dict[str, Any]:
        """What stands beside them."""

    @property
    def thought_tokens(self) -> int | None:
        """Of all choices, once they are made; None: the model shows no thoughts."""


async def answered(call: HttpCall[SampledBody], ask: Ask, head: Head, shape: Shape) -> web.StreamResponse:
    """Runs what is asked for and sends what comes of it."""
    states = generated_states(call.context, ask)
    if call.body.stream:
        return await _streamed(call, ask, head, shape, states)
    results = await collect(call.context.engine, ask.requests)
    answer = partial(_answer, ask, head, shape, results)
    if states is not None:
        return await states.send_whole(call.http, answer(), [result.delivery for result in results], call.headers)
    body = await written(call.context, results, answer)
    return web.Response(body=body, content_type="application/json", headers=call.headers)


async def answer_of(call: Call[SampledBody], ask: Ask, head: Head, shape: Shape) -> bytes:
    """Runs what is asked for; the whole answer as JSON, for whoever keeps it.

    REQUIRES: the body does not ask for a stream.
    """
    states = generated_states(call.context, ask)
    results = await collect(call.context.engine, ask.requests)
    answer = partial(_answer, ask, head, shape, results)
    if states is not None:
        return await states.written(answer(), [result.delivery for result in results])
    return await written(call.context, results, answer)


def _answer(ask: Ask, head: Head, shape: Shape, results: Sequence[Collector]) -> dict[str, Any]:
    # Only a single prompt may have a parent or a lease.
    report, delivery = report_of(ask), results[0].delivery
    choices = shape.choices(results)
    usage = usage_object([result.usage for result in results if result.usage is not None], shape.thought_tokens)
    beside = {**shape.extras(results), **report.continuation(delivery), **report.retained(delivery)}
    return {**head, "choices": choices, "usage": usage, **beside}


async def _streamed(
    call: HttpCall[SampledBody], ask: Ask, head: Head, shape: Shape, states: GeneratedStates | None
) -> web.StreamResponse:
    usage = partial(_usage, shape)
    stream, chunk_head, report = open_stream(call.context, call.body, head, report_of(ask), states, usage)
    counted = call.body.stream_options is not None and call.body.stream_options.continuous_usage_stats
    sources = []
    for index, prompt in enumerate(ask.prompts):
        told = replace(report, prompt_tokens=len(prompt.token_ids)) if counted else report
        sources.append(stream.add_source(shape.chunks(chunk_head, index, told)))
    return await send_stream(call.context.engine, call.http, ask.requests, sources, stream, call.headers)


def _usage(shape: Shape, usages: Sequence[Usage]) -> dict[str, Any]:
    return usage_object(usages, shape.thought_tokens)
