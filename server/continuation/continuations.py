"""/v1/continuations: what a tenant's requests left behind, to list, inspect, lease longer and release."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine.types import RecordEntry
from server import fields
from server.context import CONTEXT, TENANT
from server.continuation import leases
from server.errors import ApiError, invalid, missing
from server.generation.generation import json_response
from server.intake import read_with_nulls
from server.wire import shorten

_DEFAULT_LIMIT, _MOST_LISTED = 20, 100
_ORDERS = ("asc", "desc")
_QUERY = ("limit", "after", "order")


async def list_records(request: web.Request) -> web.Response:
    """A page of entries, the youngest first unless `order=asc`; `after` names the last entry of the page before."""
    query = request.query
    limit = _limit(query.get("limit"))
    order = query.get("order", "desc")
    if order not in _ORDERS:
        raise invalid(f"`order` must be asc or desc, not {shorten(repr(order))}.", "order")
    entries = request.app[CONTEXT].engine.records(request[TENANT])
    if order == "desc":
        entries.reverse()
    if "after" in query:
        entries = _after(entries, query["after"])
    page = [_entry(entry) for entry in entries[:limit]]
    answer = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(entries) > limit,
    }
    return json_response(answer, fields.ignored_header(name for name in query if name not in _QUERY))


async def retrieve(request: web.Request) -> web.Response:
    engine = request.app[CONTEXT].engine
    return json_response(_entry(engine.record(request[TENANT], request.match_info["id"])))


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
    return json_response(_entry(context.engine.set_ttl(request[TENANT], request.match_info["id"], ttl)))


async def delete(request: web.Request) -> web.Response:
    """Clients send a Content-Type here, and no body."""
    forgotten = request.app[CONTEXT].engine.forget(request[TENANT], request.match_info["id"])
    return json_response({"id": forgotten, "object": "continuation", "deleted": True})


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT_LIMIT
    if not given.isascii() or not given.isdigit() or len(given) > 9 or not 1 <= int(given) <= _MOST_LISTED:
        raise invalid(f"`limit` must be a number from 1 to {_MOST_LISTED}, not {shorten(repr(given))}.", "limit")
    return int(given)


def _after(entries: list[RecordEntry], reference: str) -> list[RecordEntry]:
    for index, entry in enumerate(entries):
        if reference in (entry.id, entry.name):
            return entries[index + 1 :]
    raise invalid(f"`after` is {shorten(repr(reference))}, which is not in the list (any more).", "after")


def _entry(entry: RecordEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "object": "continuation",
        "request_id": entry.name,
        "created_at": int(entry.created_at),
        "expires_at": None if entry.expires_at is None else int(entry.expires_at),
        "grade": entry.grade,
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
    }
