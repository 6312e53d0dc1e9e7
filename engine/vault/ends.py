"""Ends of answers, held back until files say whether their leases last, or for a while. Event-loop thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from bequest.engine.state.record import Record
from bequest.engine.types import Delta, Retained


@dataclass(frozen=True, slots=True)
class _End:
    record: Record
    waiting: asyncio.Task[None]
    tell: Callable[[str | None], None]  # why the lease is not in files; None: it is


class HeldBack:
    """By request."""

    def __init__(self, wait: float) -> None:
        """`wait`: seconds that the end of an answer waits for the disk."""
        self._wait = wait
        self._ends: dict[str, _End] = {}

    def add(
        self,
        record: Record,
        delta: Delta,
        retained: Retained,
        storing: asyncio.Task[str | None],
        send: Callable[[Delta], None],
    ) -> None:
        """`send` gets `delta`, with the result of `storing`."""

        def tell(why: str | None) -> None:
            del self._ends[delta.request_id]
            told = replace(retained, durable=why is None, durable_reason=why)
            send(msgspec.structs.replace(delta, retained=told))

        async def finish() -> None:
            done, _ = await asyncio.wait({storing}, timeout=self._wait)
            tell(storing.result() if done else f"it takes longer than {self._wait:g} s; it may still come true")

        self._ends[delta.request_id] = _End(record, asyncio.ensure_future(finish()), tell)

    def drop(self, request_id: str) -> Record | None:
        """Nobody waits for it any more: the record of the request. None: it is not held back."""
        if (end := self._ends.pop(request_id, None)) is None:
            return None
        end.waiting.cancel()
        return end.record

    def waiting(self) -> set[asyncio.Task[None]]:
        return {end.waiting for end in self._ends.values()}

    def tell_all(self, why: str) -> None:
        """They wait no longer."""
        for end in list(self._ends.values()):
            end.waiting.cancel()
            end.tell(why)
