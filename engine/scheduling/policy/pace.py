"""How fast requests leave: what a full queue tells those that it refuses. Event-loop thread; the clock is passed in."""

from __future__ import annotations

from collections import deque

from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning


class Pace:
    def __init__(self, tuning: Tuning = DEFAULT) -> None:
        self._tuning = tuning
        self._departures: deque[float] = deque(maxlen=tuning.departures_kept)

    def departed(self, now: float) -> None:
        self._departures.append(now)

    def seconds_to_try_again(self, max_queued: int, now: float) -> float:
        """Until about a quarter of a full queue has left, at the latest pace; from 1 to 60."""
        if len(self._departures) < 2:
            return 1.0 if not self._departures else min(max(1.0, now - self._departures[0]), self._tuning.longest_wait)
        seconds_each = (now - self._departures[0]) / len(self._departures)
        return min(max(1.0, seconds_each * max_queued / self._tuning.retry_part), self._tuning.longest_wait)
