"""/v1/continuations/{id}/estate: all that a request left behind as one file, to take to another server.

Only keys that the key file gives the permission `estates` may do it. Hashing and checking happens in worker threads.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from bequest.engine.formats import estate_file
from bequest.engine.types.estate import Estate
from bequest.server.access.auth import check_permission
from bequest.server.access.marks import CALLER, TENANT
from bequest.server.asks.leases import check_ttl
from bequest.server.context import CONTEXT, Context
from bequest.server.keeping.continuations import entry_object
from bequest.server.transport.intake import BodyLimit, body_chunks, hold, of_caller
from bequest.server.transport.pieces import Piece
from bequest.server.transport.replies import json_response
from bequest.server.transport.sending import send_body
from bequest.server.wire import fields
from bequest.server.wire.errors import ApiError, invalid
from bequest.server.wire.names import check_name

BYTES = "application/octet-stream"
_QUERY = ("ttl",)


class _EstateBody:
    def __init__(self, header: bytes, content: memoryview) -> None:
        self._parts = (header, content)

    @property
    def size(self) -> int:
        return sum(map(len, self._parts))

    def pieces(self) -> Iterator[Piece]:
        yield from self._parts


async def export(http: web.Request) -> web.StreamResponse:
    context, tenant, reference = http.app[CONTEXT], http[TENANT], http.match_info["id"]
    check_permission(http[CALLER], "estates")
    await context.engine.seek(tenant, reference)
    record = context.engine.record(tenant, reference)
    headers = {"Content-Disposition": f'attachment; filename="{record.id}.safetensors"'}
    if http.method == "HEAD":
        return web.Response(content_type=BYTES, headers=headers)
    estate = await context.engine.export_estate(tenant, reference)
    hold(http, estate.content.nbytes)
    header = await context.pool.run(tenant, lambda: estate_file.header_of(estate))
    body = _EstateBody(header, estate_file.content_of(estate))
    return await send_body(http, body, False, BYTES, headers, context.encoder)


async def take_in(http: web.Request) -> web.Response:
    """Leases it under the name of the path; its id stays the one that it had. `?ttl=` says for how long."""
    context, tenant = http.app[CONTEXT], http[TENANT]
    check_head(http, context)
    ttl = _ttl(http, context)
    estate = await _read(http, context)
    record_id = await context.engine.import_estate(tenant, _named(estate, http.match_info["id"]), ttl)
    ignored = fields.ignored_header(name for name in http.query if name not in _QUERY)
    return json_response(entry_object(context.engine.record(tenant, record_id)), ignored)


def check_head(http: web.Request, context: Context) -> None:
    """What can be refused before the body is read."""
    check_permission(http[CALLER], "estates")
    if http.content_type != BYTES:
        shown = http.headers.get("Content-Type", "none")[:100]
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The Content-Type of an estate must be {BYTES}, not {shown}; with curl send it with -H 'Content-Type: "
            f"{BYTES}' and --upload-file.",
        )
    of_caller(http, _limit(context)).check(http.content_length or 0)


def _limit(context: Context) -> BodyLimit:
    most = context.config.max_estate_mb
    return BodyLimit(int(most * 2**20), f"--max-estate-mb {most:g}")


def _ttl(http: web.Request, context: Context) -> float:
    given = http.query.get("ttl")
    if given is None:
        return context.leases.default
    try:
        return check_ttl(float(given), context.leases, "ttl")
    except ValueError:
        raise invalid("`ttl` must be a number of seconds.", "ttl") from None


async def _read(http: web.Request, context: Context) -> Estate:
    data = bytearray()
    async for chunk in body_chunks(http, _limit(context)):
        hold(http, len(data) + len(chunk))
        data += chunk
    return await context.pool.run(http[TENANT], lambda: estate_file.from_bytes(data))


def _named(estate: Estate, name: str) -> Estate:
    """As the path calls it: by its own id, which keeps its name, or by a new name."""
    return estate if name == estate.deed.id else estate.renamed(check_name(name))
