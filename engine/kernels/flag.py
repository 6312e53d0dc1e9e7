"""Flags: words of memory for which somebody waits, who may be a device."""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine import _C


@dataclass(frozen=True, slots=True)
class Flag:
    """A word and what it is to become. C++ that gets both can set it without the interpreter."""

    address: int
    value: int

    def __call__(self) -> None:
        """Sets it: what this thread wrote before is seen by whoever sees the value."""
        _C.publish(self.address, self.value)
