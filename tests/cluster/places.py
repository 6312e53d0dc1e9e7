"""Servers and routers of the tests, as processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from bequest.cluster.haproxy import Backend, Holder
from bequest.cluster.router import Router, RouterPlace

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0


def free_ports(count: int) -> list[int]:
    """That nobody has at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


class Process:
    """A server of a fake engine, or any other command that says `ready on` where it listens."""

    def __init__(self, tag: str, log: Path, command: list[str]) -> None:
        self.tag, self._log, self._command = tag, log, command
        self.port = 0
        self.start()

    def start(self) -> None:
        with self._log.open("w") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(self._command, stderr=log, cwd=ROOT, env=environment)
        end = time.monotonic() + PATIENCE
        while (match := re.search(r"ready on http://127\.0\.0\.1:(\d+)", self._log.read_text())) is None:
            assert self.process.poll() is None and time.monotonic() < end, self._log.read_text()
            time.sleep(0.05)
        self.port = int(match[1])

    @property
    def backend(self) -> Backend:
        return Backend(self.tag, "127.0.0.1", self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


def fake(tag: str, folder: Path, *flags: str) -> Process:
    command = [sys.executable, "-m", "tests.server.fake_process", "--replica-tag", tag, *flags]
    return Process(tag, folder / f"{tag}.log", command)


class Routed:
    """A router over some servers."""

    def __init__(self, folder: Path, servers: list[Process], holders: dict[str, Holder] | None = None) -> None:
        port, peer = free_ports(2)
        self.servers = {server.tag: server for server in servers}
        peers = {"router1": f"127.0.0.1:{peer}"}
        place = RouterPlace(host="127.0.0.1", port=port, folder=folder / "router", peers=peers)
        self.router = Router(place, holders or {})
        self.url = f"http://127.0.0.1:{port}"

    @property
    def backends(self) -> list[Backend]:
        return [server.backend for server in self.servers.values()]

    def __enter__(self) -> Routed:
        try:
            self.router.start(self.backends)
            self.until_up(*self.servers)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        self.router.stop()
        for server in self.servers.values():
            if server.process.poll() is None:
                server.kill()

    def status(self, tag: str) -> str:
        """As the router sees it: UP, DOWN, DRAIN."""
        for line in self.router.ask("show stat").splitlines():
            if line.startswith(f"replicas,{tag},"):
                return line.split(",")[17]
        return "unknown"

    def until_up(self, *tags: str) -> None:
        self.until(lambda: all(self.status(tag) == "UP" for tag in tags))

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.05)
