"""Answers that are small and sent whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from bequest.server.wire.errors import ApiError

ErrorForm = Callable[[ApiError], bytes]  # the body of an error's answer


@dataclass(frozen=True, slots=True)
class ErrorForms:
    """What errors look like to clients of another API: at its paths and below them, and wherever no other API has the
    path, where they send a header that is theirs alone."""

    paths: Mapping[str, ErrorForm]
    headers: Mapping[str, ErrorForm]

    def of(self, request: web.Request) -> ErrorForm:
        for path, form in self.paths.items():
            if request.path == path or request.path.startswith(path + "/"):
                return form
        return next((form for name, form in self.headers.items() if name in request.headers), ApiError.body)


ERROR_FORMS: web.AppKey[ErrorForms] = web.AppKey("error_forms", ErrorForms)


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers)


def error_response(request: web.Request, error: ApiError) -> web.Response:
    """The error in the form that its client expects."""
    response = error.response()
    response.body = request.app[ERROR_FORMS].of(request)(error)
    return response
