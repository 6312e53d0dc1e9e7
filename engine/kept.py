"""A record as its children need it: ended, and not lost. Event-loop thread."""

from __future__ import annotations

import asyncio

from bequest.engine.errors import DeadlineExceeded, EngineDead, ParentFailed, ParentLost
from bequest.engine.state.record import Record
from bequest.engine.types import Parent


def parent_of(record: Record, reference: str) -> Parent:
    if record.failed:
        raise ParentFailed(
            f"The request '{reference}' ended before anything was computed.",
            reason="parent_failed",
            reference=reference,
        )
    if record.lost:
        raise ParentLost(f"The lease '{reference}' is lost.", reason="parent_lost", id=record.id)
    return record.as_parent()


async def ended(record: Record, reference: str, left: float | None, death: asyncio.Future[BaseException]) -> None:
    """Returns when it does not run any more. Raises DeadlineExceeded if it still does when `left` seconds are over."""
    if record.group is None:
        return
    end = asyncio.get_running_loop().create_future()
    with record.on_end(lambda: end.set_result(None)):
        await asyncio.wait({end, death}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    if death.done():
        raise EngineDead("The engine has failed.", reason="died")
    if not end.done():
        message = f"The deadline passed before the parent '{reference}' ended."
        raise DeadlineExceeded(message, reason="late_parent", field="deadline", reference=reference)
