"""Lines of JSON."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from bequest.server.transport.replies import json_response

NDJSON = {"Content-Type": "application/x-ndjson"}


def one_line(value: dict[str, Any], stream: bool, headers: dict[str, str]) -> web.Response:
    """An answer that is known at once, as a stream of one line or whole."""
    if not stream:
        return json_response(value, headers)
    return web.Response(body=orjson.dumps(value) + b"\n", headers={**headers, **NDJSON})
