"""GET and DELETE /v1/responses/{id}, its input items, and POST …/cancel.

Another tenant's response is not found, exactly as one that never was.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import orjson
from aiohttp import web

from bequest.engine.errors import ParentNotFound
from bequest.server.access.marks import TENANT
from bequest.server.context import CONTEXT
from bequest.server.responses.background import follow
from bequest.server.responses.events import cancelled, replay
from bequest.server.stores.responses import RunningResponse, StoredResponse
from bequest.server.transport.opening import HEADERS
from bequest.server.transport.replies import json_response
from bequest.server.wire import fields
from bequest.server.wire.errors import ApiError, invalid
from bequest.server.wire.paging import QUERY, integer, page_of
from bequest.server.wire.reading import shorten


async def retrieve(http: web.Request) -> web.StreamResponse:
    """The object; with `stream=true` the events that made it. One that still runs shows how it stands."""
    streamed = _flag(http, "stream")
    after = integer(http.query, "starting_after", -1, -1)
    if not streamed and "starting_after" in http.query:
        raise invalid("`starting_after` is of a stream: send `stream=true` beside it.", "starting_after")
    found = await _sought(http)
    if isinstance(found, RunningResponse):
        if not streamed:
            return json_response(found.head)
        if found.log is not None:
            _check_told(after, len(found.log.events), "so far")
            return await follow(http, found.log, after, {})
        await found.ended.wait()
        found = _stored(http)
    if not streamed:
        return json_response(orjson.Fragment(found.body))
    told = replay(found.body, found.pieces, found.failure)
    _check_told(after, len(told), "in all")
    return web.Response(body=b"".join(told[after + 1 :]), headers=HEADERS)


async def delete(http: web.Request) -> web.Response:
    """Its tokens go as well, and the KV, unless others hold it. One that runs goes on for its client, and is not
    stored; in the background it has none, and ends."""
    context, tenant, found = http.app[CONTEXT], http[TENANT], await _sought(http)
    if isinstance(found, RunningResponse):
        found.keep = False
        if found.log is not None:
            found.fail(cancelled(found.id))
    else:
        context.stored.delete(tenant, found.id)
    with suppress(ParentNotFound):
        context.engine.forget(tenant, found.id)
        await context.engine.written()  # as of /v1/continuations
    return json_response({"id": found.id, "object": "response", "deleted": True})


async def cancel(http: web.Request) -> web.Response:
    """Ends one that runs; whoever waits for it is told. One that was cancelled in the background is shown again."""
    found = await _sought(http)
    if isinstance(found, RunningResponse):
        found.fail(cancelled(found.id))
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # it ends at once, unless its client does not read
                await found.ended.wait()
        kept = http.app[CONTEXT].stored.get(http[TENANT], found.id)
        if kept is None:
            return json_response({**found.head, "status": "cancelled"})
        found = kept
    if orjson.loads(found.body)["status"] == "cancelled":
        return json_response(orjson.Fragment(found.body))
    raise invalid(f"Response '{found.id}' has ended and cannot be cancelled: only one that runs can be.", None)


async def input_items(http: web.Request) -> web.Response:
    """Everything the answer was made from, the ancestors' items included."""
    await _sought(http)
    page = page_of(http.query, _stored(http).turn.input_items(), lambda item: (item["id"],), lambda item: item)
    return json_response(page, fields.ignored_header(name for name in http.query if name not in QUERY))


async def _sought(http: web.Request) -> StoredResponse | RunningResponse:
    """Also one that a server left which has ended."""
    await http.app[CONTEXT].seek_response(http[TENANT], http.match_info["id"])
    return _found(http)


def _check_told(after: int, count: int, when: str) -> None:
    """Nobody has been told an event that is not there: who asks what follows it has another response in mind, and would
    hear an end without a word. What follows the last one is nothing, though."""
    if after >= count:
        raise invalid(
            f"`starting_after` is {after}, but the response has {count} events {when}, counted from 0: send the "
            "`sequence_number` of the last one that came, or leave it out to hear all of them.",
            "starting_after",
        )


def _found(http: web.Request) -> StoredResponse | RunningResponse:
    """What is stored has ended, even if its client has not read it to the end."""
    context, tenant, reference = http.app[CONTEXT], http[TENANT], http.match_info["id"]
    found = context.stored.get(tenant, reference) or context.running.get(tenant, reference)
    if found is None:
        message = f"Response with id '{shorten(reference, 100)}' not found."
        raise ApiError(404, "response_not_found", message, absent=reference)
    return found


def _stored(http: web.Request) -> StoredResponse:
    found = _found(http)
    if isinstance(found, RunningResponse):
        raise invalid(f"Response '{found.id}' still runs: its items can be listed when it has ended.", None)
    return found


def _flag(http: web.Request, name: str) -> bool:
    value = http.query.get(name, "false")
    if value not in ("true", "false"):
        raise invalid(f"`{name}` must be true or false, not {shorten(repr(value))}.", name)
    return value == "true"
