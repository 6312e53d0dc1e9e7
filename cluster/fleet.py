"""Replicas as the controller sees them, whoever places them."""

from __future__ import annotations

from typing import Protocol

from bequest.cluster.haproxy import Backend


class Fleet(Protocol):
    async def start(self, number: int) -> Backend:
        """Places a replica and starts its server, which loads its model from then on. One that dies is started
        again."""

    async def locate(self, number: int) -> Backend | None:
        """Where it is now: one whose machine is gone is started on another. None: nowhere yet."""

    async def renew(self, number: int) -> None:
        """Its server drains, ends, and is started again; returns when the new one loads."""

    async def keeps(self, number: int) -> bool:
        """Whether the server that was started when it was renewed has not ended since."""

    async def retire(self, number: int) -> None:
        """Its server drains and ends for good."""
