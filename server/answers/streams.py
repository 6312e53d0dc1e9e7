"""Answers that are streamed: from the requests to the connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from bequest.engine.types import Delta, Request, Usage
from bequest.server.answers.chunks import usage_event
from bequest.server.answers.generated_states import GeneratedStates
from bequest.server.answers.report import Report
from bequest.server.answers.running import Job
from bequest.server.answers.usage import usage_object
from bequest.server.context import Context
from bequest.server.interfaces import EngineLike
from bequest.server.transport.sse import Done, EventStream, Source
from bequest.server.wire.bodies import SampledBody


def open_stream(
    context: Context,
    body: SampledBody,
    head: dict[str, Any],
    report: Report,
    states: GeneratedStates | None,
    usage: Callable[[Sequence[Usage]], dict[str, Any]] = usage_object,
) -> tuple[EventStream, dict[str, Any], Report]:
    """A stream, the head of its chunks, and what they report.

    Where a last chunk tells the usage, it tells of the lease too, and the others say that the usage is null. Without
    it the chunk of hidden states is the last.
    """
    keep_alive = context.config.sse_keep_alive_interval
    unleased = replace(report, leased=False)
    if body.stream_options is None or not body.stream_options.include_usage:
        no_usage = Done(lambda endings: b"")
        if states is None:
            return EventStream(no_usage, keep_alive), head, report
        return EventStream(no_usage, keep_alive, partial(states.chunk, head, report)), head, unleased

    def last_event(endings: Sequence[Delta]) -> bytes:
        usages = [ending.usage for ending in endings if ending.usage is not None]
        return usage_event(head, usage(usages), report.retained(endings[-1]))

    chunk_head = {**head, "usage": None}
    chunk = None if states is None else partial(states.chunk, chunk_head, unleased)
    return EventStream(Done(last_event), keep_alive, chunk), chunk_head, unleased


async def send_stream(
    engine: EngineLike,
    http: web.Request,
    requests: Sequence[Request],
    sources: Sequence[Source],
    stream: EventStream,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Runs the requests into the stream. What fails before the first event is raised; cancelled as `collect` is."""
    with Job(engine, requests, sources):
        try:
            await stream.wait_first()
            return await stream.run(http, headers)
        finally:
            stream.release()
