"""What answers while the model loads: /live says yes, everything else 503 `loading`, in JSON and with Retry-After."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from bequest.server.app import AppRunner
from bequest.server.transport.replies import json_response
from bequest.server.wire.errors import ApiError
from bequest.server.wire.names import header_id, new_id


@asynccontextmanager
async def loading_front(listener: socket.socket, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """Listens on `listener` while the block runs. Connections that come in between wait in the socket's queue."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", _answer)
    app.on_response_prepare.append(_headers)
    runner = AppRunner(app)
    await runner.setup()
    try:
        # A site closes its socket when it stops; the listener itself must outlive it.
        await web.SockSite(runner, listener.dup(), ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()


async def _answer(request: web.Request) -> web.Response:
    if request.path == "/live" and request.method in ("GET", "HEAD"):
        return json_response({"status": "ok"})
    response = ApiError(503, "loading", "The model is still loading; try again soon.").response()
    response.force_close()  # the next request belongs to the real front
    return response


async def _headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = header_id(request.headers.get("X-Request-Id")) or new_id("req-")
    response.headers["Server"] = "bequest"
