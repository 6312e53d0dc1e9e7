"""Each block's kind and owner, for whoever looks at the cache.

A block is of the last of these kinds that it is:

    free      holds nothing that can be found again
    warm      held by nobody, but its content is found by a record or by the prefix index
    in use    held by one running sequence
    shared    held by several tables
    leased    held by a lease
    stored    held by a lease that is in files, too

Owners are tenants. What only the prefix index knows has none: it divides by salts, which name nobody.

A block is of the group of layers whose keys and values it holds: those that see all tokens, or those of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from bequest.engine._C import BlockTable
from bequest.engine.cache.entries import Entries
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.state.sequence import Group

FREE, WARM, IN_USE, SHARED, LEASED, STORED = range(6)
NOBODY = -1
NO_GROUP = -1  # of a free block, and of one that a record alone remembers, where there are several groups

Kinds = npt.NDArray[np.uint8]
Owners = npt.NDArray[np.int16]
Groups = npt.NDArray[np.int8]

# Of warm records, the most recently used ones: a look stays short where there are many. What older ones left is warm
# all the same where the prefix index knows it.
_MOST_CHOICES = 2048
_MOST_TENANTS = 1000  # that are told apart


@dataclass(frozen=True, slots=True)
class BlockField:
    """The blocks of a pool, without the null block."""

    kinds: Kinds  # [NB - 1]
    owners: Owners  # [NB - 1] indices of tenants, or NOBODY
    groups: Groups  # [NB - 1] indices of groups, or NO_GROUP


@dataclass(frozen=True, slots=True)
class BlockMap:
    tenants: tuple[str, ...]
    windows: tuple[int, ...]  # of each group, in tokens; 0: its layers see all
    device: BlockField
    host: BlockField


@dataclass(frozen=True, slots=True)
class _Claim:
    """Blocks that a tenant has, as entries of tables."""

    tenant: str
    entries: Entries
    kind: int


def map_blocks(scheduler: Scheduler, groups: Iterable[Group]) -> BlockMap:
    claims = [*_of_running(groups), *_of_leases(scheduler), *_of_records(scheduler)]
    tenants = tuple(islice(dict.fromkeys(claim.tenant for claim in claims), _MOST_TENANTS))
    numbers = {tenant: number for number, tenant in enumerate(tenants)}
    windows = tuple(dict.fromkeys(scheduler.pool.windows))
    group_of_strip = np.array([windows.index(window) for window in scheduler.pool.windows], np.int8)
    device, host = (
        _Painter(count, group_of_strip) for count in (scheduler.pool.num_blocks, scheduler.cache.host.num_blocks)
    )
    indexed = scheduler.pool.indexed_blocks()
    device.warm(indexed[:, 0], NOBODY)
    device.assign(indexed[:, 0], indexed[:, 1])
    for claim in claims:
        owner = numbers.get(claim.tenant, NOBODY)
        if claim.kind == WARM:
            device.warm(claim.entries, owner)
            continue
        strips = np.arange(len(claim.entries)) % len(group_of_strip)
        for painter, which in ((device, claim.entries > 0), (host, claim.entries < 0)):
            blocks = np.abs(claim.entries[which])
            painter.hold(blocks, owner, claim.kind)
            painter.assign(blocks, strips[which])
    return BlockMap(tenants, windows, device.field(), host.field())


def _of_running(groups: Iterable[Group]) -> Iterator[_Claim]:
    for group in groups:
        yield _Claim(group.request.tenant, _entries(sequence.table for sequence in group.sequences), IN_USE)


def _of_leases(scheduler: Scheduler) -> Iterator[_Claim]:
    for record in scheduler.retention.leases.holders():
        kind = LEASED if record.stored is None else STORED
        yield _Claim(record.tenant, _entries(record.tables()), kind)


def _of_records(scheduler: Scheduler) -> Iterator[_Claim]:
    pool, left = scheduler.pool, _MOST_CHOICES
    for record in scheduler.retention.others():
        if left <= 0:
            return
        for epochs in islice(record.left_epochs(), left):
            yield _Claim(record.tenant, epochs.blocks_left(pool).astype(np.int64), WARM)
        left -= record.identity.num_choices


def _entries(tables: Iterable[BlockTable]) -> Entries:
    return np.fromiter((entry for table in tables for entry in table.entries), np.int64)


class _Painter:
    """Colours the blocks of one pool, numbered with the null block."""

    def __init__(self, num_blocks: int, group_of_strip: Groups) -> None:
        self._group_of_strip = group_of_strip
        # Of one group alone are all that hold something.
        self._groups: Groups = np.full(num_blocks, NO_GROUP if group_of_strip.any() else 0, np.int8)
        self._kinds: Kinds = np.full(num_blocks, FREE, np.uint8)
        self._owners: Owners = np.full(num_blocks, NOBODY, np.int16)
        self._uses = np.zeros(num_blocks, np.int32)

    def warm(self, blocks: npt.NDArray[np.integer], owner: int) -> None:
        self._kinds[blocks] = np.maximum(self._kinds[blocks], WARM)
        if owner != NOBODY:
            self._owners[blocks] = owner

    def assign(self, blocks: npt.NDArray[np.integer], strips: npt.NDArray[np.integer]) -> None:
        self._groups[blocks] = self._group_of_strip[strips]

    def hold(self, blocks: Entries, owner: int, kind: int) -> None:
        np.add.at(self._uses, blocks, 1)
        self._owners[blocks] = owner
        self._kinds[blocks] = np.maximum(self._kinds[blocks], kind)

    def field(self) -> BlockField:
        held = np.where(self._uses > 1, SHARED, np.where(self._uses == 1, IN_USE, FREE)).astype(np.uint8)
        kinds = np.maximum(self._kinds, held)
        groups = np.where(kinds == FREE, NO_GROUP, self._groups).astype(np.int8)
        return BlockField(kinds[1:], self._owners[1:], groups[1:])
