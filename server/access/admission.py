"""The limits of a key that need a memory: how many requests it has open, and at what rate it sends them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bequest.server.access.keys import Caller
from bequest.server.wire.errors import ApiError, retry_seconds


class _Usage:
    """Of one key. `allowance` is a bucket of requests, filled at the key's rate and never above a minute's worth."""

    __slots__ = ("allowance", "open", "seen_at")

    def __init__(self, allowance: float, now: float) -> None:
        self.open = 0
        self.allowance = allowance
        self.seen_at = now


class Admission:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total_open = 0  # of all keys
        self._usages: dict[str, _Usage] = {}  # by the key's name: they outlive a reload of the keys

    def num_open(self, caller: Caller) -> int:
        usage = self._usages.get(caller.name)
        return 0 if usage is None else usage.open

    @contextmanager
    def admitted(self, caller: Caller, num_waiting: Callable[[str], int], over_rate: float = 0.0) -> Iterator[None]:
        """Counts a request while it is open; raises 429 if the key has as many as it may. `num_waiting` tells how many
        requests of a tenant wait to run; `over_rate` for how many seconds the key has spent its rate, by a router that
        counts for several servers."""
        usage = self._usages.setdefault(caller.name, _Usage(math.inf, self._clock()))
        limits = caller.limits
        if limits.max_concurrent is not None and usage.open >= limits.max_concurrent:
            raise _exceeded(caller, f"{limits.max_concurrent} requests at once", limits.max_concurrent, 1)
        if limits.max_queued is not None and num_waiting(caller.tenant) >= limits.max_queued:
            raise _exceeded(caller, f"{limits.max_queued} requests waiting to run", limits.max_queued, 1)
        if limits.requests_per_minute is not None:
            self._take(caller, usage, limits.requests_per_minute, over_rate)
        with self.held(caller):
            yield

    @contextmanager
    def held(self, caller: Caller) -> Iterator[None]:
        """Counts a request that was admitted as long as it is worked on, its connection or not."""
        usage = self._usages.setdefault(caller.name, _Usage(math.inf, self._clock()))
        usage.open += 1
        self.total_open += 1
        try:
            yield
        finally:
            usage.open -= 1
            self.total_open -= 1

    def _take(self, caller: Caller, usage: _Usage, rate: float, over: float) -> None:
        if over:
            raise _exceeded(caller, f"{rate:g} requests a minute", rate, over)
        now = self._clock()
        most = max(rate, 1.0)  # who may send fewer than one a minute may send one
        usage.allowance = min(most, usage.allowance + (now - usage.seen_at) * rate / 60)
        usage.seen_at = now
        if usage.allowance < 1:
            raise _exceeded(caller, f"{rate:g} requests a minute", rate, (1 - usage.allowance) * 60 / rate)
        usage.allowance -= 1


def _exceeded(caller: Caller, what: str, limit: float, wait: float) -> ApiError:
    seconds = retry_seconds(wait)
    return ApiError(
        429,
        "rate_limit_exceeded",
        f"The API key '{caller.name}' may have {what}; try again in {seconds} s.",
        details={"limit": limit, "retry_after": seconds},
        headers={"Retry-After": str(seconds)},
    )
