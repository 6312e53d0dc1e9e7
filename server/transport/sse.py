"""The stream writer: Deltas → server-sent events → the connection, on the event loop and without a task per token.

Each engine request of a stream has a Source, which is its sink. While the connection takes bytes, a Source formats
an event and writes it to the transport inside the engine's call. Before the response has begun, and while the client
lags (the transport is above its high-water mark), it holds what comes and merges it per choice, so a lagging stream
costs the memory of its text and gets it in one event. The handler's task sleeps on one future, and is woken for the
first event, to wait for a lagging client, and at the end. Hidden states, which may be large, are written by that task,
piece by piece, before the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from aiohttp import web
from aiohttp.http_writer import StreamWriter
from msgspec import structs

from bequest.engine.text.outlets import Outlet
from bequest.engine.types import ChoiceDelta, Delta, TokenLogprob
from bequest.server.access.in_flight import Held
from bequest.server.access.marks import TENANT
from bequest.server.context import CONTEXT
from bequest.server.transport.noting import note_error
from bequest.server.transport.opening import KEEP_ALIVE, begin, log_failure
from bequest.server.transport.pieces import Piece, release
from bequest.server.transport.sending import drained
from bequest.server.wire.errors import ApiError, from_engine, internal

_log = logging.getLogger("bequest.server")

_DONE = b"data: [DONE]\n\n"
# What Python keeps of a token and of a log-probability, about, while they are held.
_TOKEN_BYTES, _LOGPROB_BYTES = 32, 256


class ChunkFormat(Protocol):
    """Writes the events of one engine request."""

    def event(self, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None) -> bytes:
        """An event; empty if there is nothing a client would see.

        `opening` is the first delivery, given with the first event, which names every choice; `ending` is the last
        delivery, given with the last event. What else these two deliveries tell is the event's to tell.
        """

    def around_text(self) -> tuple[bytes, bytes] | None:
        """What stands around the text, as a string of JSON, in an event that tells of nothing but that of the first
        choice. None: there are others, or no event is so plain."""
        return None


class Ending(Protocol):
    """Writes what follows the last event of every source."""

    def finished(self, endings: Sequence[Delta]) -> bytes:
        """The end of a whole answer; `endings` has the last delivery of each source."""

    def failed(self, error: ApiError) -> bytes:
        """The end of an answer that something went wrong with."""


class Done:
    """The ending of chunks: [DONE], whatever happened."""

    def __init__(self, usage_event: Callable[[Sequence[Delta]], bytes]) -> None:
        """`usage_event` makes the last chunk; empty if the client did not ask for it."""
        self._usage_event = usage_event

    def finished(self, endings: Sequence[Delta]) -> bytes:
        return self._usage_event(endings) + _DONE

    @staticmethod
    def failed(error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + _DONE


class _Held:
    """What one choice gained while it could not be sent."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.last: ChoiceDelta | None = None

    def add(self, choice: ChoiceDelta) -> None:
        self.text.append(choice.text)
        self.token_ids.extend(choice.token_ids)
        self.logprobs.extend(choice.logprobs or ())
        self.last = choice

    def merged(self) -> ChoiceDelta:
        assert self.last is not None
        return structs.replace(
            self.last,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.last.logprobs is None else tuple(self.logprobs),
        )


def _num_bytes(choice: ChoiceDelta) -> int:
    alternatives = sum(1 + len(logprob.top) for logprob in choice.logprobs or ())
    return len(choice.text) + _TOKEN_BYTES * len(choice.token_ids) + _LOGPROB_BYTES * alternatives


class Source:
    """The sink of one engine request in a stream."""

    def __init__(self, stream: EventStream, chunks: ChunkFormat) -> None:
        self._stream = stream
        self._chunks = chunks
        self._held: dict[int, _Held] = {}
        self._opening: Delta | None = None  # the first delivery, until its event is written
        self._ending: Delta | None = None  # the last one, likewise
        self._begun = False  # the first event has been written
        around = chunks.around_text()
        self.outlet = None if around is None else Outlet(*around)  # open while nothing is held
        self._num_bytes = 0  # of what is held
        self.finished = False

    def __call__(self, delta: Delta) -> None:
        try:
            stream = self._stream
            if self._held or not self._begun or delta.usage is not None or delta.error is not None or stream.blocked:
                self._take(delta)
            else:
                stream.write(self._chunks.event(delta.choices))
        except Exception:
            # The engine's loop must not suffer from a bug here, nor may the client take half an answer for a whole.
            _log.exception("stream %s", delta.request_id)
            self._stream.fail(internal(delta.request_id))

    def _take(self, delta: Delta) -> None:
        """One that cannot be written now, or that is the last."""
        stream = self._stream
        self._hold(delta)
        if delta.usage is None and delta.error is None:
            stream.wake()
            return
        self.finished = True
        if delta.error is not None:
            stream.fail(from_engine(delta.error))
        else:
            self._ending = delta
            stream.finish(delta)

    def _hold(self, delta: Delta) -> None:
        self.close()
        if self._opening is None and not self._begun:
            self._opening = delta
        for choice in delta.choices:
            held = self._held.get(choice.index)
            if held is None:
                held = self._held[choice.index] = _Held()
            held.add(choice)
        self._account(sum(map(_num_bytes, delta.choices)))

    def _account(self, more: int) -> None:
        self._num_bytes += more
        self._stream.account(more)

    @property
    def holds(self) -> bool:
        return bool(self._held or self._ending)

    def open(self, connection: _Connection) -> None:
        """What comes need not be held."""
        if self.outlet is not None and self._begun and not self.finished:
            connection.open(self.outlet)

    def close(self) -> None:
        if self.outlet is not None:
            self.outlet.close()

    @property
    def num_written(self) -> int:
        """Events that went through the outlet."""
        return 0 if self.outlet is None else self.outlet.num_written

    def flush(self) -> bytes:
        """The event of everything held."""
        if not self._held and self._ending is None:
            return b""
        choices = [held.merged() for _, held in sorted(self._held.items())]
        self._held.clear()
        self._account(-self._num_bytes)
        opening, self._opening = self._opening, None
        ending, self._ending = self._ending, None
        self._begun = True
        return self._chunks.event(choices, opening, ending)


class _Connection:
    """A response that has begun, as the sources write to it: straight to the transport."""

    __slots__ = ("_protocol", "_transport", "chunked")

    def __init__(self, writer: StreamWriter) -> None:
        assert writer.transport is not None
        self._protocol = writer.protocol
        self._transport = writer.transport
        self.chunked = writer.chunked  # HTTP/1.0 has no chunks, there the connection's end is the body's

    @property
    def blocked(self) -> bool:
        return self._protocol.writing_paused or self._transport.is_closing()

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def open(self, outlet: Outlet) -> None:
        outlet.open(self._transport, self._protocol, self.chunked)

    def write(self, event: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self.chunked else event)

    def write_piece(self, piece: Piece) -> None:
        """Of an event that is too large for one write."""
        self._transport.writelines((b"%x\r\n" % len(piece), piece, b"\r\n") if self.chunked else (piece,))

    def write_last(self, events: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events) if self.chunked else events)


class EventStream:
    """One streamed answer: its sources, and the connection they share."""

    def __init__(
        self,
        ending: Ending,
        keep_alive: float,
        states: Callable[[Sequence[Delta]], AsyncIterator[Piece]] | None = None,
    ) -> None:
        """`states` makes the pieces of the event with hidden states, if the client wants any, from the last delivery of
        each source."""
        self._ending = ending
        self._states = states
        self._keep_alive = keep_alive
        self._sources: list[Source] = []
        self._endings: list[Delta] = []
        self._error: ApiError | None = None
        self._wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection: _Connection | None = None  # None: the response has not begun
        self._writes_states = False  # the event with hidden states is under way
        self._wrote = False  # since the last look of the keep-alive clock
        self._closed = False  # the last byte has been handed to the transport
        self._held: Held | None = None  # of what the sources hold for a client that lags

    def add_source(self, chunks: ChunkFormat) -> Source:
        source = Source(self, chunks)
        self._sources.append(source)
        return source

    # --- called by the sources, inside the engine's delivery

    @property
    def blocked(self) -> bool:
        """True while nothing may be written: not begun, or ended, or the client lags or is gone."""
        connection = self._connection
        return connection is None or self._closed or self._writes_states or connection.blocked

    def write(self, event: bytes) -> None:
        """REQUIRES: not blocked."""
        if event and self._connection is not None:
            self._wrote = True
            self._connection.write(event)

    def account(self, num_bytes: int) -> None:
        """A source holds so much more, or less. A client that does not read is cut off where there is no room for it:
        it can be told nothing."""
        if self._held is None or self._connection is None:
            return
        try:
            self._held.grow(num_bytes)
        except ApiError as full:
            _log.info("a client that does not read its stream is dropped: %s", full.message)
            self._connection.abort()

    def finish(self, ending: Delta) -> None:
        self._endings.append(ending)
        if self._ended and self._states is None and not self.blocked:
            self._write_end()
        self.wake()

    def fail(self, error: ApiError) -> None:
        if self._error is None:
            self._error = error
        if not self.blocked:
            self._write_end()
        self.wake()

    def wake(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    # --- called by the handler's task

    async def wait_first(self) -> None:
        """Returns when there is something to send, be it a keep-alive comment; raises what went wrong before that."""
        if self._keep_alive > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._keep_alive):
                    await asyncio.shield(self._wake)
                await self._woken()
        else:
            await self._woken()
        if self._error is not None:
            raise self._error

    async def run(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        """Sends everything until the end. Cancelled when the client goes away."""
        self._held = request.app[CONTEXT].in_flight.held_by(request[TENANT])
        try:
            return await self._run(request, headers)
        finally:
            self._held.release()

    async def _run(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        response = begin(request, headers)
        writer = await response.prepare(request)
        assert isinstance(writer, StreamWriter)
        if writer.transport is None:
            raise ConnectionResetError("the client went away")
        self._connection = _Connection(writer)
        if not self._ended and not any(source.holds for source in self._sources):
            self.write(KEEP_ALIVE)  # so long does the first event take
        while not self._closed:
            await drained(writer, self._holds_states)
            if self._connection.closing:
                raise ConnectionResetError("the client went away")
            if self._ended and self._states is not None:
                await self._write_states(writer)
            self._flush()
            if not self._closed:
                await self._woken_or_silent()
        if self._error is not None:
            note_error(request, self._error)
            log_failure(self._error)
        # The terminating chunk has been sent with the last event: aiohttp must not send another.
        writer.chunked = False
        await response.write_eof()
        return response

    def release(self) -> None:
        """Gives back the hidden states that were not sent, and the connection."""
        release(*self._endings)
        self._close_outlets()

    def _close_outlets(self) -> None:
        for source in self._sources:
            source.close()

    def _holds_states(self) -> bool:
        return self._states is not None and bool(self._endings)

    async def _write_states(self, writer: StreamWriter) -> None:
        """After the last choice has finished, and unless something went wrong, the event with hidden states."""
        make, self._states = self._states, None
        assert make is not None and self._connection is not None
        if self._error is not None:
            return
        self.write(b"".join(source.flush() for source in self._sources))
        self._writes_states = True
        async for piece in make(self._endings):
            self._connection.write_piece(piece)
            await drained(writer)
            if self._connection.closing:
                raise ConnectionResetError("the client went away")
        self._writes_states = False
        self.release()

    async def _woken(self) -> None:
        await self._wake
        self._wake = asyncio.get_running_loop().create_future()

    async def _woken_or_silent(self) -> None:
        """Sleeps until a source wakes it; meanwhile sends a comment after each silent interval, if there is one."""
        while self._keep_alive > 0:
            self._wrote = False
            before = self._num_passed
            try:
                async with asyncio.timeout(self._keep_alive):
                    await asyncio.shield(self._wake)
                break
            except TimeoutError:
                if not self._wrote and before == self._num_passed and not self.blocked:
                    self.write(KEEP_ALIVE)
        await self._woken()

    @property
    def _num_passed(self) -> int:
        return sum(source.num_written for source in self._sources)

    def _flush(self) -> None:
        if self._ended:
            self._write_end()
            return
        assert self._connection is not None
        for source in self._sources:
            if not self.blocked:
                self.write(source.flush())
                source.open(self._connection)
        if self.blocked and any(source.holds for source in self._sources):
            self.wake()

    @property
    def _ended(self) -> bool:
        return self._error is not None or len(self._endings) == len(self._sources)

    def _write_end(self) -> None:
        """Everything that is left, the last events and the end of the body, in one write."""
        if self._closed:
            return
        self._closed = True
        self._close_outlets()
        ending = self._ending
        try:
            events = [source.flush() for source in self._sources]
            events.append(ending.finished(self._endings) if self._error is None else ending.failed(self._error))
        except Exception:
            # A stream without its end would keep the client waiting for ever.
            _log.exception("the end of a stream")
            self._error = self._error or internal(self._endings[-1].request_id if self._endings else "")
            events = [ending.failed(self._error)]
        assert self._connection is not None
        self._connection.write_last(b"".join(events))
