"""How long clients may keep what they computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds: of a lease that names none, and the most that one may name."""

    default: float
    longest: float
    durable: bool = False  # whether one that does not say shall outlive the process
