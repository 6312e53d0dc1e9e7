"""Around every handler: who calls, JSON errors whatever went wrong, and the headers of every answer."""

from __future__ import annotations

import logging
import time

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from engine.errors import EngineError
from server.context import ANSWER_ID, ARRIVED, CONTEXT, TENANT
from server.errors import ApiError, from_engine, internal
from server.names import header_id, new_id
from server.sending import ReaderStopped
from server.wire import shorten

_log = logging.getLogger("bequest.server")


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[ARRIVED] = time.monotonic()
    try:
        gate = request.app[CONTEXT].gate
        if preflight := gate.preflight(request):
            return preflight
        request[TENANT] = gate.tenant(request)
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except EngineError as error:
        return error_response(from_engine(error))
    except web.HTTPException as error:
        return _from_http(request, error)
    except ReaderStopped:
        request.app[CONTEXT].metrics.on_dropped_reader()
        raise
    except ConnectionError:
        raise  # the client is gone: there is nobody to answer
    except Exception:
        answer_id = request.get(ANSWER_ID) or new_id("req-")
        request[ANSWER_ID] = answer_id
        _log.exception("%s %s failed (%s)", request.method, request.path, answer_id)
        if request.writer.output_size > 0:
            raise ConnectionResetError("the answer has begun, it can only be cut off") from None
        return error_response(internal(answer_id))


def error_response(error: ApiError) -> web.Response:
    response = error.response()
    if error.status == 413:
        response.force_close()  # what is left of the body is not worth reading
    return response


async def common_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs before each answer's head is sent."""
    own = header_id(request.headers.get("X-Request-Id"))
    response.headers["X-Request-Id"] = own or request.get(ANSWER_ID) or new_id("req-")
    response.headers["Server"] = "bequest"
    response.headers.update(request.app[CONTEXT].gate.cors_headers(request))


def _from_http(request: web.Request, error: web.HTTPException) -> web.Response:
    """The router's own refusals."""
    path = shorten(request.path, 200)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not possible on {path}; use {allowed}."
        return ApiError(405, "method_not_allowed", message, headers={"Allow": allowed}).response()
    if error.status == 404:
        return ApiError(404, "unknown_url", f"There is nothing at {request.method} {path}.").response()
    return ApiError(error.status, "invalid_value", f"{error.reason}.").response()


class JsonProtocol(RequestHandler):
    """Answers what never becomes a request (a malformed head, for example) in JSON too."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, it can only be cut off") from exc
        if status >= 500:
            answer_id = new_id("req-")
            _log.error("request failed (%s)", answer_id, exc_info=exc)
            error = internal(answer_id)
        else:
            error = ApiError(status, "invalid_value", "The request is not valid HTTP/1.1.")
            answer_id = new_id("req-")
        response = error.response()
        response.headers["X-Request-Id"] = answer_id
        response.headers["Server"] = "bequest"
        response.force_close()
        return response
