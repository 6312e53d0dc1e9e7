"""Errors as a client sees them: `{"error": {"message", "type", "param", "code", "details"}}` with a status and headers.

The message is complete in itself, since clients print nothing else; `details` holds the numbers a program needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from bequest.engine.errors import EngineError
from bequest.server.wire.sentences import param_of, sentence

RETRY_SECONDS = "1"
_LONGEST_RETRY = 60
_IN_VAIN = {"x-should-retry": "false"}

# Codes of statuses that clients repeat, where a repetition cannot help.
_NEVER_AGAIN = (
    "deadline_exceeded",
    "continuation_parent_failed",
    "request_id_in_use",
    "estate_mismatch",
    "catalogue_exists",
    "catalogues_full",
    "files_full",
    "disk_error",
    "file_in_use",
    "batch_ended",
    "adapter_in_use",
    "engine_busy",
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}

# Status of each code that the engine can raise.
_ENGINE_STATUS = {
    "invalid_value": 400,
    "context_length_exceeded": 400,
    "grammar_too_large": 400,
    "retention_too_large": 400,
    "invalid_audio": 400,
    "invalid_image": 400,
    "image_too_large": 400,
    "invalid_estate": 400,
    "estate_mismatch": 409,
    "answer_too_large": 400,
    "invalid_adapter": 400,
    "continuation_mismatch": 400,
    "model_not_found": 404,
    "adapter_in_use": 409,
    "continuation_parent_not_found": 404,
    "continuation_parent_expired": 404,
    "continuation_parent_failed": 409,
    "continuation_parent_lost": 410,
    "wrong_replica": 421,
    "request_id_in_use": 409,
    "queue_full": 429,
    "insufficient_retention": 429,
    "deadline_exceeded": 504,
    "draining": 503,
    "loading": 503,
    "engine_dead": 503,
    "sleeping": 503,
    "engine_busy": 409,
    "internal_error": 500,
}


class ApiError(Exception):
    """Ends a request with this status and error object."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        absent: str | None = None,
    ) -> None:
        """`absent`: the id or name that is not here; another server may have it (server/wire/replicas.py)."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = writable(message)
        self.param = None if param is None else writable(param)
        self.details = dict(details or {})
        self.absent = absent
        self.headers = {**_retry_headers(status, code, self.details), **(headers or {})}

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            "details": self.details,
        }
        return orjson.dumps({"error": error})

    def response(self) -> web.Response:
        return web.Response(body=self.body(), status=self.status, content_type="application/json", headers=self.headers)


def writable(text: str) -> str:
    """What a client sent may hold bytes that are no text, such as those of a header: they are shown, not sent back."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def _retry_headers(status: int, code: str, details: Mapping[str, Any]) -> dict[str, str]:
    """OpenAI's client repeats 409, 429 and 5xx: tell it when, or that it would be in vain."""
    if code == "queue_full":
        return {"Retry-After": str(details.get("retry_after", RETRY_SECONDS))}
    if status == 503 or code == "rate_limit_exceeded":
        return {"Retry-After": RETRY_SECONDS}
    if code == "request_id_in_use" and details.get("status") == "running":
        return {"Retry-After": RETRY_SECONDS}
    if code == "insufficient_retention":
        return {**_IN_VAIN, "Retry-After": _seconds_until(details.get("earliest_expiry"))}
    if code in _NEVER_AGAIN:
        return _IN_VAIN
    return {}


def _seconds_until(moment: float | None) -> str:
    """None: nobody knows when."""
    return str(_LONGEST_RETRY if moment is None else retry_seconds(moment - time.time()))


def retry_seconds(wait: float) -> int:
    """Whole seconds from 1 to 60, the longest that clients wait."""
    return min(max(math.ceil(wait), 1), _LONGEST_RETRY)


def invalid(message: str, param: str | None) -> ApiError:
    return ApiError(400, "invalid_value", message, param=param)


def missing(param: str, message: str | None = None) -> ApiError:
    return ApiError(400, "missing_required_parameter", message or f"`{param}` is missing.", param=param)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", message, param=param)


def from_engine(error: EngineError, param: str | None = None) -> ApiError:
    """`param` is the client's name for the field at fault, where the engine does not know it. An aborted request that
    still has a listener was cut off by the server's own end."""
    code = "draining" if error.code == "aborted" else error.code
    status = _ENGINE_STATUS.get(code, 500)
    at = param_of(error) or param
    absent = error.facts.get("reference") if code == "continuation_parent_not_found" else None
    return ApiError(
        status,
        code,
        sentence(error, at),
        param=at,
        details=error.details,
        absent=absent if isinstance(absent, str) else None,
    )


def at_field(error: EngineError, param: str) -> ApiError:
    """The same where the client's field is known better than the engine can."""
    return ApiError(_ENGINE_STATUS[error.code], error.code, sentence(error, param), param=param, details=error.details)


def too_slow(seconds: float) -> ApiError:
    return ApiError(
        408,
        "request_timeout",
        f"The request did not arrive: nothing came for {seconds:g} s (--client-timeout) before it was complete.",
    )


def from_disk(error: OSError) -> ApiError:
    """Of the files of clients, which nothing else can hold."""
    reason = error.strerror or error
    return ApiError(507, "disk_error", f"The server's disk (--files-dir) did not do what this request needs: {reason}.")


def internal(answer_id: str) -> ApiError:
    return ApiError(
        500,
        "internal_error",
        f"The server failed on this request through a fault of its own; its log tells more under {answer_id}.",
    )
