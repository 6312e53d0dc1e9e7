"""The console: GET / and its files, and GET /console/state, which only operators may read.

The files are static and hold nothing of ours, so that they need no key; the page asks for one and sends it along.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aiohttp import web

from bequest.engine.watching.snapshot import FREE, LEASED, OpenRequest
from bequest.server.access.auth import check_operator
from bequest.server.access.marks import CALLER
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.replies import json_response

_FOLDER = Path(__file__).parents[1] / "console"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in _FOLDER.iterdir() if path.suffix in _TYPES}
STATIC_PATHS = frozenset({"/", *(f"/console/{name}" for name in _FILES if name != "index.html")})

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MOST_CELLS = 4096
_MOST_REQUESTS = 100
_FRESH_SECONDS = 0.5  # many watchers cost one look


@dataclass(slots=True)
class LastState:
    """What the last watcher was told, and when (time.monotonic)."""

    body: dict[str, Any] | None = None
    at: float = 0.0


LAST_STATE: web.AppKey[LastState] = web.AppKey("last_state", LastState)


async def page(http: web.Request) -> web.Response:
    return _file("index.html")


async def script(http: web.Request) -> web.Response:
    return _file(http.path.rpartition("/")[2])


def _file(name: str) -> web.Response:
    body, kind = _FILES[name]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)


async def state(http: web.Request) -> web.Response:
    check_operator(http[CALLER])
    last, now = http.app[LAST_STATE], time.monotonic()
    if last.body is None or now - last.at > _FRESH_SECONDS:
        last.body, last.at = _state(http.app[CONTEXT]), now
    return json_response(last.body)


def _state(context: Context) -> dict[str, Any]:
    load, snapshot, metrics = context.engine.load(), context.engine.snapshot(), context.metrics
    oldest_first = sorted(snapshot.requests, key=lambda request: (request.status == "waiting", -request.seconds))
    return {
        "time": time.time(),
        "model": context.model_names[0],
        "state": context.engine.state,
        "running": load.running,
        "waiting": load.waiting,
        "block_size": snapshot.block_size,
        "blocks": _field(snapshot.blocks),
        "host_blocks": _field(snapshot.host_blocks),
        "requests": [_request(request) for request in oldest_first[:_MOST_REQUESTS]],
        "figures": metrics.figures(),
        "errors": [asdict(error) for error in reversed(metrics.traffic.last_errors)],
    }


def _request(request: OpenRequest) -> dict[str, Any]:
    return {**asdict(request), "seconds": round(request.seconds, 3)}


def _field(kinds: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """A digit per cell: a block's kind, or the most frequent one of several blocks where there are many."""
    per_cell = max(1, -(-len(kinds) // _MOST_CELLS))
    used = int((kinds != FREE).sum())
    return {"total": len(kinds), "used": used, "per_cell": per_cell, "cells": _digits(_merged(kinds, per_cell))}


def _merged(kinds: npt.NDArray[np.uint8], per_cell: int) -> npt.NDArray[np.uint8]:
    whole = len(kinds) // per_cell * per_cell
    cells = [kinds[:whole].reshape(-1, per_cell), kinds[whole:].reshape(-1, max(len(kinds) - whole, 1))]
    counts = [np.stack([(cell == kind).sum(axis=1) for kind in range(LEASED + 1)]) for cell in cells]
    return np.concatenate([count.argmax(axis=0) for count in counts]).astype(np.uint8)


def _digits(kinds: npt.NDArray[np.uint8]) -> str:
    return (kinds + ord("0")).tobytes().decode()
