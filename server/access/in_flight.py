"""The bytes that requests hold on their way: bodies that come in, what is made of them, answers that nobody has read.

Each request is bounded by itself (--max-body-mb, --max-audio-mb); this bounds their sum, and refuses before it is
passed. Small requests are not counted: connections are bounded by descriptors. Owned by the event-loop thread.
"""

from __future__ import annotations

from collections.abc import Callable

from bequest.server.wire.errors import ApiError


class InFlight:
    def __init__(self, most_bytes: int, num_tenants: Callable[[], int]) -> None:
        """Where keys name several tenants, each may take half."""
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self._num_tenants = num_tenants
        self._of_tenant: dict[str, int] = {}  # none is 0

    def held_by(self, tenant: str) -> Held:
        """An account of one request, with nothing in it yet."""
        return Held(self, tenant)

    def add(self, tenant: str, num_bytes: int) -> None:
        """What is there already is counted, not refused; less than nothing gives back."""
        self.used_bytes += num_bytes
        held = self._of_tenant.get(tenant, 0) + num_bytes
        if held:
            self._of_tenant[tenant] = held
        else:
            self._of_tenant.pop(tenant, None)

    def check(self, tenant: str, more: int) -> None:
        share = self.most_bytes // 2 if self._num_tenants() > 1 else self.most_bytes
        if more > share:
            raise ApiError(
                413,
                "request_too_large",
                f"This request needs {more} bytes while it is read, and one may have {share} (--max-in-flight-mb): "
                "send less at once.",
                details={"limit": share, "needed": more},
            )
        if self.used_bytes + more > self.most_bytes:
            raise _full(503, "server_busy", "This server", self.most_bytes, self.used_bytes, more)
        held = self._of_tenant.get(tenant, 0)
        if held + more > share:
            raise _full(429, "rate_limit_exceeded", "Your share of this server", share, held, more)


class Held:
    """What one request holds."""

    __slots__ = ("_all", "_tenant", "num_bytes")

    def __init__(self, every: InFlight, tenant: str) -> None:
        self._all = every
        self._tenant = tenant
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """Raises 503, or 429 where the tenant has its share, if there is no room for more."""
        more = num_bytes - self.num_bytes
        if more > 0:
            self._all.check(self._tenant, more)
        self._all.add(self._tenant, more)
        self.num_bytes = num_bytes

    def grow(self, more: int) -> None:
        self.resize(self.num_bytes + more)

    def release(self) -> None:
        self.resize(0)


def _full(status: int, code: str, whose: str, most: int, used: int, more: int) -> ApiError:
    return ApiError(
        status,
        code,
        f"{whose} holds {used} of {most} bytes of requests on their way (--max-in-flight-mb), and this one needs "
        f"{more} more; try again soon, or send less at once.",
        details={"limit": most, "used": used, "needed": more},
    )
