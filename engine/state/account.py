"""What a tenant got. Owned by the event-loop thread."""

from __future__ import annotations


class Account:
    """What a tenant got, in tokens, and how many of its sequences wait."""

    __slots__ = ("num_waiting", "served")

    def __init__(self) -> None:
        self.served = 0
        self.num_waiting = 0
