"""The processes of the other ranks, as the one that serves sees them: started, told, watched, ended.

They end with this process, however it ends: a channel whose other side is gone ends them, and the kernel kills those
that do not even see that.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.ranks.channel import Writer
from bequest.engine.ranks.orders import READY, Order, encode_order

_MODULE = "bequest.engine.ranks.following"
_ROOT = Path(__file__).parents[3]  # where this package is found, however this process found it
_GRACE = 5.0  # seconds for a process to end, or to be seen to have ended
_LOOK = 0.01  # seconds between looks


class RankEnded(Exception):
    """Another rank is gone: no step can be computed any more."""


class Followers:
    def __init__(self, config: EngineConfig, path: Path, meeting: str) -> None:
        """Returns when all are about to load. Raises ModelError."""
        pairs = [socket.socketpair() for _ in range(config.tensor_parallel_size - 1)]
        own = [ours for ours, _ in pairs]
        self._writer = Writer(own)
        self._processes = []
        for number, (_, theirs) in enumerate(pairs):
            order = Order(
                config=config,
                path=str(path),
                meeting=meeting,
                rank=number + 1,
                size=config.tensor_parallel_size,
                socket=theirs.fileno(),
                memory=self._writer.descriptor,
            )
            self._processes.append(FollowerProcess(order))
            theirs.close()
        for number, ours in enumerate(own):
            if ours.recv(1) != READY:
                self.end()
                raise ModelError(f"tensor_parallel_size: rank {number + 1} ended at its start; stderr says why")

    def tell(self, message: bytes) -> None:
        """All of them. Raises ReaderGone."""
        self._writer.write(message)

    def find_ended(self) -> str | None:
        """The first that is gone, or is about to be, for people."""
        until = time.monotonic() + _GRACE
        while time.monotonic() < until:
            for process in self._processes:
                if process.ended is not None:
                    return str(process.ended)
            time.sleep(_LOOK)
        return None

    def watch(self, on_death: Callable[[BaseException], None]) -> None:
        """Calls it for each that ends before it was told to, on a thread of its own."""
        for process in self._processes:
            process.watch(on_death)

    def end(self) -> None:
        for process in self._processes:
            process.watch(_ignore)
        self._writer.close()
        for process in self._processes:
            process.end()


class FollowerProcess:
    """One of them. The thread that starts it stays: the kernel kills the process when that thread is gone, so that not
    even one that is stopped outlives the server."""

    def __init__(self, order: Order) -> None:
        self.ended: RankEnded | None = None
        self._rank = order.rank
        self._lock = threading.Lock()
        self._on_death: Callable[[BaseException], None] = _ignore
        self._started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        name = f"bequest-rank-{order.rank}"
        self._thread = threading.Thread(target=self._keep, args=(order,), name=name, daemon=True)
        self._thread.start()
        started = self._started.get()
        if isinstance(started, OSError):
            raise started
        self._process = started

    def watch(self, on_death: Callable[[BaseException], None]) -> None:
        with self._lock:
            self._on_death = on_death
            if self.ended is not None:
                on_death(self.ended)

    def end(self) -> None:
        """REQUIRES: its channel is closed"""
        self._thread.join(_GRACE)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()

    def _keep(self, order: Order) -> None:
        try:
            process = _started(order)
        except OSError as error:
            self._started.put(error)
            return
        self._started.put(process)
        code = process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        with self._lock:
            self.ended = RankEnded(f"rank {self._rank} ended ({how})")
            self._on_death(self.ended)


def _ignore(error: BaseException) -> None:
    """Nobody asks, or it was told to end."""


def _started(order: Order) -> subprocess.Popen[bytes]:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE],
        stdin=subprocess.PIPE,
        pass_fds=(order.socket, order.memory),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdin is not None
    with process.stdin as orders:
        orders.write(encode_order(order))
    return process
