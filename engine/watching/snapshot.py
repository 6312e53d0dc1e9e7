"""How the engine stands, in enough detail to look at: each block's kind, and each open request.

Made on demand, in time proportional to the blocks. Owned by the event-loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.state.sequence import Group
from bequest.engine.types.blocks import BlockLayout
from bequest.engine.types.recurrent import StateLoad
from bequest.engine.watching.block_map import BlockMap, map_blocks
from bequest.engine.watching.observation import AdapterLoad, EngineLoad


@dataclass(frozen=True, slots=True)
class OpenRequest:
    id: str
    name: str | None
    tenant: str
    status: Literal["waiting", "running"]
    seconds: float  # since it came
    prompt_tokens: int
    computed_tokens: int  # of its furthest sequence
    generated_tokens: int  # of all its sequences
    max_tokens: int
    sequences: int
    blocks: int  # counted once for each sequence that holds them


@dataclass(frozen=True, slots=True)
class Snapshot:
    block_size: int
    map: BlockMap
    requests: tuple[OpenRequest, ...]
    states: StateLoad | None = None  # of recurrent layers, if the model has some
    leased_states: int = 0  # of those that are held
    block_bytes: int = 0
    state_bytes: int = 0  # of one state in all recurrent layers


def take_snapshot(scheduler: Scheduler, groups: Iterable[Group], now: float, layout: BlockLayout) -> Snapshot:
    groups = list(groups)
    return Snapshot(
        block_size=scheduler.pool.block_size,
        map=map_blocks(scheduler, groups),
        requests=tuple(_open_request(group, now) for group in groups),
        states=scheduler.retention.states.load(),
        leased_states=scheduler.retention.leases.num_states,
        block_bytes=layout.num_bytes,
        state_bytes=layout.state_bytes,
    )


def load_of(scheduler: Scheduler, adapters: AdapterLoad) -> EngineLoad:
    pool, host, budget = scheduler.pool, scheduler.cache.host, scheduler.retention.leases.budget
    return EngineLoad(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        used_blocks=pool.num_used,
        usable_blocks=pool.num_blocks - 1,
        used_host_blocks=host.num_used,
        usable_host_blocks=host.num_blocks - 1,
        retention_budget=budget.capacity,
        retention_charged=budget.used,
        retained=scheduler.retention.loads(),
        waiting_extractions=len(scheduler.extractions.waiting),
        states_bytes=scheduler.extractions.memory.used,
        block_size=pool.block_size,
        prefix_caching=scheduler.cache.prefix_caching,
        adapters=adapters,
    )


def _open_request(group: Group, now: float) -> OpenRequest:
    request, sequences = group.request, group.sequences
    return OpenRequest(
        id=request.id,
        name=request.terms.name,
        tenant=request.tenant,
        status="waiting" if group.times.admitted is None else "running",
        seconds=now - group.times.arrived,
        prompt_tokens=len(request.prompt_token_ids),
        computed_tokens=max((sequence.num_computed for sequence in sequences), default=0),
        generated_tokens=group.kind.completion_tokens,
        max_tokens=request.params.max_tokens,
        sequences=len(sequences),
        blocks=sum(len(sequence.table) for sequence in sequences),
    )
