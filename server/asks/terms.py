"""On which terms a request runs: whose it is, how urgent, until when, and what stays of it."""

from __future__ import annotations

import msgspec

from bequest.engine.types import Terms
from bequest.engine.types.adapter import AdapterRef
from bequest.server.asks import leases, ranges
from bequest.server.asks.call import Call
from bequest.server.wire.bodies import HiddenStatesBody, InputBody, SampledBody
from bequest.server.wire.names import check_name


class AskTerms(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    priority: int
    deadline: float | None  # on the engine's clock
    max_prompt_tokens: int | None  # of the key
    cache_salt: str = ""
    adapter: AdapterRef | None = None  # that the model's name stands for
    owner_gone: bool = False  # a router knows that the server that made the parent's id does not run
    record: Terms = Terms(keep_record=False)  # what each of its prompts adds its own lineage to


def record_terms(call: Call[SampledBody | HiddenStatesBody], open_ended: bool) -> AskTerms:
    """Of a request that others may continue from. `open_ended`: nothing says how long its answer may become."""
    body = call.body
    deadline = _deadline(call, body.timeout)
    name = None if body.request_id is None else check_name(body.request_id)
    priority = ranges.priority(body.priority, call.limits.lowest_priority)
    retain = leases.retain(body.retain, body.store, call.context.leases, open_ended)
    return AskTerms(
        tenant=call.tenant,
        priority=priority,
        deadline=deadline,
        cache_salt=body.cache_salt or "",
        adapter=call.adapter,
        owner_gone=call.owner_gone,
        record=Terms(name=name, retain=retain, keep_record=body.store is not False),
        max_prompt_tokens=call.limits.max_prompt_tokens,
    )


def input_terms(call: Call[InputBody]) -> AskTerms:
    """Of a request that leaves no record."""
    return passing_terms(call, call.body.timeout, call.body.priority, call.body.cache_salt or "")


def passing_terms(
    call: Call[msgspec.Struct], timeout: float | None, priority: int | None = None, cache_salt: str = ""
) -> AskTerms:
    return AskTerms(
        tenant=call.tenant,
        deadline=_deadline(call, timeout),
        priority=ranges.priority(priority, call.limits.lowest_priority),
        cache_salt=cache_salt,
        adapter=call.adapter,
        max_prompt_tokens=call.limits.max_prompt_tokens,
    )


def _deadline(call: Call[msgspec.Struct], timeout: float | None) -> float | None:
    """`timeout` counts from the request's arrival, whatever it has to wait for first."""
    seconds = ranges.timeout_seconds(timeout, call.limits.max_timeout)
    return None if seconds is None else call.arrived + seconds
