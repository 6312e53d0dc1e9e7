"""What an engine has that keeps leases in memory alone."""

from __future__ import annotations

from collections.abc import Callable

from bequest.engine.state.record import Record
from bequest.engine.types import Delta, Retain
from bequest.engine.types.estate import Estate


class NoVault:
    """In the place of a Vault."""

    def deliver(
        self, record: Record | None, delta: Delta, retain: Retain | None, send: Callable[[Delta], None]
    ) -> None:
        send(delta)

    def abort(self, request_id: str) -> None: ...

    def update(self, record: Record) -> None: ...

    def prefetch(self, record: Record) -> None: ...

    def close(self) -> None: ...

    def unwritten(self) -> list[Record]:
        return []

    async def flush(self, end: float) -> None: ...

    async def settled(self) -> None: ...

    async def written(self) -> None: ...

    async def reach(self, record: Record, choice: int) -> None: ...

    async def seek(self, tenant: str, reference: str) -> None: ...

    async def take_out(self, record: Record) -> Estate | None:
        return None
