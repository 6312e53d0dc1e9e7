"""How long clients may keep what they computed, and where it outlives the process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds: of a lease that names none, and the most that one may name."""

    default: float
    longest: float
    durable: bool = False  # whether one that does not say shall outlive the process
    directory: str | None = None  # of what outlives the process
    has_neighbours: bool = False  # whether directories of other servers stand beside it
    can_last: bool = False  # whether a lease may outlive the process
