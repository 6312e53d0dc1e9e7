"""/v1/catalogues: sets of items that answers can be bound to, to upload, list, inspect and delete.

Three forms of upload: JSON for small ones; JSON lines, which are parsed as they come; and an array of token ids, which
is read into one buffer that the catalogue is built from. The event loop only moves bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web
from multidict import MultiMapping

from bequest.server.access.marks import TENANT
from bequest.server.context import CONTEXT, Context
from bequest.server.keeping.items import LONGEST_ITEM, ItemList, Vocabulary, build_array, parse_body
from bequest.server.stores.catalogues import StoredCatalogue, Upload, stored
from bequest.server.transport.intake import BodyLimit, body_chunks, of_caller
from bequest.server.transport.replies import json_response
from bequest.server.wire import fields
from bequest.server.wire.errors import ApiError, invalid, missing
from bequest.server.wire.names import is_name
from bequest.server.wire.reading import shorten

JSON, LINES, ARRAY = "application/json", "application/x-ndjson", "application/octet-stream"
_JSON_BYTES = 4 << 20  # parsing holds the interpreter: the other forms are for large ones
_PIECE_BYTES = 1 << 16  # of JSON lines, parsed at once
_LONGEST_LINE = 1 << 20
_QUERY = ("name", "replace", "width")


@dataclass(frozen=True, slots=True)
class _Query:
    """What an upload says of itself beside its body."""

    name: str | None
    replace: bool
    width: int | None


async def upload(http: web.Request) -> web.Response:
    context, tenant = http.app[CONTEXT], http[TENANT]
    check_head(http, context)
    store, query = context.catalogues, _query(http.query)
    if query.name is not None and not query.replace:
        store.check_free(tenant, query.name)
    with store.uploading(http.content_length) as room:
        body = _charged(body_chunks(http, _limit(http, context)), room)
        if http.content_type == JSON:
            catalogue = await _from_json(context, tenant, query.name, body)
        else:
            name = _required(query.name)
            read = _from_lines if http.content_type == LINES else _from_array
            catalogue = await read(context, tenant, name, query.width, body)
        store.put(tenant, catalogue, room, query.replace)
    return json_response(_object(catalogue), fields.ignored_header(name for name in http.query if name not in _QUERY))


async def list_catalogues(http: web.Request) -> web.Response:
    found = http.app[CONTEXT].catalogues.of(http[TENANT])
    return json_response({"object": "list", "data": [_object(catalogue) for catalogue in found]})


async def retrieve(http: web.Request) -> web.Response:
    return json_response(_object(http.app[CONTEXT].catalogues.find(http[TENANT], http.match_info["name"])))


async def delete(http: web.Request) -> web.Response:
    """Requests that use it go on."""
    name = http.match_info["name"]
    http.app[CONTEXT].catalogues.delete(http[TENANT], name)
    return json_response({"id": name, "name": name, "object": "catalogue", "deleted": True})


def check_head(http: web.Request, context: Context) -> None:
    """What can be refused before the body is read."""
    if "Content-Type" not in http.headers or http.content_type not in (JSON, LINES, ARRAY):
        shown = http.headers.get("Content-Type", "none")[:100]
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The Content-Type of a catalogue must be {JSON}, {LINES} or {ARRAY}, not {shown}; with curl add "
            f"-H 'Content-Type: …'.",
        )
    query = _query(http.query)
    if http.content_type == ARRAY:
        _check_width(query.width, None if "Content-Encoding" in http.headers else http.content_length)
    elif query.width is not None:
        raise invalid(f"`width` is of an array ({ARRAY}), and this body is {http.content_type}: leave it out.", "width")
    if http.content_type != JSON:
        _required(query.name)
    of_caller(http, _limit(http, context)).check(http.content_length or 0)


def _limit(http: web.BaseRequest, context: Context) -> BodyLimit:
    if http.content_type == JSON:
        return BodyLimit(_JSON_BYTES, f"as JSON; send a larger catalogue as JSON lines ({LINES}) or as {ARRAY}")
    most = context.config.max_catalogue_mb
    return BodyLimit(int(most * 2**20), f"--max-catalogue-mb {most:g}")


# --- the three forms ---------------------------------------------------------------------------------------------


async def _from_json(context: Context, tenant: str, name: str | None, body: AsyncIterator[bytes]) -> StoredCatalogue:
    data = await _whole(body)

    def work() -> StoredCatalogue:
        given = parse_body(data)
        called = _required(_agreed(given.name, name))
        if given.items is None:
            raise missing("items", "`items` is missing: a list of texts, or of lists of token ids.")
        items = ItemList(_vocabulary(context))
        items.add(given.items)
        return stored(called, items.build())

    return await context.builder.run(tenant, work)


async def _from_lines(
    context: Context, tenant: str, name: str, width: int | None, body: AsyncIterator[bytes]
) -> StoredCatalogue:
    items = ItemList(_vocabulary(context))
    waiting = bytearray()
    async for data in body:
        waiting += data
        if len(waiting) < _PIECE_BYTES:
            continue
        end = waiting.rfind(b"\n") + 1
        if end:
            piece = bytes(waiting[:end])
            del waiting[:end]
            await context.builder.run(tenant, partial(items.add_lines, piece))
        elif len(waiting) > _LONGEST_LINE:
            raise invalid(f"A line after items[{len(items)}] is longer than {_LONGEST_LINE} bytes.", "items")

    def work() -> StoredCatalogue:
        items.add_lines(waiting)
        return stored(name, items.build())

    return await context.builder.run(tenant, work)


async def _from_array(
    context: Context, tenant: str, name: str, width: int | None, body: AsyncIterator[bytes]
) -> StoredCatalogue:
    data = await _whole(body)
    columns = _check_width(width, len(data))

    def work() -> StoredCatalogue:
        rows = np.frombuffer(data, "<i4").reshape(-1, columns)
        return stored(name, build_array(rows, _vocabulary(context)))

    return await context.builder.run(tenant, work)


def _vocabulary(context: Context) -> Vocabulary:
    info, tokenizer = context.engine.info, context.text.tokenizer
    return Vocabulary(info.vocab_size, info.eos_token_ids, tokenizer.encode_behind)


async def _whole(body: AsyncIterator[bytes]) -> bytearray:
    """A buffer that grows in place: nothing is copied when it is complete."""
    data = bytearray()
    async for piece in body:
        data += piece
    return data


async def _charged(body: AsyncIterator[bytes], room: Upload) -> AsyncIterator[bytes]:
    async for piece in body:
        room.resize(room.num_bytes + len(piece))
        yield piece


# --- the query, and the answer -----------------------------------------------------------------------------------


def _query(query: MultiMapping[str]) -> _Query:
    name = query.get("name")
    replace = query.get("replace", "false")
    if replace not in ("true", "false"):
        raise invalid(f"`replace` must be true or false, not {shorten(repr(replace))}.", "replace")
    width = query.get("width")
    if width is not None and not (width.isascii() and width.isdigit() and len(width) < 9):
        raise invalid(f"`width` must be a number, not {shorten(repr(width))}.", "width")
    return _Query(None if name is None else _required(name), replace == "true", None if width is None else int(width))


def _required(name: str | None) -> str:
    if name is None:
        raise missing("name", "`name` is missing: a catalogue is found again by its name (in the query: ?name=…).")
    if not is_name(name):
        raise invalid("`name` must be 1 to 128 characters out of A-Z a-z 0-9 . _ : and -.", "name")
    return name


def _agreed(body: str | None, query: str | None) -> str | None:
    if body is not None and query is not None and body != query:
        raise invalid(
            f"`name` is {shorten(repr(body))} in the body and '{query}' in the query: send one of them.", "name"
        )
    return query if body is None else body


def _check_width(width: int | None, num_bytes: int | None) -> int:
    if width is None:
        raise missing("width", "`width` is missing: the tokens of a row, padding included (in the query: &width=…).")
    if not 1 <= width <= LONGEST_ITEM:
        raise invalid(f"`width` must be from 1 to {LONGEST_ITEM}, not {width}.", "width")
    if num_bytes is not None and (num_bytes == 0 or num_bytes % (4 * width)):
        raise invalid(
            f"The body must be rows of {width} little-endian int32, {4 * width} bytes each; it has {num_bytes} bytes.",
            "width",
        )
    return width


def _object(catalogue: StoredCatalogue) -> dict[str, Any]:
    return {
        "id": catalogue.name,
        "name": catalogue.name,
        "object": "catalogue",
        "created_at": catalogue.created_at,
        "items": catalogue.tree.num_items,
        "depth": catalogue.tree.depth,
        "bytes": catalogue.num_bytes,
    }
