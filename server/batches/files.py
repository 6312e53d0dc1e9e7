"""/v1/files: upload, list, inspect, download and delete.

Another tenant's file is not found, exactly as one that never was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from aiohttp import web

from bequest.server.access.marks import TENANT
from bequest.server.context import CONTEXT, Context
from bequest.server.stores.batches import Disk
from bequest.server.stores.files import Incoming, StoredFile
from bequest.server.transport.downloads import download
from bequest.server.transport.forms import Part, check_form, parts
from bequest.server.transport.intake import BodyLimit, Patience, of_caller
from bequest.server.transport.replies import json_response
from bequest.server.wire import fields
from bequest.server.wire.errors import ApiError, invalid, missing
from bequest.server.wire.paging import QUERY, page_of
from bequest.server.wire.reading import shorten

_LONGEST_FIELD = 1 << 10  # bytes
_LONGEST_NAME = 255  # characters of a file's
_FRAME_BYTES = 1 << 14  # of a form beside its file
_PURPOSE = "batch"
_MOST_LISTED = 10_000  # as OpenAI
SHORTEST, LONGEST = 3600, 30 * 86400  # seconds that a file may be kept for
_KNOWN = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


def disk_of(context: Context) -> Disk:
    """Where files are kept; raises where they are not."""
    if context.disk is None:
        raise ApiError(
            404,
            "files_disabled",
            "This server keeps no files, and so it runs no batches: start it with --files-dir DIR.",
        )
    return context.disk


async def upload(http: web.Request) -> web.Response:
    context = http.app[CONTEXT]
    disk = disk_of(context)
    check_head(http, context)
    form = _Form()
    announced = max(0, (http.content_length or 0) - _FRAME_BYTES)
    async with disk.files.receiving(http[TENANT], announced) as incoming:
        limit = of_caller(http, _limit(context))
        async for part in parts(http, Patience(context.config.client_timeout)):
            await form.take(part, incoming, limit)
        file = await form.keep(incoming)
    return json_response(shown(file), fields.ignored_header(form.ignored))


async def list_files(http: web.Request) -> web.Response:
    disk = disk_of(http.app[CONTEXT])
    purpose = http.query.get("purpose")
    found = [file for file in disk.files.of(http[TENANT]) if purpose in (None, file.purpose)]
    page = page_of(http.query, found, lambda file: (file.id,), shown, most=_MOST_LISTED, default=_MOST_LISTED)
    ignored = (name for name in http.query if name not in (*QUERY, "purpose"))
    return json_response(page, fields.ignored_header(ignored))


async def retrieve(http: web.Request) -> web.Response:
    return json_response(shown(_found(http)))


async def content(http: web.Request) -> web.StreamResponse:
    file = _found(http)
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
    }
    return download(http, disk_of(http.app[CONTEXT]).files.path_of(file), file.num_bytes, headers)


async def delete(http: web.Request) -> web.Response:
    disk, file = disk_of(http.app[CONTEXT]), _found(http)
    if (batch := disk.batches.reader_of(file.id)) is not None:
        raise ApiError(
            409,
            "file_in_use",
            f"The batch '{batch.id}' still reads the file '{file.id}': wait for its end, or cancel it "
            f"(POST /v1/batches/{batch.id}/cancel).",
            details={"batch": batch.id},
        )
    await disk.files.delete(file)
    return json_response({"id": file.id, "object": "file", "deleted": True})


def check_head(http: web.BaseRequest, context: Context) -> None:
    """What can be refused before the body is read."""
    disk_of(context)
    check_form(http, "-F file=@requests.jsonl -F purpose=batch", "send it as it is")
    of_caller(http, _limit(context)).check(max(0, (http.content_length or 0) - _FRAME_BYTES))


def shown(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def expiry_seconds(anchor: object, seconds: object, field: str) -> int:
    """Of `expires_after` and `output_expires_after`."""
    if anchor != "created_at":
        raise invalid(f"`{field}.anchor` must be 'created_at', not {shorten(repr(anchor))}.", f"{field}.anchor")
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not SHORTEST <= seconds <= LONGEST:
        raise invalid(
            f"`{field}.seconds` must be a whole number from {SHORTEST} to {LONGEST}, not {shorten(repr(seconds))}.",
            f"{field}.seconds",
        )
    return seconds


@dataclass(slots=True)
class _Form:
    """The parts of an upload, in whatever order they come."""

    filename: str | None = None  # None: the file has not come
    values: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    async def take(self, part: Part, incoming: Incoming, limit: BodyLimit) -> None:
        if part.name == "file":
            await self._take_file(part, incoming, limit)
            return
        data = bytearray()
        async for piece in part.pieces:
            data += piece
            if len(data) > _LONGEST_FIELD:
                name = shorten(part.name)
                raise invalid(f"`{name}` is longer than {_LONGEST_FIELD} bytes.", name)
        if part.name in self.values:
            raise invalid(f"`{part.name}` is there twice.", part.name)
        if part.name in _KNOWN:
            self.values[part.name] = data.decode(errors="replace")
        else:
            self.ignored.append(part.name)

    async def _take_file(self, part: Part, incoming: Incoming, limit: BodyLimit) -> None:
        if self.filename is not None:
            raise invalid("`file` is there twice; send one file per request.", "file")
        self.filename = (part.filename or "upload.jsonl")[:_LONGEST_NAME]
        async for piece in part.pieces:
            limit.check(incoming.num_bytes + len(piece))
            await incoming.write(piece)

    async def keep(self, incoming: Incoming) -> StoredFile:
        """Raises if something is missing or wrong."""
        if self.filename is None:
            raise missing("file", "`file` is missing: send it as a file field (with curl: -F file=@requests.jsonl).")
        purpose = self.values.get("purpose")
        if purpose is None:
            raise missing("purpose", f"`purpose` is missing: send '{_PURPOSE}'.")
        if purpose != _PURPOSE:
            message = f"`purpose` must be '{_PURPOSE}', the only one here, not {shorten(repr(purpose))}."
            raise invalid(message, "purpose")
        if not incoming.num_bytes:
            raise invalid("`file` is empty.", "file")
        return await incoming.keep(self.filename, purpose, self._expiry())

    def _expiry(self) -> int | None:
        anchor, seconds = (self.values.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return None
        number = int(seconds) if seconds is not None and re.fullmatch("[0-9]{1,9}", seconds) else seconds
        return expiry_seconds(anchor, number, "expires_after")


def _found(http: web.Request) -> StoredFile:
    return disk_of(http.app[CONTEXT]).files.find(http[TENANT], http.match_info["id"])


def _limit(context: Context) -> BodyLimit:
    most = context.config.max_file_mb
    return BodyLimit(int(most * 2**20), f"--max-file-mb {most:g}")
