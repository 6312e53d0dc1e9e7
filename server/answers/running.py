"""Requests while they run: submitted together, collected, and aborted where nobody waits for them any more.

Leaving the `with` block of a Job aborts whatever has not finished, whichever way it was left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Protocol, Self

from bequest.engine.errors import EngineError
from bequest.engine.types import (
    BeamChoices,
    ChoiceDelta,
    Delta,
    Request,
    TokenLogprob,
    Usage,
)
from bequest.server.interfaces import EngineLike
from bequest.server.transport.pieces import release
from bequest.server.wire.errors import from_engine


class _EndedSink(Protocol):
    @property
    def finished(self) -> bool: ...

    def __call__(self, delta: Delta) -> None: ...


class Job:
    """The engine requests of one HTTP request: submitted together, and aborted where unfinished on leaving."""

    def __init__(
        self, engine: EngineLike, requests: Sequence[Request], sinks: Sequence[_EndedSink], *, goes_on: bool = False
    ) -> None:
        """`goes_on`: with a long answer (`long_answer`)."""
        self._engine = engine
        self._goes_on = goes_on
        self._pairs = list(zip(requests, sinks, strict=True))
        self._submitted: list[tuple[Request, _EndedSink]] = []

    def __enter__(self) -> Self:
        try:
            for request, sink in self._pairs:
                self._engine.submit(request, sink, goes_on=self._goes_on)
                self._submitted.append((request, sink))
        except EngineError as error:
            self._abort(failed=True)
            raise from_engine(error) from error
        except BaseException:
            self._abort(failed=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort(failed=kind is not None)

    def _abort(self, failed: bool) -> None:
        unfinished = [request for request, sink in self._submitted if not sink.finished]
        for request in unfinished:
            self._engine.abort(request.id)
        if failed or unfinished:
            give_up(self._engine, [request for request, _ in self._pairs])


def give_up(engine: EngineLike, requests: Sequence[Request]) -> None:
    """One answer of these is not given, though some of them may have ended. Whoever asks again has the same name for
    it."""
    first = requests[0]
    if len(requests) > 1 and first.terms.name is not None:
        engine.free_name(first.tenant, first.id)


class Collector:
    """The sink of a request whose answer is sent whole."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self._done = done
        self._choices: dict[int, ChoiceDelta] = {}
        self.beams: BeamChoices | None = None  # instead of choices, where they came as columns
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self.usage: Usage | None = None
        self.delivery = Delta("")  # the last one; with OutputMode.FINAL the only one
        self.finished = False

    @property
    def choices(self) -> dict[int, ChoiceDelta]:
        """By number."""
        if self.beams is not None and not self._choices:
            self._choices = dict(enumerate(self.beams))
        return self._choices

    def __call__(self, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if type(delta.choices) is BeamChoices:
            self.beams = delta.choices
        else:
            for choice in delta.choices:
                self._choices[choice.index] = choice
        self.delivery, self.usage, self.finished = delta, delta.usage, delta.finished
        if self._done.done():
            return
        if delta.error is not None:
            self._done.set_exception(from_engine(delta.error))
        elif self.finished:
            self._done.set_result(None)


@asynccontextmanager
async def long_answer(engine: EngineLike) -> AsyncIterator[None]:
    """For an answer of several Jobs, one behind the other, that go on with it."""
    try:
        async with engine.long_answer():
            yield
    except EngineError as error:
        raise from_engine(error) from error


async def collect(engine: EngineLike, requests: Sequence[Request], *, goes_on: bool = False) -> list[Collector]:
    """Runs the requests to their end; the first error ends them all. Cancelled when the client goes away.

    REQUIRES: OutputMode.FINAL
    """
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]
    collectors = [Collector(end) for end in ends]
    with Job(engine, requests, collectors, goes_on=goes_on):
        try:
            await (ends[0] if len(ends) == 1 else asyncio.gather(*ends))
        except BaseException:
            release(*(collector.delivery for collector in collectors))
            raise
    return collectors
