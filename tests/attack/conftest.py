"""Servers to attack; README.md says how."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import pytest

from benchmarks.model_shapes import write_model
from bequest.engine.config import EngineConfig, ServerConfig
from bequest.server.operation.metrics import Metrics
from tests.attack.probe import LoopProbe
from tests.attack.server_thread import Parts, ServerThread
from tests.server.fakes import FakeEngine, FakeText
from tests.server.front import Front

T = TypeVar("T")


@dataclass
class Victim:
    """A server in a thread of its own, and ways to call it from the test's loop."""

    server: ServerThread
    front: Front

    def probe(self) -> LoopProbe:
        return self.server.probe()

    async def calmly(
        self, attack: Callable[[int], Awaitable[T]], *, stall: float, hold: float = math.inf, cpu: float = math.inf
    ) -> T:
        """What `attack(attempt)` gives, which keeps below these seconds of a probe in one of three attempts. What holds
        somebody up each time is the attack; what does once may be a neighbour on the same core, who makes every gap as
        long as he likes. Where the server may remember an attack, the next attempt has to be another one."""
        for attempt in range(3):
            async with self.probe() as probe:
                given = await attack(attempt)
            if probe.longest_stall_s < stall and probe.longest_hold_s < hold and probe.server_cpu_s < cpu:
                return given
        raise AssertionError(f"three times, at last {probe}")


Serve = Callable[..., Victim]
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(autouse=True, scope="session")
def _switching() -> Iterator[None]:
    """Threads take turns as often as in the server's own process (engine/build.py)."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest.fixture
def serve(http: aiohttp.ClientSession) -> Iterator[Serve]:
    """`serve(**ServerConfig fields)` is a server with the fake engine of tests/server; `engine` makes another one."""
    started: list[ServerThread] = []

    def start(engine: Callable[[], FakeEngine] = FakeEngine, **config: Any) -> Victim:
        async def build(_: Metrics) -> Parts:
            return engine(), FakeText()

        server = ServerThread(build, ServerConfig(**config))
        started.append(server)
        return _victim(server, http)

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def fake(serve: Serve) -> Victim:
    """The server with its defaults over a fake engine: for whatever ends before the engine."""
    return serve()


@pytest.fixture(scope="session")
def _real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    model = write_model("llama-tiny", tmp_path_factory.mktemp("attacked") / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        device="cpu",
        threads=1,
        num_blocks=256,
        max_num_seqs=32,
        host_cache_gb=0.01,
    )

    async def build(metrics: Metrics) -> Parts:
        from bequest.engine.build import build_engine  # torch is slow to import: only for those who ask

        built = await build_engine(config, metrics)
        return built.engine, built.text

    server = ServerThread(build, ServerConfig())
    yield server
    server.stop()


@pytest.fixture
def real(_real_server: ServerThread, http: aiohttp.ClientSession) -> Victim:
    """The whole server over a tiny random model: one for all tests, so a test leaves nothing behind."""
    return _victim(_real_server, http)


def _victim(server: ServerThread, http: aiohttp.ClientSession) -> Victim:
    return Victim(server, Front(server.engine, server.text, server.port, http, server.metrics, server.context))
