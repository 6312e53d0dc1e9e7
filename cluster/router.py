"""HAProxy as a process: started, reloaded without losing a connection, asked over its admin socket, ended."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bequest.cluster.haproxy import Backend, Holder, Routing, configuration, tenants_map

log = logging.getLogger("bequest.cluster")
_PATIENCE = 10.0  # seconds for a router to listen, and to end
_LOOK = 0.05
_RUNNING = "2"  # as `show servers state` has it


class RouterError(Exception):
    """HAProxy is not here, or does not take its configuration."""


def find_haproxy() -> str:
    """Raises RouterError."""
    found = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        raise RouterError("haproxy is not installed: on Debian and Ubuntu, apt-get install haproxy")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlace:
    """Where a router listens, and which others it shares the table of names with."""

    host: str
    port: int
    folder: Path  # of its files
    name: str = "router1"
    peers: Mapping[str, str]  # name → host:port, its own too
    overview: str | None = None  # host:port of what knows all replicas
    open_host: bool = False
    certificate: str | None = None


class Router:
    def __init__(self, place: RouterPlace, holders: Mapping[str, Holder]) -> None:
        """`holders`: by the SHA-256 of their keys. Raises RouterError."""
        self._command = [find_haproxy(), "-W", "-L", place.name, "-f", str(place.folder / "haproxy.cfg")]
        self._place = place
        self._socket = place.folder / "admin.sock"
        self._process: subprocess.Popen[bytes] | None = None
        place.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (place.folder / "tenants.map").write_text(tenants_map(holders))

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def address(self) -> str:
        return f"{'http' if self._place.certificate is None else 'https'}://{self._place.host}:{self._place.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, backends: list[Backend]) -> None:
        """Returns when it listens. Raises RouterError."""
        self._write(backends)
        self._end_leftover()
        self._take_port()
        self._socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        end = time.monotonic() + _PATIENCE
        while not self._listens():
            if not self.is_alive or time.monotonic() > end:
                self.stop()
                raise RouterError(f"haproxy does not listen on {self._place.host}:{self._place.port}")
            time.sleep(_LOOK)

    def _end_leftover(self) -> None:
        """A router of a cluster that was killed goes on without it, and knows servers that are gone. Its master ends
        with its worker."""
        end = time.monotonic() + _PATIENCE
        while (worker := self._worker()) is not None and time.monotonic() < end:
            log.warning("a router that was left behind is ended (%s)", worker)
            with suppress(ProcessLookupError):
                os.kill(int(worker), signal.SIGTERM)
            time.sleep(_LOOK)

    def _take_port(self) -> None:
        """HAProxy would share the port with another one, and each would get some of the connections."""
        host, port = self._place.host, self._place.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        end = time.monotonic() + _PATIENCE
        while True:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                    return
                except OSError as error:
                    if time.monotonic() > end or error.errno != errno.EADDRINUSE:
                        raise RouterError(f"the router cannot listen on {host}:{port}: {error.strerror}") from None
            time.sleep(_LOOK)

    def reload(self, backends: list[Backend]) -> None:
        """The old process ends its connections, a new one takes all others and the table of names."""
        self._write(backends)
        if self._process is None or not self.is_alive:
            self.start(backends)
            return
        before = self._worker()
        self._process.send_signal(signal.SIGUSR2)
        end = time.monotonic() + _PATIENCE
        while self._worker() in (before, None):
            if time.monotonic() > end:
                raise RouterError("haproxy does not come back from a reload")
            time.sleep(_LOOK)

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def set_state(self, tag: str, state: str) -> None:
        """`drain`: no new prompts, what it holds still reaches it; `ready`. Raises RouterError."""
        answer = self.ask(f"set server replicas/{tag} state {state}").strip()
        if answer:
            raise RouterError(f"haproxy: {answer}")

    def reaches(self, tag: str) -> bool:
        """Whether its own checks have found the replica. Raises RouterError."""
        shown = (line.split() for line in self.ask("show servers state replicas").splitlines())
        return any(fields[3] == tag and fields[5] == _RUNNING for fields in shown if len(fields) > 5)

    def set_weight(self, tag: str, weight: int) -> None:
        """Its share of the prompts that begin anew; 0 is none. Raises RouterError."""
        answer = self.ask(f"set weight replicas/{tag} {weight}").strip()
        if answer:
            raise RouterError(f"haproxy: {answer}")

    def ask(self, command: str) -> str:
        """A command of HAProxy's runtime API. Raises RouterError."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_PATIENCE)
                connection.connect(str(self._socket))
                connection.sendall(command.encode() + b"\n")
                parts = list(iter(lambda: connection.recv(65536), b""))
        except OSError as error:
            raise RouterError(f"haproxy does not answer on {self._socket}: {error.strerror}") from None
        return b"".join(parts).decode()

    def _write(self, backends: list[Backend]) -> None:
        place = self._place
        routing = Routing(
            host=place.host,
            port=place.port,
            backends=backends,
            admin_socket=str(self._socket),
            tenants=str(place.folder / "tenants.map"),
            name=place.name,
            peers=place.peers,
            overview=place.overview,
            open_host=place.open_host,
            certificate=place.certificate,
        )
        path = place.folder / "haproxy.cfg"
        path.write_text(configuration(routing))
        checked = subprocess.run([*self._command, "-c"], capture_output=True, text=True)
        if checked.returncode != 0:
            raise RouterError(f"haproxy does not take {path}:\n{checked.stderr.strip()}")

    @property
    def worker_pid(self) -> int:
        """Of the process that carries the bytes. Raises RouterError."""
        pid = self._worker()
        if pid is None:
            raise RouterError("haproxy does not answer")
        return int(pid)

    def _worker(self) -> str | None:
        """The process id of whoever listens."""
        try:
            shown = self.ask("show info")
        except RouterError:
            return None
        return next((line.split()[1] for line in shown.splitlines() if line.startswith("Pid:")), None)

    def _listens(self) -> bool:
        return self._worker() is not None
