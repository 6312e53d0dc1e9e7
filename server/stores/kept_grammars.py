"""The memory of compiled grammars: those that requests use, and those that are kept for the next one.

A grammar lives as long as a request holds it, wherever that stands, so what is in use counts too. Where room is short,
the tenant that has the most loses its oldest of those that are kept; what is in use stays, and if that leaves no room,
the newcomer has to wait. Owned by the event-loop thread, but requests let go of grammars on any.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from bequest.engine.constraints.grammar import Grammar, GrammarSource
from bequest.server.wire.errors import ApiError


class KeptGrammars:
    def __init__(self, most_bytes: int, num_tenants: Callable[[], int]) -> None:
        """Where keys name several tenants, each may take half."""
        self.most_bytes = most_bytes
        self._num_tenants = num_tenants
        self._kept: OrderedDict[GrammarSource, tuple[str, Grammar]] = OrderedDict()  # least recently used first
        self._alive: weakref.WeakValueDictionary[GrammarSource, Grammar] = weakref.WeakValueDictionary()
        self._bytes: Counter[str] = Counter()  # alive, or being compiled, by the tenant that asked first; none is 0
        self._gone: deque[tuple[str, int]] = deque()  # from any thread, not yet counted

    @property
    def used_bytes(self) -> int:
        self._count_gone()
        return self._bytes.total()

    def __len__(self) -> int:
        """Those that are kept."""
        return len(self._kept)

    def get(self, source: GrammarSource) -> Grammar | None:
        if source in self._kept:
            self._kept.move_to_end(source)
        return self._alive.get(source)

    def reserve(self, tenant: str, num_bytes: int) -> None:
        """Makes room, or raises 503, or 429 where the tenant has its share."""
        share = self.most_bytes // 2 if self._num_tenants() > 1 else self.most_bytes
        while self.used_bytes + num_bytes > self.most_bytes:
            if not self._drop_oldest(None):
                raise _full(503, "server_busy", "This server", self.most_bytes, self.used_bytes)
        while self._bytes[tenant] + num_bytes > share:
            if not self._drop_oldest(tenant):
                raise _full(429, "rate_limit_exceeded", "Your share of this server", share, self._bytes[tenant])
            self._count_gone()
        self._bytes[tenant] += num_bytes

    def release(self, tenant: str, num_bytes: int) -> None:
        """Of what was reserved for a grammar that there is none of after all."""
        self._gone.append((tenant, num_bytes))

    def put(self, tenant: str, source: GrammarSource, grammar: Grammar, num_bytes: int) -> None:
        """In the place that was reserved."""
        weakref.finalize(grammar, self._gone.append, (tenant, num_bytes)).atexit = False
        self._kept[source] = tenant, grammar
        self._kept.move_to_end(source)
        self._alive[source] = grammar

    def _drop_oldest(self, tenant: str | None) -> bool:
        """Of the tenant, or of the one that has the most. False: nothing is kept."""
        owners = {owner for owner, _ in self._kept.values()}
        owner = tenant if tenant is not None else max(owners, key=lambda one: self._bytes[one], default=None)
        source = next((source for source, (holder, _) in self._kept.items() if holder == owner), None)
        if source is None:
            return False
        del self._kept[source]
        return True

    def _count_gone(self) -> None:
        while self._gone:
            tenant, num_bytes = self._gone.popleft()
            self._bytes[tenant] -= num_bytes
            if not self._bytes[tenant]:
                del self._bytes[tenant]


def _full(status: int, code: str, whose: str, most: int, used: int) -> ApiError:
    message = f"{whose} holds {used} of {most} bytes of compiled grammars (--grammars-mb), all in use; try again soon."
    return ApiError(status, code, message, details={"limit": most, "used": used})
