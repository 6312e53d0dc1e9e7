"""GET /health, /live, /version, /metrics."""

from __future__ import annotations

from aiohttp import web

from bequest.server.context import CONTEXT
from bequest.server.operation.version import installed_version
from bequest.server.transport.replies import json_response
from bequest.server.wire.errors import ApiError

_UNREADY = {
    "loading": ("loading", "The model is still loading; try again soon."),
    "draining": ("draining", "The server is shutting down and takes no new work."),
    "dead": ("engine_dead", "The engine has failed; the server must be started anew."),
}


async def health(request: web.Request) -> web.Response:
    """Ready to take work."""
    state = request.app[CONTEXT].engine.state
    if state in _UNREADY:
        raise ApiError(503, *_UNREADY[state])
    matmul = request.app[CONTEXT].engine.info.numbers.cpu_matmul
    return json_response({"status": "ok"} | ({} if matmul is None else {"cpu_matmul": matmul}))


async def live(request: web.Request) -> web.Response:
    """The process answers, whatever the engine does."""
    return json_response({"status": "ok"})


async def version(request: web.Request) -> web.Response:
    return json_response({"version": installed_version()})


async def metrics(request: web.Request) -> web.Response:
    body, content_type = request.app[CONTEXT].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": content_type})
