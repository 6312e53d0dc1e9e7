"""How many replicas there should be. Decides alone: the clock and the figures are passed in.

One more, when requests have waited or leases have filled the budget for a while; one less, when neither has been the
case for much longer and the rest would hold all leases. Between the two marks nothing happens, so that a replica that
comes is not sent away again for having come.
"""

from __future__ import annotations

from dataclasses import dataclass

_MORE_AFTER = 15.0  # seconds over a mark
_LESS_AFTER = 300.0  # seconds under both
_LONG_WAIT, _SHORT_WAIT = 1.0, 0.05  # seconds that a request waits to run
_FULL, _ROOMY = 0.85, 0.6  # shares of the budget of leases


def weight_of(leased_share: float, full: int) -> int:
    """A replica's share of the prompts that begin anew. What begins there stays there, by its leases: one whose budget
    is full takes few of them."""
    return max(1, round(full * min(1.0, 1.2 - leased_share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of all replicas together."""

    replicas: int
    wait: float  # seconds, of requests that began to run since the last look
    waiting: float  # requests
    leased_share: float


class Scaling:
    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._busy_since: float | None = None
        self._idle_since: float | None = None

    def wanted(self, load: Load, now: float) -> int:
        """How many there should be now."""
        busy = load.wait > _LONG_WAIT or load.leased_share > _FULL
        idle = load.wait <= _SHORT_WAIT and not load.waiting and self._fits_into_one_less(load)
        self._busy_since = (now if self._busy_since is None else self._busy_since) if busy else None
        self._idle_since = (now if self._idle_since is None else self._idle_since) if idle else None
        if self._busy_since is not None and now - self._busy_since >= _MORE_AFTER:
            return self._changed(load.replicas + 1)
        if self._idle_since is not None and now - self._idle_since >= _LESS_AFTER:
            return self._changed(load.replicas - 1)
        return min(max(load.replicas, self._least), self._most)

    def _fits_into_one_less(self, load: Load) -> bool:
        return load.replicas > 1 and load.leased_share * load.replicas / (load.replicas - 1) <= _ROOMY

    def _changed(self, replicas: int) -> int:
        """The next one waits as long again: a replica takes a while to load, and to be of use."""
        self._busy_since = self._idle_since = None
        return min(max(replicas, self._least), self._most)
