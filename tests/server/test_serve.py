"""The life of the process: signals, death, and start-ups that fail."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bequest.engine.config import ServerConfig
from bequest.engine.errors import ModelError
from bequest.server.app import AppRunner
from bequest.server.operation.metrics import Metrics
from bequest.server.process import serve as serve_module
from bequest.server.process.serve import serve
from tests.server.conftest import LEASES
from tests.server.fakes import FakeEngine, FakeText

ROOT = Path(__file__).parent.parent.parent


class Process:
    """`serve` in this process, with real signals."""

    def __init__(self, caplog: pytest.LogCaptureFixture, **config: Any) -> None:
        self._caplog = caplog
        self.engine = FakeEngine()
        self.engine.held = True
        caplog.set_level("INFO", "bequest")
        self.ended = asyncio.create_task(serve(ServerConfig(port=0, **config), LEASES, self._load))

    async def _load(self, metrics: Metrics) -> Any:
        return self.engine, FakeText()

    @property
    def stopped(self) -> bool:
        return self.engine.grace is not None

    async def url(self) -> str:
        for _ in range(1000):
            if match := re.search(r"ready on (http://\S+) in \d+\.\d s", self._caplog.text):
                return match[1]
            await asyncio.sleep(0.001)
        raise AssertionError(self._caplog.text)

    async def running(self, count: int) -> None:
        for _ in range(1000):
            if len(self.engine.runs) == count:
                return
            await asyncio.sleep(0.001)
        raise AssertionError("nothing was submitted")


async def complete(url: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json={"prompt": "a"}) as answer,
    ):
        return answer.status, await answer.text()


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def test_sigterm_drains(caplog: pytest.LogCaptureFixture) -> None:
    process = Process(caplog, drain_timeout=10)
    url = await process.url()
    open_request = asyncio.create_task(complete(url))
    await process.running(1)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.02)
    status, body = await get(f"{url}/health")
    assert status == 503 and '"draining"' in body
    status, body = await complete(url)
    assert status == 503 and '"draining"' in body
    assert not process.ended.done()
    process.engine.advance()
    assert (await open_request)[0] == 200
    assert await process.ended == 0 and process.stopped
    assert f"ready on {url} in" in caplog.text and f"fake/model; API {url}/v1, console {url}/" in caplog.text
    assert "SIGTERM: draining 1 requests for up to 10 s; another SIGTERM to stop at once" in caplog.text


async def test_sigterm_at_the_moment_it_is_ready(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads that line may end it. The port has answered for a while then."""
    missed: list[int] = []
    line = serve_module._ready_line

    def announced(*told: Any) -> str:
        signal.raise_signal(signal.SIGTERM)
        return line(*told)

    monkeypatch.setattr(serve_module, "_ready_line", announced)
    before = signal.signal(signal.SIGTERM, lambda number, _: missed.append(number))
    try:
        process = Process(caplog)
        await process.url()
        done, _ = await asyncio.wait({process.ended}, timeout=5)
        assert not missed, "the process would have ended at once"
        assert done and process.ended.result() == 0
    finally:
        process.ended.cancel()
        signal.signal(signal.SIGTERM, before)


async def test_drain_timeout_ends_what_runs_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    process = Process(caplog, drain_timeout=0.02)
    url = await process.url()
    open_request = asyncio.create_task(complete(url))
    await process.running(1)
    os.kill(os.getpid(), signal.SIGINT)
    status, body = await open_request
    assert status == 503 and '"draining"' in body
    assert await process.ended == 0
    assert "Ctrl-C again to stop at once" in caplog.text


PROMPTS = 100  # of one request: an answer of more bytes than sockets hold


class SlowReader:
    """Asks for a long answer and does not read it yet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def asking(cls, url: str) -> SlowReader:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        host, port = url.removeprefix("http://").split(":")
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
        body = json.dumps({"prompt": ["a"] * PROMPTS, "n": 128, "logprobs": 20, "max_tokens": 7}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return cls(reader, writer)

    async def rest(self) -> bytes:
        try:
            return await self._reader.read()
        finally:
            self._writer.close()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that have nothing to say get a tenth of a second at the end, not a whole one."""
    monkeypatch.setattr("bequest.server.process.serve.AppRunner", partial(AppRunner, shutdown_timeout=0.1))


@pytest.mark.usefixtures("brief")
async def test_an_answer_that_is_being_written_gets_the_rest_of_the_drain_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = Process(caplog, drain_timeout=20)
    slow = await SlowReader.asking(await process.url())
    await process.running(PROMPTS)
    process.engine.advance()
    assert not process.engine.runs
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.4)  # more than connections get that have nothing to say
    assert not process.ended.done()
    answer = await slow.rest()
    length = int(re.search(rb"Content-Length: (\d+)", answer)[1])  # type: ignore[index]
    assert len(answer.partition(b"\r\n\r\n")[2]) == length > 4_500_000
    assert await process.ended == 0 and "drained" in caplog.text


@pytest.mark.usefixtures("brief")
async def test_an_answer_that_nobody_reads_does_not_hold_the_end_up(caplog: pytest.LogCaptureFixture) -> None:
    process = Process(caplog, drain_timeout=0.1)
    slow = await SlowReader.asking(await process.url())
    await process.running(PROMPTS)
    process.engine.advance()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(10):
        assert await process.ended == 0
    assert "drain timeout" in caplog.text
    with suppress(ConnectionError):
        await slow.rest()


async def test_a_second_signal_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    process = Process(caplog, drain_timeout=600)
    open_request = asyncio.create_task(complete(await process.url()))
    await process.running(1)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == 128 + signal.SIGTERM
    assert process.engine.grace is not None and process.engine.grace < 1, "a device that hangs is not waited for"
    assert (await open_request)[0] == 503


async def test_a_dead_engine_ends_the_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bequest.server.process.serve._LAST_ANSWERS", 0.05)
    process = Process(caplog)
    url = await process.url()
    open_request = asyncio.create_task(complete(url))
    await process.running(1)
    process.engine.die()
    assert (await open_request)[0] == 503
    status, body = await get(f"{url}/health")
    assert status == 503 and '"engine_dead"' in body
    assert await process.ended == 1 and "device fault" in caplog.text


async def test_start_ups_that_fail(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    async def load(metrics: Metrics) -> Any:
        raise ModelError("model.safetensors: tensor x is missing")

    keys = tmp_path / "keys"
    keys.write_text("limits = {}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for config, message in (
            (ServerConfig(port=0), "tensor x is missing"),
            (ServerConfig(port=port), f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (ServerConfig(port=0, api_key_file=str(keys)), "keys is missing: a list of tables"),
            (ServerConfig(port=0, api_key_file="/nowhere"), "No such file"),
        ):
            caplog.clear()
            assert await serve(config, LEASES, load) == 1
            assert message in caplog.text and "Traceback" not in caplog.text


_LOADS_FOR_EVER = """
import asyncio, sys, types
async def build_engine(config, metrics, **others):
    print("loading", flush=True)
    await asyncio.sleep(60)
sys.modules["bequest.engine.build"] = types.SimpleNamespace(build_engine=build_engine)
from bequest.server.__main__ import main
main(["serve", "--port", "0"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_while_the_model_loads(number: signal.Signals) -> None:
    command = [sys.executable, "-c", _LOADS_FOR_EVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGHUP)
        assert "no --api-key-file" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(20) == -number and process.stderr.read() == ""


_HANGS_AT_ITS_END = """
import asyncio, sys, types
from tests.server.fakes import FakeEngine, FakeText
async def stop(self, seconds):
    print("stopping", flush=True)
    await asyncio.sleep(60)
FakeEngine.stop = stop
async def build_engine(config, metrics, **others):
    return types.SimpleNamespace(engine=FakeEngine(), text=FakeText())
sys.modules["bequest.engine.build"] = types.SimpleNamespace(build_engine=build_engine)
from bequest.server.__main__ import main
main(["serve", "--port", "0"])
"""


def test_a_third_ctrl_c_ends_a_server_whose_device_hangs() -> None:
    command = [sys.executable, "-c", _HANGS_AT_ITS_END]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        while "ready on" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT and "Traceback" not in process.stderr.read()


async def test_while_the_model_loads_live_is_up_and_the_rest_says_loading() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loaded = asyncio.Event()

    async def load(metrics: Metrics) -> Any:
        await loaded.wait()
        return FakeEngine(), FakeText()

    ended = asyncio.create_task(serve(ServerConfig(port=port), LEASES, load))
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:

        async def get(path: str) -> tuple[int, Any, str | None]:
            for _ in range(1000):
                try:
                    async with http.get(path) as answer:
                        return answer.status, await answer.json(), answer.headers.get("Retry-After")
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.001)
            raise AssertionError("nobody listens")

        assert (await get("/live"))[0] == 200
        for path in ("/health", "/v1/models", "/nowhere"):
            status, body, retry_after = await get(path)
            assert status == 503 and body["error"]["code"] == "loading" and retry_after == "1"
        loaded.set()
        for _ in range(1000):
            if (await get("/health"))[0] == 200:
                break
        assert (await get("/v1/models"))[0] == 200
    os.kill(os.getpid(), signal.SIGTERM)
    assert await ended == 0
