"""Replicas on Ray Core: each is an actor with its share of GPUs, started again by Ray when it dies."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

from bequest.cluster.haproxy import Backend
from bequest.cluster.settings import LOOPBACK, ClusterSettings, tag_of

NAMESPACE, CONTROLLER = "bequest", "controller"
_PATIENCE = 2.0  # seconds
_STORE_BYTES = 80 << 20  # Ray's least: nothing of a request passes through it


class RayMissing(Exception):
    """Ray is not installed."""


def load() -> Any:
    """Ray, without its reports to its makers, and with workers that are not the last to run: servers are their
    children. Raises RayMissing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError:
        raise RayMissing("Ray is not installed: pip install 'bequest[cluster]'") from None
    return ray


def begin(ray: Any, address: str | None) -> None:
    """Joins Ray's cluster at `address`, or starts one of this machine alone."""
    if address is None:
        ray.init(
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            logging_level="warning",
        )
    else:
        join(ray, address)


def join(ray: Any, address: str) -> None:
    """Raises ConnectionError where there is none."""
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")


class RayFleet:
    """A Fleet."""

    def __init__(self, ray: Any, settings: ClusterSettings) -> None:
        self._ray, self._settings = ray, settings
        self._actors: dict[int, Any] = {}
        self._renewed: dict[int, int] = {}  # process ids of servers

    async def start(self, number: int) -> Backend:
        from bequest.cluster.replica import Replica

        tag, host = tag_of(number), self._settings.replica_host
        actor = self._ray.remote(Replica).options(
            name=f"replica-{tag}", num_cpus=0, num_gpus=self._settings.gpus, max_restarts=-1, max_concurrency=2
        )
        command, log = self._settings.command(number, host), self._settings.log_of(number)
        self._actors[number] = actor.remote(command, log, self._settings.drain)
        return await self._backend(number)

    async def locate(self, number: int) -> Backend | None:
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._backend(number)
        except (TimeoutError, self._ray.exceptions.RayError):
            return None

    async def renew(self, number: int) -> None:
        await self._actors[number].renew.remote()
        self._renewed[number] = await self._actors[number].pid.remote()

    async def keeps(self, number: int) -> bool:
        try:
            async with asyncio.timeout(_PATIENCE):
                return bool(await self._actors[number].pid.remote() == self._renewed[number])
        except (TimeoutError, self._ray.exceptions.RayError):
            return False

    async def retire(self, number: int) -> None:
        actor = self._actors.pop(number)
        with suppress(self._ray.exceptions.RayError):  # its server ended by itself a moment ago
            await actor.end.remote()
        self._ray.kill(actor, no_restart=True)

    async def pids(self) -> dict[str, int]:
        """Of the servers."""
        return {tag_of(number): await actor.pid.remote() for number, actor in self._actors.items()}

    async def _backend(self, number: int) -> Backend:
        """On the machine that Ray chose."""
        host = await self._actors[number].node_address.remote()
        if self._settings.replica_host == LOOPBACK:
            host = LOOPBACK
        return Backend(tag_of(number), host, self._settings.replica_port(number))
