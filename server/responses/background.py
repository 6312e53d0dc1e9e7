"""Responses that run in the background: their client may leave, come back, and hear the events from any number on."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from contextvars import Context as Variables

import orjson
from aiohttp import web

from bequest.engine.types import Delta
from bequest.server.access.keys import Caller
from bequest.server.answers.running import Job
from bequest.server.context import CONTEXT
from bequest.server.responses import document
from bequest.server.responses.events import ResponseFormat
from bequest.server.responses.making import Making
from bequest.server.stores.responses import EventLog
from bequest.server.transport.opening import HEADERS, KEEP_ALIVE
from bequest.server.wire.errors import ApiError, from_engine, internal

_log = logging.getLogger("bequest.server")


def begin_apart(making: Making, caller: Caller) -> EventLog:
    """Runs it by itself, as one of the caller's requests. Raises what the engine refuses it for."""
    sink = _Sink(making)
    making.running.head = {**making.running.head, "status": "queued"}
    making.running.log = sink.log
    making.running.fail = sink.fail
    context = making.context
    held = ExitStack()
    held.enter_context(Job(context.engine, [making.request], [sink]))
    held.enter_context(making.registered())
    held.enter_context(context.admission.held(caller))
    # Variables of its own: it must not pass for the request that it came with.
    task = asyncio.get_running_loop().create_task(_run(sink, held), context=Variables())
    context.running.tasks.add(task)
    task.add_done_callback(context.running.tasks.discard)
    return sink.log


async def _run(sink: _Sink, held: ExitStack) -> None:
    with held:
        await sink.ended


class _Sink:
    """Writes events for nobody yet, and stores what comes of it, be it a failure."""

    def __init__(self, making: Making) -> None:
        self._making = making
        self._format = ResponseFormat(making.answer, making.finish)
        self._begun = False
        self.log = EventLog()
        self.finished = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, delta: Delta) -> None:
        try:
            self._take(delta)
        except Exception:
            _log.exception("response %s", delta.request_id)
            self.fail(internal(delta.request_id))

    def _take(self, delta: Delta) -> None:
        if self.ended.done():
            return
        if delta.error is not None:
            self.finished = True
            self.fail(from_engine(delta.error))
            return
        opening, self._begun = None if self._begun else delta, True
        ending = delta if delta.usage is not None else None
        self.log.add(self._format.event(delta.choices, opening, ending))
        self._making.running.head = self._making.answer.head
        if ending is not None:
            self.finished = True
            self._end()

    def fail(self, error: ApiError) -> None:
        """Ends it, whether somebody cancelled it or something went wrong."""
        if self.ended.done():
            return
        answer = self._making.answer
        items = answer.items("incomplete")
        if error.code == "response_cancelled":
            response = document.cancelled(answer.head, items)
        else:
            response = document.failed(answer.head, items, error.message)
        self.log.add(self._format.failed(error))
        self._making.store(response, orjson.dumps(response), error.body())
        self._end()

    def _end(self) -> None:
        self.log.close()
        self.ended.set_result(None)


async def follow(http: web.Request, log: EventLog, after: int, headers: dict[str, str]) -> web.StreamResponse:
    """The events behind number `after`, as they come. A client that leaves stops nothing but this."""
    interval = http.app[CONTEXT].config.sse_keep_alive_interval
    seen = after + 1
    response = web.StreamResponse(headers={**HEADERS, **headers})
    await response.prepare(http)
    while True:
        try:
            async with asyncio.timeout(interval or None):
                await log.more(seen)
        except TimeoutError:
            await response.write(KEEP_ALIVE)
            continue
        if events := log.events[seen:]:
            seen += len(events)
            await response.write(b"".join(events))
        elif log.closed:
            return response
