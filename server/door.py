"""A door: an API that clients of other servers expect, in a folder of its own under server/doors/.

A door says everything of itself: its routes, what /openapi.json tells of them, and what its errors look like. Its
bodies say which fields they take. So a door is added by adding its folder (server/doors/finding.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from bequest.server.transport.intake import Expectation
from bequest.server.transport.replies import ErrorForm

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Operation:
    """What /openapi.json tells of a route."""

    summary: str
    answer: type[msgspec.Struct] | None  # None: text
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    files: bool = False  # may answer with bytes
    query: tuple[str, ...] = ()
    media: tuple[str, ...] = ()  # of bodies beside JSON
    form: bool = False  # the body is a form with a file
    status: str = "200"  # of the answer
    error: type[msgspec.Struct] | None = None  # of what its errors look like; None: as everywhere


@dataclass(frozen=True, slots=True)
class DoorRoute:
    method: str
    path: str
    handler: Handler
    operation: Operation
    expectation: Expectation | None = None  # how `Expect: 100-continue` is answered; None: as for JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    routes: tuple[DoorRoute, ...]
    paths: tuple[str, ...]  # where errors look like the door's, whatever is asked for there and below
    error_form: ErrorForm
    error_header: str | None = None  # its clients' alone: where they send it, errors at paths of no door look so, too
    setup: Callable[[web.Application], None] | None = None  # puts into the application what the door keeps there
