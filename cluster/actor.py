"""The controller as an actor of Ray, so that a command in another terminal, or on another machine, can reach it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from bequest.cluster.controller import Controller
from bequest.cluster.looking import Looking
from bequest.cluster.overview import Overview
from bequest.cluster.ray_fleet import RayFleet, load
from bequest.cluster.router import Router
from bequest.cluster.settings import ClusterSettings


class ControllerActor:
    def __init__(self, settings: ClusterSettings, key: str | None) -> None:
        """`key`: one that may read the replicas' metrics."""
        logging.basicConfig(
            level="INFO",
            filename=f"{settings.folder}/controller.log",
            format="%(asctime)s %(levelname).1s %(message)s",
        )
        self._fleet = RayFleet(load(), settings)
        self._looking = Looking(key)
        routers = [Router(place, settings.holders) for place in settings.router_places()]
        self._controller = Controller(settings, self._fleet, routers, self._looking)
        self._settings = settings
        self._overview = Overview(lambda: self._controller.backends, self._controller.status)
        self._watching: asyncio.Task[None] | None = None
        self._routers = routers

    async def up(self) -> None:
        await self._overview.start(self._settings.overview_port)
        await self._controller.up()
        self._watching = asyncio.ensure_future(self._controller.watch())

    async def status(self) -> dict[str, Any]:
        return self._controller.status()

    async def pids(self) -> dict[str, int | None]:
        """Of servers and routers."""
        servers: dict[str, int | None] = {**await self._fleet.pids()}
        return servers | {f"router{number}": router.pid for number, router in enumerate(self._routers, 1)}

    async def scale(self, replicas: int) -> None:
        await self._controller.scale(replicas)

    async def renew(self) -> None:
        await self._controller.renew()

    async def down(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._controller.down()
        await self._overview.close()
        await self._looking.close()
