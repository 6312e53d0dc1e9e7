"""The line that each request leaves in the log: what was asked, how it ended, why, and what it cost."""

from __future__ import annotations

import logging
import time
from typing import Any

from aiohttp import web

from bequest.server.access.marks import ARRIVED, CALLER, REFUSAL
from bequest.server.operation.spending import Account
from bequest.server.wire.fields import IGNORED_HEADER
from bequest.server.wire.reading import shorten

_log = logging.getLogger("bequest.server")
_LONGEST_REASON = 500
_QUOTING = frozenset({"messages", "input", "chat_template"})  # a template may put a whole prompt into its complaint


def log_request(
    request: web.Request, status: int, response: web.StreamResponse | None, account: Account | None
) -> None:
    """Work and failures at level info, what watchers ask all the time below that. No response: the client left."""
    level = logging.INFO if request.method not in ("GET", "HEAD") or status >= 400 else logging.DEBUG
    if not _log.isEnabledFor(level):
        return
    seconds = time.monotonic() - request[ARRIVED]
    path, caller = request.rel_url.raw_path, request.get(CALLER)
    extra: dict[str, Any] = {"method": request.method, "path": path, "status": status, "seconds": round(seconds, 6)}
    extra |= {"key": caller.name if caller else None, "tenant": caller.tenant if caller else None}
    told = []
    if (refusal := request.get(REFUSAL)) is not None:
        message = f"`{refusal.param}` is refused" if refusal.param in _QUOTING else refusal.message
        extra |= {"code": refusal.code, "error": message}
        told.append(f"{refusal.code}: {_plain(message)}")
    if account is not None:
        extra |= account.fields()
        told.append(str(account))
    if response is not None and (ignored := response.headers.get(IGNORED_HEADER)) is not None:
        extra["ignored"] = ignored
        told.append(f"ignored fields: {ignored}")
    line = f"{request.method} {shorten(path, 200)} {status} in {seconds:.3f} s"
    _log.log(level, "%s", ": ".join((line, "; ".join(told))) if told else line, extra=extra)


def _plain(message: str) -> str:
    """In one line: a message may quote what a client sent."""
    return "".join(c if c.isprintable() else " " for c in shorten(message, _LONGEST_REASON))
