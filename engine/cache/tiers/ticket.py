"""What became of bytes that somebody asked for. Owned by the event-loop thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

TicketState = Literal["pending", "done", "failed"]


class Ticket:
    """Pending until it is settled, once: done, or failed with an error."""

    __slots__ = ("_waiting", "error", "state")

    def __init__(self) -> None:
        self.state: TicketState = "pending"
        self.error: BaseException | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def pending(self) -> bool:
        return self.state == "pending"

    @property
    def failed(self) -> bool:
        return self.state == "failed"

    def settle(self, error: BaseException | None = None) -> None:
        assert self.pending, "a ticket is settled once"
        self.state, self.error = "done" if error is None else "failed", error
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Calls it when the ticket is settled: now, if it is."""
        if self.pending:
            self._waiting.append(call)
        else:
            call()


def done() -> Ticket:
    """A ticket for bytes that are there."""
    return _DONE


def failed(error: BaseException) -> Ticket:
    """A ticket for bytes that do not come."""
    ticket = Ticket()
    ticket.settle(error)
    return ticket


_DONE = Ticket()
_DONE.settle()
