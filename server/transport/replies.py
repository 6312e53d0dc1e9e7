"""Answers that are small and sent whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from bequest.server.wire.errors import ApiError

ErrorForm = Callable[[ApiError], bytes]  # the body of an error's answer
# What errors look like at a path and below it, where that is another API's.
ERROR_FORMS: web.AppKey[Mapping[str, ErrorForm]] = web.AppKey("error_forms", Mapping[str, ErrorForm])


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers)


def error_response(request: web.Request, error: ApiError) -> web.Response:
    """The error in the form that the clients of its path expect."""
    response = error.response()
    for path, form in request.app[ERROR_FORMS].items():
        if request.path == path or request.path.startswith(path + "/"):
            response.body = form(error)
    return response
