"""Errors as Anthropic's clients know them: `{"type": "error", "error": {"type", "message"}}`.

Beside these two stand our own `code`, `param` and `details`, as in every error of this server.
"""

from __future__ import annotations

import orjson

from bequest.server.wire.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> bytes:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told = {"code": error.code, "param": error.param, "details": error.details}
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message, **told}})


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
