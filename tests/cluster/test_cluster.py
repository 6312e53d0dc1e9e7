"""`bequest cluster` over a real Ray and a real HAProxy, with servers of a fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.cluster.places import ROOT, free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
_PATIENCE = 180.0
_DRIVER = """
import signal, sys, threading
from bequest.cluster import command, ray_fleet
from bequest.cluster.settings import ClusterSettings
program = (sys.executable, "-m", "tests.server.fake_process")
settings = ClusterSettings(replicas=2, least=1, most=3, port=int(sys.argv[1]), folder=sys.argv[2], drain=5.0,
                           program=program)
stopped = threading.Event()
ray = ray_fleet.load()
ray_fleet.begin(ray, None)
signal.signal(signal.SIGTERM, lambda *_: stopped.set())  # behind Ray, which takes it for itself
controller = command.start(ray, settings)
print("up", flush=True)
while not stopped.wait(0.5):
    pass
ray.get(controller.down.remote())
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        [self.port] = free_ports(1)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(self.port), str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self._environment,
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "up\n"

    def run(self, *words: str) -> str:
        """A command in another terminal."""
        command = [sys.executable, "-m", "bequest", "cluster", *words]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=self._environment, timeout=300)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.run("status", "--json"))
        return status

    def states(self) -> dict[str, str]:
        return {tag: one["state"] for tag, one in self.status()["replicas"].items()}

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster
    finally:
        cluster.end()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.3)


def tags_of(cluster: Cluster) -> set[str]:
    """Who answers."""
    found = set()
    for number in range(16):
        body = {"prompt": f"{number} who", "max_tokens": 1}
        with suppress(requests.ConnectionError):  # no router listens
            answer = requests.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
            if answer.ok:
                found.add(answer.headers["X-Bequest-Replica"])
    return found


def processes(*words: str) -> list[int]:
    """Those whose command lines have all these words."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and {word.encode() for word in words} <= {
                *(entry / "cmdline").read_bytes().split(b"\0")
            }:
                found.append(int(entry.name))
    return sorted(found)


def pid_of(cluster: Cluster, tag: str) -> int | None:
    port = cluster.port + 100 + int(tag[1:])
    return next(iter(processes("tests.server.fake_process", tag, str(port))), None)


def test_it_comes_up_and_answers(cluster: Cluster) -> None:
    until(lambda: tags_of(cluster) == {"r1", "r2"})
    assert cluster.states() == {"r1": "ready", "r2": "ready"}


def test_metrics_and_state_are_those_of_all(cluster: Cluster) -> None:
    """At the router, each with its replica; one that is named answers itself. A chosen page still sees all."""
    until(lambda: requests.get(f"{cluster.url}/metrics", timeout=30).text.count("bequest:replica_up{") == 2)
    text = requests.get(f"{cluster.url}/metrics", timeout=30).text
    for tag in ("r1", "r2"):
        assert f'bequest:replica_up{{replica="{tag}"}} 1' in text
        assert f'vllm:num_requests_running{{replica="{tag}",model_name=' in text
    assert "replica=" not in requests.get(f"{cluster.url}/metrics?bequest-replica=r2", timeout=30).text
    state = requests.get(f"{cluster.url}/cluster/state", cookies={"bequest-replica": "r2"}, timeout=30).json()
    assert set(state["replicas"]) == {"r1", "r2"} and state["sum"]["running"] == 0


def test_a_server_that_is_killed_is_started_again(cluster: Cluster) -> None:
    before = pid_of(cluster, "r1")
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: pid_of(cluster, "r1") not in (before, None))
    until(lambda: tags_of(cluster) == {"r1", "r2"})


def test_a_router_that_is_killed_is_started_again(cluster: Cluster) -> None:
    """The master and its worker."""
    configuration = str(cluster.folder / "router1" / "haproxy.cfg")
    before = processes(configuration)
    assert before
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(lambda: bool(processes(configuration)) and not {*processes(configuration)} & {*before})
    until(lambda: tags_of(cluster) == {"r1", "r2"})


def test_it_is_scaled_from_another_terminal(cluster: Cluster) -> None:
    cluster.run("scale", "3")
    until(lambda: tags_of(cluster) == {"r1", "r2", "r3"})
    cluster.run("scale", "2")
    assert set(cluster.states()) == {"r1", "r2"}
    assert pid_of(cluster, "r3") is None


def test_a_rolling_restart_refuses_nothing(cluster: Cluster) -> None:
    before = {tag: pid_of(cluster, tag) for tag in ("r1", "r2")}
    restarting = subprocess.Popen(
        [sys.executable, "-m", "bequest", "cluster", "restart"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    refused: list[str] = []
    number = 0
    while restarting.poll() is None:
        number += 1
        body = {"prompt": f"{number} meanwhile", "max_tokens": 3}
        answer = requests.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
        if not answer.ok:
            refused.append(answer.text)
    assert restarting.returncode == 0
    assert number > 5 and refused == []
    assert all(pid_of(cluster, tag) not in (pid, None) for tag, pid in before.items())


def test_down_ends_every_process(cluster: Cluster) -> None:
    cluster.run("down")
    assert pid_of(cluster, "r1") is None and pid_of(cluster, "r2") is None
