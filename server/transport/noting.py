"""Takes down what went wrong with a request, for the metrics and for the console's list."""

from __future__ import annotations

from aiohttp import web

from bequest.server.access.marks import REFUSAL
from bequest.server.context import CONTEXT
from bequest.server.operation.logs import request_id_of
from bequest.server.operation.tracing import route_of
from bequest.server.wire.errors import ApiError


def note_error(request: web.Request, error: ApiError) -> None:
    """Also of a stream that had begun: its status is 200, and the error is its last event."""
    request[REFUSAL] = error
    request.app[CONTEXT].metrics.traffic.on_error(
        request_id_of(request), f"{request.method} {route_of(request)}", error.status, error.code, error.message
    )
