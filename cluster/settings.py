"""What `bequest cluster up` was asked for. Plain data: it goes to other processes, and to other machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bequest.cluster.haproxy import Holder
from bequest.cluster.router import RouterPlace

# From the port of the first router: replica rN listens at +100+N, what knows all of them at +99, and routers speak to
# each other at +50 and on.
_REPLICAS, _OVERVIEW, _PEERS = 100, 99, 50

LOOPBACK, ANYWHERE = "127.0.0.1", "0.0.0.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    replicas: int  # at the start
    least: int  # that scaling leaves
    most: int
    host: str = LOOPBACK  # of the routers
    port: int = 8000
    routers: int = 1  # at this port and those behind it
    replica_host: str = LOOPBACK  # that replicas listen on: all addresses, where they are on several machines
    folder: str = "/tmp/bequest-cluster"  # of logs and configurations
    estates: str | None = None  # directory that replicas share for leases that outlive them
    gpus: float = 0.0  # of each replica
    drain: float = 30.0  # seconds that a replica gets to finish, and to write its leases
    serve: tuple[str, ...] = ()  # arguments of `bequest serve`
    program: tuple[str, ...] = (sys.executable, "-m", "bequest", "serve")
    holders: Mapping[str, Holder] = field(default_factory=dict)  # by the digest of their keys
    certificate: str | None = None
    open_host: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"--min must be from 1 to --max ({self.most}), not {self.least}")
        if not self.least <= self.replicas <= self.most:
            raise ValueError(f"--replicas must be from --min ({self.least}) to --max ({self.most})")
        if self.routers < 1:
            raise ValueError(f"--routers must be at least 1, not {self.routers}")

    def replica_port(self, number: int) -> int:
        return self.port + _REPLICAS + number

    def log_of(self, number: int) -> str:
        return os.path.join(self.folder, f"{tag_of(number)}.log")

    @property
    def overview_port(self) -> int:
        return self.port + _OVERVIEW

    def command(self, number: int, host: str) -> list[str]:
        """Of a replica. It listens where its router reaches it."""
        tag = tag_of(number)
        place = ["--host", host, "--port", str(self.replica_port(number)), "--replica-tag", tag]
        files: list[str] = []
        if self.estates is not None:
            files = ["--estate-dir", os.path.join(self.estates, tag), "--estate-peers"]
        drain = ["--drain-timeout", f"{self.drain:g}"]
        return [*self.program, *self.serve, *place, *files, *drain]

    def router_places(self) -> list[RouterPlace]:
        names = [f"router{number + 1}" for number in range(self.routers)]
        peers = {name: f"127.0.0.1:{self.port + _PEERS + number}" for number, name in enumerate(names)}
        return [
            RouterPlace(
                host=self.host,
                port=self.port + number,
                folder=Path(self.folder) / name,
                name=name,
                peers=peers,
                overview=f"{LOOPBACK}:{self.overview_port}",
                open_host=self.open_host,
                certificate=self.certificate,
            )
            for number, name in enumerate(names)
        ]


def tag_of(number: int) -> str:
    return f"r{number}"
