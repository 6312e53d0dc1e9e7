"""Errors as Ollama's clients know them: `{"error": "…"}`, with our own fields beside it."""

from __future__ import annotations

import orjson

from bequest.server.wire.errors import ApiError


def error_body(error: ApiError) -> bytes:
    told = {"code": error.code, "param": error.param, "details": error.details}
    return orjson.dumps({"error": error.message, **told})
