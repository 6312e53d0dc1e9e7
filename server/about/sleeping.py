"""POST /sleep, POST /wake_up, GET /is_sleeping: the memory of an engine that nobody needs for a while.

Operators may send it to sleep and wake it, and keys that have the permission: all tenants wait for that.
"""

from __future__ import annotations

from aiohttp import web

from bequest.server.access.auth import check_permission
from bequest.server.access.marks import CALLER
from bequest.server.context import CONTEXT
from bequest.server.transport.replies import json_response
from bequest.server.wire import fields
from bequest.server.wire.errors import invalid
from bequest.server.wire.reading import shorten

_QUERY = ("wake_on_request",)


async def sleep(http: web.Request) -> web.Response:
    """Until /wake_up; with `?wake_on_request=true` a request wakes it, too."""
    check_permission(http[CALLER], "admin")
    wanted = http.query.get("wake_on_request", "false")
    if wanted not in ("true", "false"):
        message = f"`wake_on_request` must be true or false, not {shorten(repr(wanted))}."
        raise invalid(message, "wake_on_request")
    given_back = await http.app[CONTEXT].engine.sleep(wakes_itself=wanted == "true")
    return _told(http, {"bytes_given_back": given_back})


async def wake_up(http: web.Request) -> web.Response:
    """Answers when it is awake."""
    check_permission(http[CALLER], "admin")
    await http.app[CONTEXT].engine.wake()
    return _told(http, {})


async def is_sleeping(http: web.Request) -> web.Response:
    return _told(http, {})


def _told(http: web.Request, more: dict[str, int]) -> web.Response:
    ignored = fields.ignored_header(name for name in http.query if name not in _QUERY)
    return json_response({"is_sleeping": http.app[CONTEXT].engine.asleep, **more}, ignored)
