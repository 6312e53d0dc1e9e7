"""`retain` and `ttl`: how long a client may keep what it computed."""

from __future__ import annotations

from typing import Any

from bequest.engine.types import Retain
from bequest.server.stores.leases import LeaseTimes
from bequest.server.wire.errors import ApiError, invalid
from bequest.server.wire.reading import describe, shorten


def retain(
    asked: bool | dict[str, Any] | None, store: bool | None, times: LeaseTimes, open_ended: bool
) -> Retain | None:
    """The lease that `retain` and `store` ask for; `open_ended` if nothing says how long the answer may become."""
    if asked is None or asked is False:
        return None
    if store is False:
        raise invalid("`retain` and `store: false` exclude each other: a lease is a record that is kept.", "retain")
    ttl: Any = None
    durable: bool | None = None
    if isinstance(asked, dict):
        for name in asked:
            if name not in ("ttl", "durable") and asked[name] is not None:
                message = f"`retain` has the field {shorten(repr(name))}; it is true, or has `ttl` and `durable`."
                raise ApiError(400, "unknown_parameter", message, param=f"retain.{shorten(name)}")
        ttl, durable = asked.get("ttl"), asked.get("durable")
        if durable is not None and not isinstance(durable, bool):
            message = f"`retain.durable` must be true or false, not {describe(durable)}."
            raise ApiError(400, "invalid_type", message, param="retain.durable")
    seconds = times.default if ttl is None else check_ttl(ttl, times, "retain.ttl")
    return Retain(seconds, open_ended, times.durable if durable is None else durable)


def check_ttl(ttl: Any, times: LeaseTimes, param: str) -> float:
    if isinstance(ttl, bool) or not isinstance(ttl, int | float):
        raise ApiError(400, "invalid_type", f"`{param}` must be a number of seconds, not {describe(ttl)}.", param=param)
    if not 0 < ttl <= times.longest:
        raise invalid(
            f"`{param}` must be above 0 and at most {times.longest:g} seconds (--max-ttl), not {describe(ttl)}.", param
        )
    return float(ttl)
