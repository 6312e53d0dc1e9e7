"""A connection: clients that send too slowly, vanish or stop reading do not hold it for ever, and what never becomes a
request (a malformed head, for example) is answered in JSON too."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler

from bequest.server.access.marks import TENANT
from bequest.server.context import CONTEXT
from bequest.server.wire.errors import ApiError, internal, too_slow
from bequest.server.wire.names import new_id

_log = logging.getLogger("bequest.server")

# Seconds: silence after which the kernel asks whether the client is there, between its questions, and how long it may
# leave what was sent unread or unacknowledged.
_PROBE_AFTER, _PROBE_EVERY, _UNREAD = 60, 10, 120
_PROBES = 3
_SILENT = 2.0  # seconds without a byte, after which one that was told to stop sending has stopped
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_LOOK, _LAST_LOOK = 0.005, 0.25  # seconds between looks whether a client is there that sends no more
_MOST_HEAD = 8190  # bytes of a line of the head: aiohttp's own limit


class JsonProtocol(RequestHandler):
    """REQUIRES: aiohttp's handler has `_messages` (parsed, not begun) and `_current_request`; it tells of neither."""

    __slots__ = ("_client_timeout", "_head_began", "_head_timer", "_looking", "_silence_timer", "_unanswered")

    def __init__(self, manager: web.Server, *, client_timeout: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._client_timeout = client_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_began = False
        self._silence_timer: asyncio.TimerHandle | None = None
        self._unanswered: tuple[Any, StreamReader] | None = None  # the latest request, while nothing answers it
        self._looking: asyncio.TimerHandle | None = None  # whether one that sends no more is still there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _bound_silence(transport.get_extra_info("socket"))
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._unanswered = self._messages[-1]
        if self._silence_timer is not None:
            self._await_silence()
        elif self._messages or self._current_request is not None:
            self._stop_waiting()
        else:
            self._head_began = True
            if self._head_timer is None:
                self._await_head()

    @property
    def busy(self) -> bool:
        """A request is being answered, or its answer has not left."""
        unsent = self.transport is not None and self.transport.get_write_buffer_size() > 0
        return self._current_request is not None or unsent

    def eof_received(self) -> bool:  # type: ignore[override]  # the library's never keeps a connection open
        """The client sends no more: it has left, or it closed its side alone and waits for the answer.

        Both look the same until something is sent. So it is sent an interim answer, which every client of HTTP/1.1 must
        take; the system of one that has left resets the connection. True: the connection stays open for the answer.
        """
        if self.transport is None or not self._awaits_answer or not self.transport.can_write_eof():
            return False  # over TLS nobody can close one side alone
        self.transport.write(_INTERIM)
        self.close()  # behind the answer
        self._look(_FIRST_LOOK)
        return True

    @property
    def _awaits_answer(self) -> bool:
        """A request came whole, and nothing of its answer was sent."""
        if self._unanswered is None:
            return False
        message, content = self._unanswered
        begun = self._current_request is not None and self._current_request.writer.output_size > 0
        known = isinstance(message, RawRequestMessage) and message.version >= HttpVersion11
        return known and content.is_eof() and not begun

    def _look(self, seconds: float) -> None:
        if self.transport is None:
            return
        if _is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
            return
        self._looking = self._loop.call_later(seconds, self._look, min(2 * seconds, _LAST_LOOK))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        if self._looking is not None:
            self._looking.cancel()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """An answer that ends the connection before its request was read: the client sees the end at once, and what it
        still sends is thrown away for a while, because a socket that is closed on it would take the answer back."""
        if not self._messages:
            self._unanswered = None
        with _counted(request, resp):
            result = await super().finish_response(request, resp, start_time)
        transport = self.transport
        if (
            not resp.keep_alive
            and not request.content.is_eof()
            and transport is not None
            and not transport.is_closing()
        ):
            if transport.can_write_eof():
                transport.write_eof()
            self._await_silence()
        return result

    def _await_silence(self) -> None:
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._silence_timer = self._loop.call_later(_SILENT, self._fell_silent)

    def _fell_silent(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._client_timeout, self._head_is_late)

    def _stop_waiting(self) -> None:
        self._head_began = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        """One that began to ask is told; a browser's spare connection is closed without a word."""
        self._head_timer = None
        if self.transport is None:
            return
        if self._head_began:
            body = too_slow(self._client_timeout).body()
            head = f"HTTP/1.1 408 Request Timeout\r\nX-Request-Id: {new_id('req-')}\r\nConnection: close\r\n"
            kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(f"{head}{kind}".encode() + body)
        self.transport.close()

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
            error = _malformed(exc)
            answer_id = new_id("req-")
        response = error.response()
        response.headers["X-Request-Id"] = answer_id
        response.headers["Server"] = "bequest"
        response.force_close()
        return response


@contextmanager
def _counted(request: web.BaseRequest, response: web.StreamResponse) -> Iterator[None]:
    """A whole answer is held until its client has read nearly all of it."""
    body = response.body if isinstance(response, web.Response) else None
    if not isinstance(request, web.Request) or TENANT not in request or not isinstance(body, bytes):
        yield
        return
    in_flight, tenant = request.app[CONTEXT].in_flight, request[TENANT]
    in_flight.add(tenant, len(body))
    try:
        yield
    finally:
        in_flight.add(tenant, -len(body))


def _malformed(exc: BaseException | None) -> ApiError:
    """Of bytes that never became a request."""
    if isinstance(exc, LineTooLong):
        message = f"The request's first line, or one of its headers, is longer than {_MOST_HEAD} bytes."
        return ApiError(431, "request_too_large", message, details={"limit": _MOST_HEAD})
    told = exc.message if isinstance(exc, BadHttpMessage) else ""
    reason = told.partition("\n")[0].strip().rstrip(":.")
    return ApiError(400, "invalid_value", f"The request is not valid HTTP/1.1{': ' * bool(reason)}{reason[:100]}.")


def _is_reset(connection: socket.socket | None) -> bool:
    if connection is None:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # errors and hang-ups are told unasked
    return bool(poll.poll(0))


def _bound_silence(connection: socket.socket | None) -> None:
    """A client that vanished, or that never reads, is one that left."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER),
        ("TCP_KEEPINTVL", _PROBE_EVERY),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _UNREAD * 1000),
    ):
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, int(value))
