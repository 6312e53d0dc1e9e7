"""What is known of a request. The middleware sets these before any handler runs, the handler its answer's id, and who
reads its body what that takes."""

from __future__ import annotations

from aiohttp import web

from bequest.server.access.in_flight import Held
from bequest.server.access.keys import Caller
from bequest.server.wire.errors import ApiError

CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)
TENANT: web.RequestKey[str] = web.RequestKey("tenant", str)
ARRIVED: web.RequestKey[float] = web.RequestKey("arrived", float)  # time.monotonic
FALLBACK_ID: web.RequestKey[str] = web.RequestKey("fallback_id", str)
REFUSAL: web.RequestKey[ApiError] = web.RequestKey("refusal", ApiError)  # what it was answered with, or ended with
ANSWER_ID: web.RequestKey[str] = web.RequestKey("answer_id", str)
HELD: web.RequestKey[Held] = web.RequestKey("held", Held)  # of a request that is not small: its memory
LIGHT: web.RequestKey[bool] = web.RequestKey("light", bool)  # of one whose body is small, but for files in it
