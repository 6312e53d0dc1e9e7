"""Requests that wait for their parents, by the names that clients gave them.

The engine does not know a request before its parent has ended. Whoever continues one that still waits would be told
that there is no such request; instead it waits in turn. Owned by the event-loop thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bequest.engine.errors import DeadlineExceeded


class _End(NamedTuple):
    comes: asyncio.Future[None]
    parent: str  # what it waits for


class Coming:
    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], _End] = {}  # by tenant and name

    @contextmanager
    def waiting(self, tenant: str, name: str | None, parent: str | None) -> Iterator[None]:
        """While the block runs, the request of that name is on its way. A name that is taken stays the first one's."""
        key = (tenant, name or "")
        if name is None or parent is None or key in self._ends:
            yield
            return
        end = self._ends[key] = _End(asyncio.get_running_loop().create_future(), parent)
        try:
            yield
        finally:
            del self._ends[key]
            end.comes.set_result(None)

    async def ended(self, tenant: str, reference: str, deadline: float | None) -> bool:
        """Waits until a request that is on its way has ended. False: there is none, or it waits for itself. Raises
        DeadlineExceeded."""
        end = self._ends.get((tenant, reference))
        if end is None or self._is_circle(tenant, reference):
            return False
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await asyncio.shield(end.comes)
        except TimeoutError:
            message = f"The deadline passed before the parent '{reference}' ended."
            raise DeadlineExceeded(message, reason="late_parent", field="deadline", reference=reference) from None
        return True

    def _is_circle(self, tenant: str, reference: str) -> bool:
        """Whether those who wait, from this one on, wait for each other: none of them would ever end."""
        seen: set[str] = set()
        while (end := self._ends.get((tenant, reference))) is not None:
            if reference in seen:
                return True
            seen.add(reference)
            reference = end.parent
        return False
