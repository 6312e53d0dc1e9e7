"""Answers that are small and sent whole."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web


def json_response(value: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json", headers=headers)
