"""/v1/continuations: what a tenant's requests left behind, to list, inspect, lease longer and release."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from aiohttp import web

from bequest.engine.errors import InsufficientRetention, ParentNotFound, RetentionTooLarge
from bequest.engine.types import RecordEntry
from bequest.engine.types.record import GroupEntry
from bequest.server.access.marks import TENANT
from bequest.server.asks import leases
from bequest.server.context import CONTEXT
from bequest.server.interfaces import EngineLike
from bequest.server.transport.intake import read_with_nulls
from bequest.server.transport.replies import json_response
from bequest.server.wire import fields
from bequest.server.wire.errors import ApiError, from_engine, missing
from bequest.server.wire.paging import QUERY, cut_page, page_object
from bequest.server.wire.reading import shorten


async def list_records(request: web.Request) -> web.Response:
    """Looks at the records of the page alone, and lets others in between: one may have many choices."""
    engine, tenant = request.app[CONTEXT].engine, request[TENANT]
    page, more = cut_page(request.query, engine.record_names(tenant), lambda names: names)
    data = []
    for record_id, _ in page:
        with suppress(ParentNotFound):  # it went while the others were looked at
            data.append(entry_object(engine.record(tenant, record_id)))
        await asyncio.sleep(0)
    ignored = fields.ignored_header(name for name in request.query if name not in QUERY)
    return json_response(page_object(data, more), ignored)


async def retrieve(request: web.Request) -> web.Response:
    engine, tenant, reference = await _sought(request)
    return json_response(entry_object(engine.record(tenant, reference)))


async def change(request: web.Request) -> web.Response:
    """`{"ttl": seconds}` leases, counting from now; `{"ttl": null}` ends the lease."""
    context = request.app[CONTEXT]
    body = await read_with_nulls(request, context)
    for name in body:
        if name != "ttl":
            message = f"`{shorten(name)}` is not a parameter of this endpoint, which takes `ttl` alone."
            raise ApiError(400, "unknown_parameter", message, param=shorten(name))
    if "ttl" not in body:
        raise missing("ttl", "`ttl` is missing: send a number of seconds, or null to end the lease.")
    ttl = None if body["ttl"] is None else leases.check_ttl(body["ttl"], context.leases, "ttl")
    engine, tenant, reference = await _sought(request)
    try:
        entry = engine.set_ttl(tenant, reference, ttl)
    except (InsufficientRetention, RetentionTooLarge) as error:
        failed = from_engine(error)
        failed.param = "ttl"  # which asks for here what `retain` asks for elsewhere
        raise failed from error
    await engine.written()  # a process that ends now must not bring the old end back
    return json_response(entry_object(entry))


async def prefetch(request: web.Request) -> web.Response:
    """The bytes of a lease in files are read before its children come."""
    engine, tenant, reference = await _sought(request)
    return json_response(entry_object(engine.prefetch(tenant, reference)), status=202)


async def delete(request: web.Request) -> web.Response:
    """Clients send a Content-Type here, and no body."""
    engine, tenant, reference = await _sought(request)
    forgotten = engine.forget(tenant, reference)
    await engine.written()  # a process that ends now must not bring it back
    return json_response({"id": forgotten, "object": "continuation", "deleted": True})


async def _sought(request: web.Request) -> tuple[EngineLike, str, str]:
    """The engine, which knows what the path names if the store does; the tenant, and the name."""
    engine, tenant, reference = request.app[CONTEXT].engine, request[TENANT], request.match_info["id"]
    await engine.seek(tenant, reference)
    return engine, tenant, reference


def entry_object(entry: RecordEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "object": "continuation",
        "request_id": entry.name,
        "created_at": int(entry.created_at),
        "expires_at": None if entry.expires_at is None else int(entry.expires_at),
        "grade": entry.grade,
        "adapter": entry.adapter,
        "parent": entry.parent,
        "at": entry.at,
        "children": entry.children,
        "choices": [
            {
                "index": choice.index,
                "tokens": choice.tokens,
                "blocks": choice.blocks,
                "shared_blocks": choice.shared_blocks,
            }
            for choice in entry.choices
        ],
        "groups": [_group_object(group) for group in entry.groups],
    }


def _group_object(group: GroupEntry) -> dict[str, Any]:
    """By what layers see: all tokens, a window of them, or a state that stands for all before."""
    if group.kind == "state":
        return {"kind": "state", "states": group.blocks, "bytes": group.num_bytes}
    window = {} if group.window is None else {"window": group.window}
    return {"kind": group.kind, **window, "blocks": group.blocks, "bytes": group.num_bytes}
