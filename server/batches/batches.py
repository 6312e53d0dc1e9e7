"""/v1/batches: create, list, inspect and cancel. Another tenant's batch is not found."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from aiohttp import web

from bequest.server.access.marks import CALLER, TENANT
from bequest.server.batches.answering import ENDPOINTS
from bequest.server.batches.files import disk_of, expiry_seconds
from bequest.server.batches.objects import shown
from bequest.server.batches.running import BATCH_RUNNER
from bequest.server.context import CONTEXT
from bequest.server.stores.batches import Batch
from bequest.server.transport.intake import read_body
from bequest.server.transport.replies import json_response
from bequest.server.wire import fields
from bequest.server.wire.errors import ApiError, invalid, missing
from bequest.server.wire.names import new_id
from bequest.server.wire.paging import QUERY, page_of
from bequest.server.wire.reading import shorten

_UNITS = {"m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW = 30 * 86400
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512  # of metadata


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, Any] | None = None
    output_expires_after: dict[str, Any] | None = None


async def create(http: web.Request) -> web.Response:
    context, tenant = http.app[CONTEXT], http[TENANT]
    disk = disk_of(context)
    body, ignored = await read_body(http, context, BatchBody)
    if body.input_file_id is None:
        raise missing("input_file_id", "`input_file_id` is missing: upload a file with POST /v1/files first.")
    endpoint = _endpoint(body.endpoint)
    window, seconds = _window(body.completion_window)
    file = disk.files.find(tenant, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        message = f"`input_file_id` is a file of the purpose '{file.purpose}', and must be one of 'batch'."
        raise invalid(message, "input_file_id")
    disk.batches.check_open(tenant)
    now = int(disk.files.clock())
    batch = Batch(
        id=new_id("batch_", disk.files.tag),
        tenant=tenant,
        key=http[CALLER].name,
        endpoint=endpoint,
        input_file_id=file.id,
        completion_window=window,
        created_at=now,
        expires_at=now + seconds,
        output_expires_after=_output_expiry(body.output_expires_after),
        metadata=_metadata(body.metadata),
        output_id=new_id("file-", disk.files.tag),
        error_id=new_id("file-", disk.files.tag),
    )
    await http.app[BATCH_RUNNER].add(batch)
    return json_response(shown(batch), fields.ignored_header(ignored))


async def list_batches(http: web.Request) -> web.Response:
    found = disk_of(http.app[CONTEXT]).batches.of(http[TENANT])
    page = page_of(http.query, found, lambda batch: (batch.id,), shown)
    return json_response(page, fields.ignored_header(name for name in http.query if name not in QUERY))


async def retrieve(http: web.Request) -> web.Response:
    return json_response(shown(_found(http)))


async def cancel(http: web.Request) -> web.Response:
    """Lines that run are given up. One that is being cancelled already is left to it."""
    batch, disk = _found(http), disk_of(http.app[CONTEXT])
    if batch.ended or batch.status == "finalizing":
        message = f"The batch '{batch.id}' is {batch.status} and cannot be cancelled any more."
        raise ApiError(409, "batch_ended", message)
    if batch.status == "cancelling":
        return json_response(shown(batch))
    batch.enter("cancelling", disk.files.clock())
    told = shown(batch)  # it may have ended when that is on the disk
    await disk.batches.save(batch)
    http.app[BATCH_RUNNER].look()
    return json_response(told)


def _found(http: web.Request) -> Batch:
    return disk_of(http.app[CONTEXT]).batches.find(http[TENANT], http.match_info["id"])


def _endpoint(given: str | None) -> str:
    allowed = ", ".join(ENDPOINTS)
    if given is None:
        raise missing("endpoint", f"`endpoint` is missing: it is one of {allowed}.")
    if given not in ENDPOINTS:
        raise invalid(f"`endpoint` must be one of {allowed}, not {shorten(repr(given))}.", "endpoint")
    return given


def _window(given: str | None) -> tuple[str, int]:
    """As it is shown, and in seconds."""
    field = "completion_window"
    if given is None:
        raise missing(field, f"`{field}` is missing: send '24h', or another number of minutes (m), hours or days (d).")
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", given)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_WINDOW:
        raise invalid(
            f"`{field}` must be a number of minutes, hours or days up to 30 days, such as '24h', not "
            f"{shorten(repr(given))}.",
            field,
        )
    return given, seconds


def _metadata(given: dict[str, Any] | None) -> dict[str, str] | None:
    if given is None:
        return None
    if len(given) > _MOST_PAIRS:
        raise invalid(f"`metadata` may have {_MOST_PAIRS} entries at most, not {len(given)}.", "metadata")
    for key, value in given.items():
        param = f"metadata.{shorten(key)}"
        if len(key) > _LONGEST_KEY:
            raise invalid(f"A name in `metadata` may have {_LONGEST_KEY} characters, not {len(key)}.", "metadata")
        if not isinstance(value, str) or len(value) > _LONGEST_VALUE:
            raise invalid(f"`{param}` must be a string of at most {_LONGEST_VALUE} characters.", param)
    return given


def _output_expiry(given: dict[str, Any] | None) -> int | None:
    if given is None:
        return None
    return expiry_seconds(given.get("anchor"), given.get("seconds"), "output_expires_after")
