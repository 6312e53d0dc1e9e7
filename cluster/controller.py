"""Keeps the replicas and the routers as they should be: starts, drains, renews, scales, and knows how all stand.

One task at a time changes anything. Nothing here sees a request: if the controller ends, routers go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from bequest.cluster.figures import Figures, as_dict, total
from bequest.cluster.fleet import Fleet
from bequest.cluster.haproxy import FULL_WEIGHT, Backend
from bequest.cluster.router import Router, RouterError
from bequest.cluster.scaling import Load, Scaling, weight_of
from bequest.cluster.settings import ClusterSettings, tag_of

log = logging.getLogger("bequest.cluster")
_LOOK = 1.0  # seconds between looks at the replicas
_REACH = 30.0  # seconds that routers get to find a replica that is back
State = Literal["loading", "ready", "draining", "down"]
# What a replica says of itself: None where it does not answer.
Looker = Callable[[Backend], Awaitable[tuple[State, Figures] | None]]


@dataclass(slots=True)
class _Replica:
    backend: Backend
    state: State = "loading"
    weight: int = FULL_WEIGHT  # as the routers have it
    figures: Figures = field(default_factory=Figures)


class ReplicaEnded(Exception):
    """A server did not come back from a restart."""


class Controller:
    def __init__(
        self,
        settings: ClusterSettings,
        fleet: Fleet,
        routers: list[Router],
        look: Looker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._fleet, self._routers, self._look, self._clock = settings, fleet, routers, look, clock
        self._replicas: dict[int, _Replica] = {}
        self._scaling = Scaling(settings.least, settings.most)
        self._changing = asyncio.Lock()
        self._ending = False  # nobody waits for replicas any more
        self._before = Figures()

    # --- what the command asks for -------------------------------------------------------------------------------

    async def up(self) -> None:
        """Starts all; replicas load their models from then on. Raises RouterError."""
        async with self._changing:
            await asyncio.gather(*(self._add(number) for number in range(1, self._settings.replicas + 1)))
            for router in self._routers:
                await asyncio.to_thread(router.start, self.backends)

    async def scale(self, replicas: int) -> None:
        """Raises ValueError."""
        least, most = self._settings.least, self._settings.most
        if not least <= replicas <= most:
            raise ValueError(f"the number of replicas must be from {least} (--min) to {most} (--max), not {replicas}")
        async with self._changing:
            await self._scale(replicas)

    async def renew(self) -> None:
        """A rolling restart: one after the other, each when the one before it takes work again. Raises ReplicaEnded
        where one does not."""
        async with self._changing:
            for number in sorted(self._replicas):
                if self._ending:
                    return
                log.info("%s is restarted", tag_of(number))
                await self._drained(number)
                try:
                    await self._fleet.renew(number)
                    await self._until_ready(number)
                finally:  # what routers know of its health keeps prompts from one that is not back
                    await self._set_state(number, "ready")
                await self._until_reached(number)

    async def down(self) -> None:
        """Routers stay until the last answer has left."""
        self._ending = True
        async with self._changing:
            await asyncio.gather(*(self._fleet.retire(number) for number in self._replicas))
            for router in self._routers:
                await asyncio.to_thread(router.stop)
            self._replicas.clear()

    def status(self) -> dict[str, Any]:
        return {
            "replicas": {
                one.backend.tag: {
                    "address": f"{one.backend.host}:{one.backend.port}",
                    "state": one.state,
                    **as_dict(one.figures),
                }
                for _, one in sorted(self._replicas.items())
            },
            "sum": as_dict(total(one.figures for one in self._replicas.values())),
            "routers": [{"address": router.address, "alive": router.is_alive} for router in self._routers],
        }

    # --- what goes on by itself ----------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Looks, mends and scales until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK)
            try:
                await self.look_once()
            except (RouterError, OSError) as error:
                log.warning("%s", error)

    async def look_once(self) -> None:
        await asyncio.gather(*(self._see(one) for one in list(self._replicas.values())))
        if self._changing.locked():
            return
        async with self._changing:
            await self._find_moved()
            for router in self._routers:
                if not router.is_alive:
                    log.error("a router has ended; it is started again")
                    await asyncio.to_thread(router.start, self.backends)
                    self._forget_weights()
            await self._weigh()
            wanted = self._scaling.wanted(self._load(), self._clock())
            if wanted != len(self._replicas):
                log.info("%d replicas are wanted, and there are %d", wanted, len(self._replicas))
                await self._scale(wanted)

    async def _weigh(self) -> None:
        for one in self._replicas.values():
            weight = weight_of(one.figures.leased_share, FULL_WEIGHT)
            if one.state == "ready" and weight != one.weight:
                for router in self._routers:
                    await asyncio.to_thread(router.set_weight, one.backend.tag, weight)
                one.weight = weight

    async def _see(self, one: _Replica) -> None:
        seen = await self._look(one.backend)
        one.state, one.figures = ("down", one.figures) if seen is None else seen

    async def _find_moved(self) -> None:
        """One whose machine is gone may be on another."""
        moved = False
        for number, one in self._replicas.items():
            found = await self._fleet.locate(number) if one.state == "down" else None
            if found is not None and found != one.backend:
                log.warning("%s is at %s:%d now", found.tag, found.host, found.port)
                one.backend, moved = found, True
        if moved:
            await self._reload()

    def _load(self) -> Load:
        now = total(one.figures for one in self._replicas.values())
        before, self._before = self._before, now
        share, count = now.leased_share, max(len(self._replicas), 1)
        return Load(replicas=count, wait=now.mean_wait(before), waiting=now.waiting, leased_share=share)

    # --- inside --------------------------------------------------------------------------------------------------

    @property
    def backends(self) -> list[Backend]:
        return [one.backend for _, one in sorted(self._replicas.items())]

    async def _add(self, number: int) -> None:
        self._replicas[number] = _Replica(await self._fleet.start(number))

    async def _scale(self, replicas: int) -> None:
        """New ones get the lowest numbers that are free; the youngest go first, for they hold least."""
        while len(self._replicas) < replicas:
            await self._add(next(number for number in range(1, replicas + 1) if number not in self._replicas))
            await self._reload()
        while len(self._replicas) > replicas:
            number = max(self._replicas)
            await self._drained(number)
            await self._fleet.retire(number)
            del self._replicas[number]
            await self._reload()

    async def _reload(self) -> None:
        for router in self._routers:
            await asyncio.to_thread(router.reload, self.backends)
        self._forget_weights()

    def _forget_weights(self) -> None:
        """A router that begins anew has all of them full."""
        for one in self._replicas.values():
            one.weight = FULL_WEIGHT

    async def _drained(self, number: int) -> None:
        """No new prompts come. What runs ends, and leases are written, when its server is told to end."""
        self._replicas[number].state = "draining"
        await self._set_state(number, "drain")

    async def _set_state(self, number: int, state: str) -> None:
        for router in self._routers:
            with suppress(RouterError):  # one that has ended is started again with all of them ready
                await asyncio.to_thread(router.set_state, tag_of(number), state)

    async def _until_ready(self, number: int) -> None:
        one = self._replicas[number]
        while not self._ending:
            await self._see(one)
            if one.state == "ready":
                return
            if not await self._fleet.keeps(number):
                raise ReplicaEnded(
                    f"{one.backend.tag} ended while it loaded, and is started again and again; why is in "
                    f"{self._settings.log_of(number)}. Those behind it were not restarted."
                )
            await asyncio.sleep(_LOOK / 4)

    async def _until_reached(self, number: int) -> None:
        """Routers find by checks of their own that a replica is back. If the next one left before, they had nobody."""
        end = self._clock() + _REACH
        for router in self._routers:
            with suppress(RouterError):  # one that has ended is started again with all of them
                while not await asyncio.to_thread(router.reaches, tag_of(number)):
                    if self._clock() > end:
                        log.warning("a router does not reach %s", tag_of(number))
                        break
                    await asyncio.sleep(_LOOK / 4)
