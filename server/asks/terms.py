"""What a body says of its engine requests, apart from prompt and sampling."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from bequest.engine.types import Retain
from bequest.server.access.marks import ARRIVED, CALLER, TENANT
from bequest.server.asks import leases, sampling
from bequest.server.context import Context
from bequest.server.wire.bodies import GenerationBody
from bequest.server.wire.names import check_name


@dataclass(frozen=True, slots=True)
class Terms:
    """What a body says of its engine requests, apart from prompt and sampling."""

    tenant: str
    name: str | None
    priority: int
    deadline: float | None  # on the engine's clock
    cache_salt: str
    retain: Retain | None
    keep_record: bool
    default_tokens: int | None  # the endpoint's max_tokens; None: all the room there is
    max_prompt_tokens: int | None  # of the key


def terms_of(context: Context, http: web.Request, body: GenerationBody, default_tokens: int | None) -> Terms:
    """`timeout` counts from the request's arrival, whatever it has to wait for first."""
    limits = http[CALLER].limits
    timeout = sampling.timeout_seconds(body.timeout, limits.max_timeout)
    return Terms(
        tenant=http[TENANT],
        name=None if body.request_id is None else check_name(body.request_id),
        priority=sampling.priority(body.priority, limits.lowest_priority),
        deadline=None if timeout is None else http[ARRIVED] + timeout,
        cache_salt=body.cache_salt or "",
        retain=leases.retain(body, context.leases, default_tokens),
        keep_record=body.store is not False,
        default_tokens=default_tokens,
        max_prompt_tokens=limits.max_prompt_tokens,
    )
