"""The adapters of an engine: which are loaded, under which names, and who needs them. Event-loop thread.

A load reads and checks its files in a worker thread, while steps go on; the device is then told of what is in memory
already. Where it has fewer seats than adapters are loaded, a worker brings one to it when a sequence waits for that
(engine/scheduling/adapter_seats.py).

What an adapter computed belongs to that load: another one of the same name has another handle, and so another part of
the prefix index (engine/cache/salt.py).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from bequest.engine.config import ADAPTER_NAME
from bequest.engine.device import DeviceThread
from bequest.engine.errors import AdapterInUse, AdapterNotFound, InvalidAdapter
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.state.sequence import Group
from bequest.engine.types.adapter import AdapterRef, AdapterSource, AdapterWeights
from bequest.engine.types.device import AdapterRegistration, AdapterRelease
from bequest.engine.watching.observation import AdapterLoad

log = logging.getLogger("bequest.engine")

_MOST_TOLD = 8  # ids in an error


class AdapterDesk:
    def __init__(
        self, device: DeviceThread, scheduler: Scheduler, groups: Mapping[str, Group], source: AdapterSource
    ) -> None:
        """`groups`: the open ones of the engine."""
        self._device, self._scheduler, self._groups, self._source = device, scheduler, groups, source
        self._retention, self._seats = scheduler.retention, scheduler.seats
        self._seats.most, self._seats.bring = source.seats, self._bring
        self._seats.dismiss = lambda handle: device.tell(AdapterRelease(handle))
        self._loaded: dict[str, AdapterRef] = {}
        self._weights: dict[int, AdapterWeights] = {}  # by handle; where the device has seats
        self._errands: set[asyncio.Task[None]] = set()
        self._carrying = asyncio.Lock()  # one after the other: several would share the same way to the device
        self._loading: set[str] = set()
        self._last = 0

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def refs(self) -> tuple[AdapterRef, ...]:
        return tuple(self._loaded.values())

    def find(self, name: str) -> AdapterRef | None:
        return self._loaded.get(name)

    def find_identity(self, identity: str) -> AdapterRef | None:
        """The one with this name and content."""
        return next((ref for ref in self._loaded.values() if ref.identity == identity), None)

    def check(self, ref: AdapterRef | None) -> None:
        """Raises AdapterNotFound if this very adapter is not loaded any more."""
        if ref is not None and self._loaded.get(ref.name) != ref:
            raise _not_found(ref.name)

    async def load(self, name: str, directory: Path, *, replaces: bool = False) -> AdapterRef:
        """`replaces`: one of this name goes when the files have been read. Raises InvalidAdapter, or AdapterInUse for
        the one that would go, with nothing changed."""
        if not (replaces and name in self._loaded) or name in self._loading:
            self._check_new(name)
        self._loading.add(name)
        try:
            weights = await asyncio.to_thread(self._source.load, directory)
        finally:
            self._loading.discard(name)
        if replaces and name in self._loaded:
            self.unload(name)
        return self.add(name, weights)

    def add(self, name: str, weights: AdapterWeights) -> AdapterRef:
        """One whose files have been read."""
        self._check_new(name)
        self._last += 1
        ref = self._loaded[name] = AdapterRef(name, self._last, weights.digest, self._retention.wall())
        if self._source.seats is None:
            self._device.tell(AdapterRegistration(ref.handle, weights))
        else:
            self._weights[ref.handle] = weights
            self._seats.offer(ref.handle)
        size = f"{weights.num_bytes / 2**20:.1f} MiB"
        log.info("adapter %s: loaded, rank %d, %s", name, weights.rank, size)
        return ref

    def load_now(self) -> AdapterLoad:
        """For whoever watches."""
        running: set[str] = set()
        waiting: set[str] = set()
        for group in self._groups.values():
            if (ref := group.request.adapter) is not None:
                (waiting if group.times.admitted is None else running).add(ref.name)
        at_once = self._source.most if self._source.seats is None else self._source.seats
        return AdapterLoad(len(self), at_once, tuple(sorted(running)), tuple(sorted(waiting)))

    async def settled(self) -> None:
        """Returns when none is on its way to the device."""
        while self._errands:
            await asyncio.wait(set(self._errands))

    def unload(self, name: str) -> None:
        """What it left without a lease is forgotten. Raises AdapterNotFound, or AdapterInUse, with nothing changed."""
        ref = self._loaded.get(name)
        if ref is None:
            raise _not_found(name)
        requests = [id for id, group in self._groups.items() if group.request.adapter == ref]
        records = self._retention.computed_with(ref)
        leases = [record.id for record in records if record.leased]
        if requests or leases:
            raise _in_use(name, requests, leases)
        for record in records:
            self._retention.expire_record(record)
        del self._loaded[name]
        if self._source.seats is None:
            self._device.tell(AdapterRelease(ref.handle))
        else:
            del self._weights[ref.handle]
            self._seats.forget(ref.handle)
        log.info("adapter %s: unloaded", name)

    def _bring(self, handle: int) -> None:
        errand = asyncio.create_task(self._carry(handle, self._weights[handle]))
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    async def _carry(self, handle: int, weights: AdapterWeights) -> None:
        """To a seat that was free when this was called, or is when the device has heard what it was told."""
        try:
            async with self._carrying:
                placed = await asyncio.to_thread(self._source.place, weights)
        except InvalidAdapter as error:
            log.warning("an adapter could not be brought to the device: %s", error)
            self._seats.left(handle)
        else:
            if handle in self._weights:
                self._device.tell(AdapterRegistration(handle, placed))
                self._seats.came(handle)
            else:  # unloaded meanwhile
                del placed
                self._seats.left(handle)
        self._scheduler.wake()

    def _check_new(self, name: str) -> None:
        if not re.fullmatch(ADAPTER_NAME, name):
            raise InvalidAdapter(
                "The name of an adapter has 1 to 128 ASCII characters, without spaces and equals signs.",
                reason="adapter_name",
            )
        if name in self._loaded or name in self._loading:
            raise InvalidAdapter(f"An adapter '{name}' is loaded already.", reason="adapter_loaded", name=name)
        if (count := len(self._loaded.keys() | self._loading)) >= (most := self._source.most):
            message = f"{count} adapters are loaded, and {most} may be."
            raise InvalidAdapter(message, reason="too_many_adapters", most=most)


def _not_found(name: str) -> AdapterNotFound:
    return AdapterNotFound(f"There is no adapter '{name}'.", reason="adapter_unknown", name=name)


def _in_use(name: str, requests: list[str], leases: list[str]) -> AdapterInUse:
    needed_by = [f"{len(ids)} {what}" for ids, what in ((requests, "open request(s)"), (leases, "lease(s)")) if ids]
    return AdapterInUse(
        f"The adapter '{name}' is needed by {' and '.join(needed_by)}.",
        reason="adapter_in_use",
        details={
            "num_requests": len(requests),
            "num_leases": len(leases),
            "requests": requests[:_MOST_TOLD],
            "leases": leases[:_MOST_TOLD],
        },
        name=name,
        users=" and ".join(needed_by),
        ids=", ".join([*requests, *leases][:_MOST_TOLD]),
    )
