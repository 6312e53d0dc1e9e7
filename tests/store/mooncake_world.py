"""A Mooncake store on this machine: a master, and machines that give it memory, as processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_NODE = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"failed with {code}", flush=True)
time.sleep(3600)
"""


def why_not() -> str | None:
    """Why there is no Mooncake here; None: there is."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake cannot be used: {error}; make test-store installs it"
    return None


@dataclass
class Store:
    port: int
    metrics: int
    nodes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def master(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, name: str = "test") -> str:
        return f"mooncake://{self.master}/{name}?metrics={self.metrics}"

    def add_node(self, megabytes: int) -> None:
        command = [sys.executable, "-c", _NODE, self.master, str(megabytes << 20)]
        node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.nodes.append(node)
        assert node.stdout is not None
        said = node.stdout.readline().strip()
        assert said == "ready", f"a machine of the store {said}"


@contextmanager
def running_store(megabytes: int = 128, num_nodes: int = 2) -> Iterator[Store]:
    import mooncake

    store = Store(_free_port(), _free_port())
    binary = Path(mooncake.__file__).parent / "mooncake_master"
    flags = [f"--rpc_port={store.port}", f"--metrics_port={store.metrics}", "--rpc_address=127.0.0.1"]
    env = {**os.environ, "GLOG_minloglevel": "2"}
    master = subprocess.Popen([binary, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        _await_port(store.port)
        for _ in range(num_nodes):
            store.add_node(megabytes)
        yield store
    finally:
        for process in (*store.nodes, master):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_port(port: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError("the master does not listen")
