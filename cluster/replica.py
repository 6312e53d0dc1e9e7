"""A replica: an actor of Ray that runs a server as its child, and ends with it.

Ray starts an actor again when its process ends. A server that ends by itself takes the actor along, so Ray starts both
again, on this machine or, where this one is gone, on another. A server never outlives its actor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bequest.engine.orphans import end_with_parent

_MARGIN = 20.0  # seconds beyond the drain, for the last answers
_PAUSE = 1.0  # seconds before a server that ended by itself is started again


class ServerProcess:
    """Started, ended and watched by one thread, which lives as long as this process: the kernel ends a child when the
    thread that started it ends."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = list(command), log
        self._wanted = True
        self._started, self._ended = threading.Event(), threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._begin()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self, patience: float) -> int:
        """The server drains; its exit status. One that takes longer is killed."""
        self._wanted = False
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        if not self._ended.wait(patience + _MARGIN):
            self._process.kill()
            self._ended.wait()
        return self._process.returncode

    def begin_again(self) -> None:
        """REQUIRES: it has ended"""
        self._begin()

    def _begin(self) -> None:
        self._wanted = True
        self._started.clear()
        self._ended.clear()
        threading.Thread(target=self._run, name="server", daemon=True).start()
        self._started.wait()

    def _run(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(end_with_parent, signal.SIGKILL),
            )
        self._started.set()
        self._process.wait()
        self._ended.set()
        if self._wanted:
            time.sleep(_PAUSE)
            os._exit(1)


class Replica:
    """The actor. Its methods are called over Ray."""

    def __init__(self, command: Sequence[str], log: str, drain: float) -> None:
        path = Path(log)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._drain = drain
        self._server = ServerProcess(command, path)

    def pid(self) -> int:
        """Of the server."""
        return self._server.pid

    def node_address(self) -> str:
        """Of this machine, as others of Ray's cluster reach it."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return address

    def renew(self) -> int:
        code = self._server.end(self._drain)
        self._server.begin_again()
        return code

    def end(self) -> int:
        return self._server.end(self._drain)
