"""Runs the extractions of one HTTP request, one for each of its inputs, and keeps their states until they are sent.

An input's states hold memory of the engine's until they are released. Pooled ones are small: they are made at once, and
what they are made of is released. Other states of several inputs are kept together, for which room is taken first
(server/stores/room.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from bequest.engine.errors import QueueFull
from bequest.engine.types import Delta, Request, Usage
from bequest.engine.types.states import ChoiceStates
from bequest.server.answers.encoding import Assembled, States
from bequest.server.answers.running import give_up
from bequest.server.asks.wish import held_bytes
from bequest.server.context import Context
from bequest.server.transport.pieces import release
from bequest.server.wire.errors import from_engine

# Inputs of one HTTP request that the engine knows of at a time: enough to fill its steps, and no more than a part of
# its queue.
_MOST_SUBMITTED = 128
_INLINE_BYTES = 1 << 16  # half a millisecond


@dataclass(frozen=True, slots=True)
class Extracted:
    """What came of one input."""

    states: States
    usage: Usage
    computed_tokens: int
    delivery: Delta


@asynccontextmanager
async def extracted(context: Context, requests: Sequence[Request]) -> AsyncIterator[list[Extracted]]:
    """The states of every request, in their order; released on leaving. The first error ends them all.

    REQUIRES: requests that differ in their prompts alone, and whose states fit the budget together.
    """
    wanted = requests[0].hidden_states
    assert wanted is not None
    together = len(requests) > 1 and wanted.pooling == "none"
    needed = sum(held_bytes(wanted, request, context.engine.info) for request in requests) if together else 0
    async with context.room.taken(needed, requests[0].deadline):
        run = _Run(context, requests)
        try:
            yield await run.results()
        finally:
            run.close()


class _Run:
    def __init__(self, context: Context, requests: Sequence[Request]) -> None:
        self._context = context
        self._requests = requests
        self._waiting = deque(enumerate(requests))  # the engine does not know of them yet
        self._running: dict[int, Request] = {}
        self._arrived: deque[tuple[int, Delta]] = deque()
        self._done: dict[int, Extracted] = {}
        self._wake = asyncio.Event()

    async def results(self) -> list[Extracted]:
        while self._waiting or self._running or self._arrived:
            self._submit()
            await self._wake.wait()
            self._wake.clear()
            while self._arrived:
                await self._take(*self._arrived[0])
                self._arrived.popleft()
        return [result for _, result in sorted(self._done.items())]

    def close(self) -> None:
        """Aborts what still runs, and gives back what is held."""
        for request in self._running.values():
            self._context.engine.abort(request.id)
        self._running.clear()
        if len(self._done) < len(self._requests):
            give_up(self._context.engine, self._requests)
        release(*(delta for _, delta in self._arrived), *(done.delivery for done in self._done.values()))

    def _submit(self) -> None:
        """As many as may be. A queue that is full of others' is waited for while some of ours are in it."""
        while self._waiting and len(self._running) < _MOST_SUBMITTED:
            index, request = self._waiting[0]
            try:
                self._context.engine.submit(request, partial(self._on_delta, index))
            except QueueFull:
                if not self._running:
                    raise
                return
            self._running[index] = request
            self._waiting.popleft()

    def _on_delta(self, index: int, delta: Delta) -> None:
        if delta.finished and self._running.pop(index, None) is not None:
            self._arrived.append((index, delta))
            self._wake.set()

    async def _take(self, index: int, delta: Delta) -> None:
        if delta.error is not None:
            raise from_engine(delta.error)
        found, usage = delta.hidden_states, delta.usage
        assert found is not None and usage is not None
        self._context.metrics.on_states(found, "prompt")
        [states] = found.choices
        if states.pooling == "none":
            self._done[index] = Extracted(states, usage, found.computed_tokens, delta)
            return
        pooled = await _assembled(self._context, states)
        release(delta)
        self._done[index] = Extracted(pooled, usage, found.computed_tokens, structs.replace(delta, hidden_states=None))


async def _assembled(context: Context, states: ChoiceStates) -> Assembled:
    if is_small([states]):
        values = states.assemble()
    else:
        values = await asyncio.get_running_loop().run_in_executor(context.encoder, states.assemble)
    return Assembled(states.layers, states.positions, states.dtype, values)


def is_small(answers: Sequence[States]) -> bool:
    """Whether so few numbers are read and written that it may be done in the event loop."""
    return sum(map(_num_bytes, answers)) <= _INLINE_BYTES


def _num_bytes(states: States) -> int:
    read = sum(part.values.nbytes for part in states.parts) if isinstance(states, ChoiceStates) else 0
    return max(states.num_bytes, read)
