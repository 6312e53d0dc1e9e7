"""How the engine stands, in enough detail to look at: each block's kind, and each open request.

Made on demand, in time proportional to the blocks in use. Owned by the event-loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from bequest.engine._C import BlockTable
from bequest.engine.cache.entries import Entries, device_blocks, host_blocks
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.state.sequence import Group
from bequest.engine.watching.observation import EngineLoad

# Kinds of a block, the later ones win: held by one running sequence, by several tables, by a lease.
FREE, IN_USE, SHARED, LEASED = range(4)


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
    blocks: npt.NDArray[np.uint8]  # [NB - 1] kinds on the device, without the null block
    host_blocks: npt.NDArray[np.uint8]  # [NH - 1] the same on the host
    requests: tuple[OpenRequest, ...]


def take_snapshot(scheduler: Scheduler, groups: Iterable[Group], now: float) -> Snapshot:
    groups = list(groups)
    running = [sequence.table for group in groups for sequence in group.sequences]
    leased = [table for record in scheduler.retention.leases.holders() for table in record.tables()]
    uses = _entries([*running, *leased])
    of_leases = _entries(leased)
    return Snapshot(
        block_size=scheduler.pool.block_size,
        blocks=_kinds(device_blocks(uses), device_blocks(of_leases), scheduler.pool.num_blocks),
        host_blocks=_kinds(host_blocks(uses), host_blocks(of_leases), scheduler.cache.host.num_blocks),
        requests=tuple(_open_request(group, now) for group in groups),
    )


def load_of(scheduler: Scheduler) -> EngineLoad:
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
    )


def _entries(tables: Iterable[BlockTable]) -> Entries:
    return np.fromiter((entry for table in tables for entry in table.blocks), np.int64)


def _kinds(uses: Entries, leased: Entries, num_blocks: int) -> npt.NDArray[np.uint8]:
    counts = np.bincount(uses, minlength=num_blocks)
    kinds = np.minimum(counts, SHARED).astype(np.uint8)
    kinds[leased] = LEASED
    return kinds[1:]


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
