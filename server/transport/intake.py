"""How a body comes in: its head is judged first, so that nothing is read in vain."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic

from aiohttp import HttpVersion11, web

from bequest.server.access.keys import Caller
from bequest.server.access.marks import CALLER, HELD, LIGHT, TENANT
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.decoding import Decoder
from bequest.server.transport.replies import error_response
from bequest.server.transport.work import INLINE_BYTES
from bequest.server.wire import fields
from bequest.server.wire.bodies import Body
from bequest.server.wire.errors import ApiError, too_slow
from bequest.server.wire.inline_files import file_bytes
from bequest.server.wire.reading import parse_large_object, parse_object
from bequest.server.wire.structure import Counts, Structure, structure_of

_PROGRESS_BYTES = 1 << 14  # of a body, that buy its sender another --client-timeout
_CHUNK_BYTES = 64  # of a chunk beside its content
_SMALL = 1 << 16  # bytes of bodies that say next to nothing
_ONE_GO = 1 << 20  # bytes of bodies that are counted, parsed and typed in one go,
_LONG_STRINGS = 4  # if they take no more memory than this many times: if they are a few long strings, that is
_FEW_PARTS = 512  # of a body that may be light


@dataclass(frozen=True, slots=True)
class BodyLimit:
    num_bytes: int
    origin: str  # what sets it, for the message

    def check(self, num_bytes: int) -> None:
        if num_bytes > self.num_bytes:
            raise self.error()

    def error(self) -> ApiError:
        return ApiError(
            413,
            "request_too_large",
            f"The body is larger than this server takes: {self.num_bytes} bytes ({self.origin}).",
            details={"limit": self.num_bytes},
        )


async def read_body(request: web.Request, context: Context, kind: type[Body]) -> tuple[Body, list[str]]:
    """The JSON body of a request, typed, and the names of the fields that were ignored. A large one is counted, parsed
    and typed in the worker threads."""
    check_head(request, context)
    chunks = await _whole(request, body_limit(context))
    if HELD not in request:
        return _typed(parse_object(b"".join(chunks)), kind)
    held, tenant = request[HELD], request[TENANT]
    most = Counts(context.config.max_body_values, context.config.max_body_parts)
    received = sum(map(len, chunks))
    if received <= _ONE_GO:
        with suppress(ApiError):  # where there is no room for it, it may turn out to need less
            held.resize(_LONG_STRINGS * received)
    room = held.num_bytes

    def look() -> tuple[bytes, Structure, _Read[Body] | None]:
        whole = b"".join(chunks)
        chunks.clear()
        structure = structure_of(whole, most)
        return whole, structure, _read(whole, structure, kind) if _needed(whole, structure) <= room else None

    data, structure, read = await context.pool.run(tenant, look)
    if read is None:
        held.resize(_needed(data, structure))
        read = await context.pool.run(tenant, lambda: _read(data, structure, kind))
    held.resize(structure.num_bytes)  # the text itself is let go
    if read.is_light:
        request[LIGHT] = True
    return read.body, read.ignored


@dataclass(frozen=True, slots=True)
class _Read(Generic[Body]):
    body: Body
    ignored: list[str]
    is_light: bool


def _read(data: bytes, structure: Structure, kind: type[Body]) -> _Read[Body]:
    value = parse_large_object(data, structure)
    is_light = structure.parts <= _FEW_PARTS and len(data) - file_bytes(value) <= INLINE_BYTES
    return _Read(*_typed(value, kind), is_light)


def _needed(data: bytes, structure: Structure) -> int:
    """Bytes, while it is parsed: strings are put together from their pieces."""
    return len(data) + 2 * structure.num_bytes


async def typed_body(context: Context, caller: Caller, data: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """The same of a body that did not come over a connection."""
    _of_key(caller, body_limit(context)).check(len(data))
    if len(data) <= INLINE_BYTES:
        return _typed(parse_object(data), kind)
    most = Counts(context.config.max_body_values, context.config.max_body_parts)

    def work() -> tuple[Body, list[str]]:
        return _typed(parse_large_object(data, structure_of(data, most)), kind)

    return await context.pool.run(caller.tenant, work)


async def read_with_nulls(request: web.Request, context: Context) -> dict[str, Any]:
    """The JSON object of a request, where null says something. A small one."""
    check_head(request, context)
    return parse_object(b"".join(await _whole(request, BodyLimit(_SMALL, "at this path"))))


def _typed(value: dict[str, Any], kind: type[Body]) -> tuple[Body, list[str]]:
    return fields.read({name: given for name, given in value.items() if given is not None}, kind)


async def _whole(request: web.Request, limit: BodyLimit) -> list[bytes]:
    """A body's bytes. Those of one that is not small are accounted for as they come."""
    chunks: list[bytes] = []
    received = 0
    if _is_whole(request):
        data = _at_once(request, limit)
        hold(request, len(data) + _CHUNK_BYTES)
        return [data]
    async for chunk in body_chunks(request, limit):
        chunks.append(chunk)
        received += len(chunk)
        hold(request, received + _CHUNK_BYTES * len(chunks))
    return chunks


def hold(request: web.Request, num_bytes: int) -> None:
    """Accounts for what a request holds, unless it is small."""
    if HELD in request:
        request[HELD].resize(num_bytes)
    elif num_bytes > INLINE_BYTES:
        request[HELD] = request.app[CONTEXT].in_flight.held_by(request[TENANT])
        request[HELD].resize(num_bytes)


class Patience:
    """With a client that sends: for each of a body's pieces it has --client-timeout seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._clock = asyncio.get_running_loop().time
        self._due, self._progress = self._clock() + seconds, 0

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Raises 408 when it is over."""
        try:
            async with asyncio.timeout_at(self._due):
                yield
        except TimeoutError:
            raise too_slow(self._seconds) from None

    def received(self, num_bytes: int) -> None:
        self._progress += num_bytes
        if self._progress >= _PROGRESS_BYTES:
            self._due, self._progress = self._clock() + self._seconds, 0


async def body_chunks(request: web.Request, limit: BodyLimit) -> AsyncIterator[bytes]:
    """A body as it comes in."""
    if _is_whole(request):
        yield _at_once(request, limit)
        return
    limit = of_caller(request, limit)
    patience = Patience(request.app[CONTEXT].config.client_timeout)
    decoder = Decoder(request.headers.get("Content-Encoding", ""))
    chunks = request.content.iter_any()
    received = 0
    while True:
        try:
            async with patience.waiting():
                data = await anext(chunks)
        except StopAsyncIteration:
            break
        except (ApiError, ConnectionError):
            raise
        except Exception as error:
            raise _broken() from error
        patience.received(len(data))
        try:
            for piece in decoder.feed(data):
                received += len(piece)
                limit.check(received)
                yield piece
                if len(piece) > len(data):
                    await asyncio.sleep(0)  # a little may become a lot, and others wait
        except zlib.error as error:
            raise _broken() from error
    try:
        decoder.end()
    except zlib.error as error:
        raise _broken() from error


def _is_whole(request: web.Request) -> bool:
    """Whether the body came with its head, as short ones do: nobody has to be waited for. A compressed one is unpacked
    as it is read."""
    length = request.content_length
    if not length or "Content-Encoding" in request.headers:
        return False
    content = request.content
    return content.is_eof() and content.exception() is None and content.total_bytes == length


def _at_once(request: web.Request, limit: BodyLimit) -> bytes:
    """REQUIRES: it is whole."""
    data = request.content.read_nowait()
    of_caller(request, limit).check(len(data))
    return data


def _broken() -> ApiError:
    """aiohttp has several exceptions for a body that is cut off or wrongly encoded."""
    return ApiError(400, "invalid_json", "The body could not be read: its framing or its Content-Encoding is broken.")


def check_head(request: web.BaseRequest, context: Context) -> None:
    if request.content_type != "application/json":
        shown = request.headers.get("Content-Type", "none")[:100]
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The Content-Type must be application/json, not {shown}; "
            "with curl add -H 'Content-Type: application/json', or use --json.",
        )
    of_caller(request, body_limit(context)).check(request.content_length or 0)


def body_limit(context: Context) -> BodyLimit:
    return _limit_of(context.config.max_body_mb)


@cache
def _limit_of(megabytes: float) -> BodyLimit:
    return BodyLimit(int(megabytes * 2**20), f"--max-body-mb {megabytes:g}")


def of_caller(request: web.BaseRequest, limit: BodyLimit) -> BodyLimit:
    """The limit, or the key's own if that is smaller."""
    return _of_key(request[CALLER], limit)


def _of_key(caller: Caller, limit: BodyLimit) -> BodyLimit:
    most = caller.limits.max_body_mb
    if most is None or most * 2**20 >= limit.num_bytes:
        return limit
    return BodyLimit(int(most * 2**20), f"max_body_mb {most:g} of this key")


Expectation = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def expect_continue(check: Callable[[web.Request, Context], None] = check_head) -> Expectation:
    """Answers `Expect: 100-continue`: refuses with the error that the body would get, or asks for the body. A client
    of HTTP/1.0 would take that for the answer."""

    async def answer(request: web.Request) -> web.StreamResponse | None:
        context = request.app[CONTEXT]
        if request.version < HttpVersion11:
            return None
        if request.headers["Expect"].lower() != "100-continue":
            return _closing(request, unmet_expectation())
        try:
            request[CALLER] = context.gate.caller(request)
            if request.method in ("POST", "PUT", "PATCH"):
                check(request, context)
        except ApiError as error:
            return _closing(request, error)
        if request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    return answer


def unmet_expectation() -> ApiError:
    return ApiError(417, "invalid_value", "The only expectation this server meets is 'Expect: 100-continue'.")


def _closing(request: web.Request, error: ApiError) -> web.Response:
    response = error_response(request, error)
    response.force_close()
    return response
