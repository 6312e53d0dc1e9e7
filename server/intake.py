"""How a body comes in: its head is judged first, so that nothing is read in vain."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from server.context import CONTEXT, Context
from server.errors import ApiError
from server.wire import parse_object


async def read_object(request: web.Request, context: Context) -> dict[str, Any]:
    """The JSON object of a request, without its null fields."""
    return {name: value for name, value in (await read_with_nulls(request, context)).items() if value is not None}


async def read_with_nulls(request: web.Request, context: Context) -> dict[str, Any]:
    """The JSON object of a request, where null says something."""
    check_head(request, context)
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(context) from None
    except web.HTTPException:
        raise
    except Exception as error:  # aiohttp has several for a body that is cut off or wrongly encoded
        if isinstance(error, ConnectionError):
            raise
        message = "The body could not be read: its framing or its Content-Encoding is broken."
        raise ApiError(400, "invalid_json", message) from error
    return parse_object(data)


def check_head(request: web.BaseRequest, context: Context) -> None:
    if request.content_type != "application/json":
        shown = request.headers.get("Content-Type", "none")[:100]
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The Content-Type must be application/json, not {shown}; "
            "with curl add -H 'Content-Type: application/json', or use --json.",
        )
    if (request.content_length or 0) > body_limit(context):
        raise _too_large(context)


def body_limit(context: Context) -> int:
    return int(context.config.max_body_mb * 2**20)


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """Answers `Expect: 100-continue`: refuses with the error that the body would get, or asks for the body."""
    context = request.app[CONTEXT]
    if request.headers["Expect"].lower() != "100-continue":
        message = "The only expectation this server meets is 'Expect: 100-continue'."
        return _closing(ApiError(417, "invalid_value", message))
    try:
        context.gate.tenant(request)
        if request.method in ("POST", "PUT", "PATCH"):
            check_head(request, context)
    except ApiError as error:
        return _closing(error)
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


def _closing(error: ApiError) -> web.Response:
    response = error.response()
    response.force_close()
    return response


def _too_large(context: Context) -> ApiError:
    limit = body_limit(context)
    return ApiError(
        413,
        "request_too_large",
        f"The body is larger than this server takes: {limit} bytes (--max-body-mb {context.config.max_body_mb:g}).",
        details={"limit": limit},
    )
