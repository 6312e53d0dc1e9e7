"""Around every handler: who calls and what it may, JSON errors whatever went wrong, the headers of every answer, and
what is counted, traced and logged of it."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web
from aiohttp.typedefs import Handler

from bequest.engine.errors import EngineError
from bequest.server.access.marks import ANSWER_ID, ARRIVED, CALLER, HELD, TENANT
from bequest.server.context import CONTEXT
from bequest.server.operation.logs import CURRENT, request_id_of
from bequest.server.operation.request_log import log_request
from bequest.server.operation.tracing import route_of
from bequest.server.stores.disk import DiskError
from bequest.server.transport.noting import note_error
from bequest.server.transport.opening import BEGUN
from bequest.server.transport.replies import error_response
from bequest.server.transport.sending import ReaderStopped
from bequest.server.wire.errors import ApiError, from_disk, from_engine, internal
from bequest.server.wire.names import new_id
from bequest.server.wire.reading import shorten
from bequest.server.wire.replicas import REPLICA_HEADER, is_owner_gone, over_rate, redirected

_log = logging.getLogger("bequest.server")


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[ARRIVED] = time.monotonic()
    context = request.app[CONTEXT]
    current = CURRENT.set(request)
    response: web.StreamResponse | None = None
    try:
        with context.tracing(request) as span:
            try:
                response = await _answer(request, handler)
                return response
            finally:
                span.end(_status(response), {"bequest.request_id": request_id_of(request)})
    finally:
        if HELD in request:
            request[HELD].release()
        asyncio.get_running_loop().call_soon(_note, request, response)  # a whole answer is sent first
        CURRENT.reset(current)


def _note(request: web.Request, response: web.StreamResponse | None) -> None:
    metrics, status = request.app[CONTEXT].metrics, _status(response)
    metrics.traffic.on_answer(request.method, route_of(request), status)
    log_request(request, status, response, metrics.spending.close(request.get(ANSWER_ID)))


def _status(response: web.StreamResponse | None) -> int:
    return 499 if response is None else response.status  # the client left


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await _admitted(request, handler)
    except ApiError as error:
        return await _failed(request, error)
    except EngineError as error:
        return await _failed(request, from_engine(error))
    except web.HTTPException as error:
        return await _failed(request, _from_http(request, error))
    except DiskError as error:
        _log.error("%s %s: %s", request.method, request.rel_url.raw_path, error)
        return await _failed(request, from_disk(error))
    except ReaderStopped:
        request.app[CONTEXT].metrics.on_dropped_reader()
        raise
    except ConnectionError:
        raise  # the client is gone: there is nobody to answer
    except Exception:
        answer_id = request[ANSWER_ID] = request.get(ANSWER_ID) or new_id("req-")
        _log.exception("%s %s failed (%s)", request.method, request.rel_url.raw_path, answer_id)
        if request.writer.output_size > 0 and BEGUN not in request:
            raise ConnectionResetError("the answer has begun, it can only be cut off") from None
        return await _failed(request, internal(answer_id))


async def _admitted(request: web.Request, handler: Handler) -> web.StreamResponse:
    context = request.app[CONTEXT]
    if preflight := context.gate.preflight(request):
        return preflight
    caller = request[CALLER] = context.gate.caller(request)
    request[TENANT] = caller.tenant
    if request.method != "POST" or request.path.endswith("/cancel"):
        return await handler(request)
    with context.admission.admitted(caller, context.engine.num_waiting, over_rate(request.headers)):
        await context.entrance.enter(caller.tenant)
        return await handler(request)


async def _failed(request: web.Request, error: ApiError) -> web.StreamResponse:
    """The error as the answer, or as the end of a stream that has begun with comments."""
    error = redirected(error, request.app[CONTEXT].config.replica_tag, is_owner_gone(request.headers))
    if BEGUN in request:
        return await request[BEGUN].fail(request, error)
    note_error(request, error)
    response = error_response(request, error)
    if error.status in (408, 413):
        response.force_close()  # what is left of the body is not worth reading
    return response


async def common_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs before each answer's head is sent."""
    response.headers["X-Request-Id"] = request_id_of(request)
    response.headers["Server"] = "bequest"
    context = request.app[CONTEXT]
    if context.config.replica_tag is not None:
        response.headers.setdefault(REPLICA_HEADER, context.config.replica_tag)
    response.headers.update(context.gate.cors_headers(request))


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    """The router's own refusals."""
    path = shorten(request.path, 200)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not possible on {path}; use {allowed}."
        return ApiError(405, "method_not_allowed", message, headers={"Allow": allowed})
    if error.status == 404:
        return ApiError(404, "unknown_url", f"There is nothing at {request.method} {path}.{_meant(request)}")
    return ApiError(error.status, "invalid_value", f"{error.reason}.")


def _meant(request: web.Request) -> str:
    """The usual mistake with a client's base URL: /v1 left out, or put in twice."""
    served = {resource.canonical for resource in request.app.router.resources()}
    for meant in ("/v1" + request.path, request.path.removeprefix("/v1")):
        if meant != request.path and meant in served:
            return f" It is {meant}: a client's base URL ends in /v1, once."
    return ""
