"""A stored file as an answer: all of it, or the part that a client asks for to go on with a broken download.

A `Range` that cannot be understood, or whose `If-Range` names a version by its tag, gives the whole file, as HTTP has
it: a client that gets 200 knows that it has everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from bequest.server.wire.errors import ApiError

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)


def download(http: web.Request, path: Path, num_bytes: int, headers: Mapping[str, str]) -> web.StreamResponse:
    """Raises where the part that is wanted lies behind the file's end."""
    return _Download(path, _range_of(http.headers, num_bytes), headers)


class _Download(web.FileResponse):
    def __init__(self, path: Path, wanted: str | None, headers: Mapping[str, str]) -> None:
        super().__init__(path, headers=headers)
        self._wanted = wanted

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """With what is wanted in place of what was asked, which the library would refuse without a word."""
        told = request.headers.copy()
        told.popall(hdrs.RANGE, None)
        if self._wanted is not None:
            told[hdrs.RANGE] = self._wanted
        return await super().prepare(request.clone(headers=told))


def _range_of(headers: Mapping[str, str], num_bytes: int) -> str | None:
    """The `Range` that is served; None: the whole file."""
    asked = _RANGE.fullmatch(headers.get(hdrs.RANGE, "").strip())
    only_if = headers.get(hdrs.IF_RANGE, "").strip()
    if asked is None or only_if.endswith('"'):
        return None
    first, last = asked.groups()
    if not (first or last) or (first and last and int(first) > int(last)):
        return None
    behind = int(first) >= num_bytes if first else not int(last) or not num_bytes
    if behind and not only_if:
        raise ApiError(
            416,
            "invalid_range",
            f"The file has {num_bytes} bytes, and the header Range asks for none of them ({asked[0]}).",
            details={"bytes": num_bytes},
            headers={hdrs.CONTENT_RANGE: f"bytes */{num_bytes}"},
        )
    return f"bytes={first}-{last}"
