"""What an engine keeps of requests that have ended, for those who ask: parents, records, leases, estates.

Event-loop thread.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bequest.engine.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    InsufficientRetention,
    ParentFailed,
    ParentLost,
)
from bequest.engine.estates import EstateDesk
from bequest.engine.inheritance.retention import Retention
from bequest.engine.launched import LaunchedSteps
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.sleep import Sleep
from bequest.engine.state.record import Record
from bequest.engine.timer import Timer
from bequest.engine.types import Parent, RecordEntry
from bequest.engine.types.blocks import BlockLayout
from bequest.engine.types.estate import Estate
from bequest.engine.vault.no_vault import NoVault
from bequest.engine.vault.shelving import Shelving
from bequest.engine.vault.vault import Vault

log = logging.getLogger("bequest.engine")


class Keeper(ABC):
    _estates: EstateDesk
    _idle: asyncio.Event  # no request is open
    _launched: LaunchedSteps
    _sleep: Sleep
    _stopped: bool

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self._vault: Vault | NoVault = NoVault()
        self._timer = Timer(clock, self._next_due, self._expire)
        self._death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @property
    @abstractmethod
    def block_layout(self) -> BlockLayout: ...

    @property
    def retention(self) -> Retention:
        return self.scheduler.retention

    # --- parents -------------------------------------------------------------------------------------------------

    def parent(self, tenant: str, reference: str) -> Parent:
        """Raises ParentNotFound, ParentExpired, ParentLost, or ParentFailed if there is nothing to continue from."""
        return _parent_of(self.retention.find(tenant, reference), reference)

    async def parent_ended(self, tenant: str, reference: str, deadline: float | None) -> Parent:
        """The same when it does not run any more; raises DeadlineExceeded if it still does at the deadline."""
        record = self.retention.find(tenant, reference)
        left = None if deadline is None else max(0.0, deadline - self._clock())
        await _ended(record, reference, left, self._death)
        return self.parent(tenant, record.id)

    async def seek(self, tenant: str, reference: str) -> None:
        """A lease that another server has put into the store is known from now on, if there is one."""
        if self.retention.get(tenant, reference) is None:
            await self._vault.seek(tenant, reference)
            self._timer.arm()

    async def reach(self, tenant: str, reference: str, choice: int) -> None:
        """Returns when the bytes of a choice are at hand, if they are in files. Raises ParentLost."""
        await self._vault.reach(self.retention.find(tenant, reference), choice)

    def prefetch(self, tenant: str, reference: str) -> RecordEntry:
        """The bytes of a lease in files will be at hand for its children."""
        record = self.retention.find(tenant, reference)
        self._vault.prefetch(record)
        return record.as_entry(self.scheduler.pool, self.block_layout)

    # --- records -------------------------------------------------------------------------------------------------

    def records(self, tenant: str) -> list[RecordEntry]:
        """All that the tenant has, oldest first: every choice of every record is looked at."""
        return [record.as_entry(self.scheduler.pool, self.block_layout) for record in self.retention.of(tenant)]

    def record_names(self, tenant: str) -> list[tuple[str, str | None]]:
        return [(record.id, record.identity.name) for record in self.retention.of(tenant)]

    def record(self, tenant: str, reference: str) -> RecordEntry:
        return self.retention.find(tenant, reference).as_entry(self.scheduler.pool, self.block_layout)

    def set_ttl(self, tenant: str, reference: str, ttl: float | None) -> RecordEntry:
        record = self.retention.find(tenant, reference)
        self.retention.set_ttl(record, ttl, self._clock())
        self._vault.update(record)
        self._timer.arm()
        return record.as_entry(self.scheduler.pool, self.block_layout)

    def forget(self, tenant: str, reference: str) -> str:
        record = self.retention.find(tenant, reference)
        self.retention.forget(record)
        self.scheduler.wake()
        return record.id

    def free_name(self, tenant: str, reference: str) -> None:
        """Another request may have the name of an ended one. Nothing, where there is none."""
        record = self.retention.get(tenant, reference)
        if record is not None:
            self.retention.free_name(record)

    async def written(self) -> None:
        """Returns when files say what `set_ttl` and `forget` have done, or the disk is too slow."""
        await self._vault.written()

    # --- estates -------------------------------------------------------------------------------------------------

    async def export_estate(self, tenant: str, reference: str) -> Estate:
        """All that an ended request owns, from memory or from files. Raises ParentNotFound, ParentLost, or
        InsufficientRetention if its blocks are gone."""
        record = self.retention.find(tenant, reference)
        async with self._sleep.kept_awake():
            try:
                return await self._estates.take_out(tenant, record.id)
            except InsufficientRetention:
                stored = await self._vault.take_out(record)
                if stored is None:
                    raise
                return stored

    async def import_estate(self, tenant: str, estate: Estate, ttl: float) -> str:
        """Leases it for `ttl` seconds; its id. Raises EstateMismatch, and what a request with a lease raises."""
        async with self._sleep.kept_awake():
            record_id = await self._estates.bring_in(tenant, estate, ttl)
        self._timer.arm()
        return record_id

    async def open_files(self, shelf: Shelving, wait: float, *, warm: bool = False) -> None:
        """Keeps leases in files from now on; those of earlier processes are found. `wait`, `warm`: as in Vault."""
        self._vault = self.scheduler.cache.filed.files = Vault(
            shelf,
            self._estates,
            self.retention,
            wait=wait,
            clock=self._clock,
            on_lost=self._fail_children,
            warm=warm,
        )
        await self._vault.open()
        self._timer.arm()

    # --- sleep ---------------------------------------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        return not self._sleep.awake

    async def sleep(self, *, wakes_itself: bool) -> int:
        """Gives memory back until it is woken: so many bytes. `wakes_itself`: by a request, too, else these are
        refused. Raises EngineBusy while requests are open."""
        return await self._sleep.fall(wakes_itself=wakes_itself)

    async def wake(self) -> None:
        """Raises EngineAsleep if the memory is not there."""
        await self._sleep.wake()

    @asynccontextmanager
    async def long_answer(self) -> AsyncIterator[None]:
        """For an answer that takes several requests, one behind the other: until it is whole the engine neither falls
        asleep nor is drained, and admits those that go on. Raises EngineDraining, EngineDead, EngineAsleep."""
        self._check_open()
        async with self._sleep.kept_awake():
            yield

    async def _settled(self) -> None:
        """Returns when the device is asked for nothing: the last step of requests that have ended is on its way."""
        await self._launched.all_back()
        await self._vault.settled()

    # --- the end -------------------------------------------------------------------------------------------------

    async def _nothing_open(self) -> None:
        """Returns when no request is open, and nobody goes on without one."""
        while not (self._idle.is_set() and self._sleep.released.is_set()):
            await self._idle.wait()
            await self._sleep.released.wait()

    async def _write_leases(self, end: float) -> None:
        """What is leased goes to files until `end`, on the clock. An engine that sleeps wakes for what only it has."""
        if not self._sleep.awake and self._vault.unwritten():
            try:
                await asyncio.wait_for(self._sleep.wake(), max(0.0, end - self._clock()))
            except (EngineError, TimeoutError) as error:
                log.warning("leases that are not in files end with this process: %s", error or "waking takes too long")
                return
        await self._vault.flush(end)

    # --- the engine's --------------------------------------------------------------------------------------------

    @abstractmethod
    def _check_open(self) -> None:
        """Raises EngineDraining, EngineDead."""

    @abstractmethod
    def _next_due(self) -> float | None:
        """When the timer has to look."""

    @abstractmethod
    def _expire(self) -> None:
        """What is due."""

    @abstractmethod
    def _fail_children(self, record: Record, error: EngineError) -> None:
        """Ends those that wait for what is lost."""


def _parent_of(record: Record, reference: str) -> Parent:
    if record.failed:
        raise ParentFailed(
            f"The request '{reference}' ended before anything was computed.",
            reason="parent_failed",
            reference=reference,
            adapter=record.adapter_name,
        )
    if record.lost:
        message = f"The lease '{reference}' is lost."
        raise ParentLost(message, reason="parent_lost", id=record.id, adapter=record.adapter_name)
    return record.as_parent()


async def _ended(record: Record, reference: str, left: float | None, death: asyncio.Future[BaseException]) -> None:
    """Returns when it does not run any more. Raises DeadlineExceeded if it still does when `left` seconds are over."""
    if record.group is None:
        return
    end = asyncio.get_running_loop().create_future()
    with record.on_end(lambda: end.set_result(None)):
        await asyncio.wait({end, death}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    if death.done():
        raise EngineDead("The engine has failed.", reason="died")
    if not end.done():
        message = f"The deadline passed before the parent '{reference}' ended."
        raise DeadlineExceeded(message, reason="late_parent", field="deadline", reference=reference)
