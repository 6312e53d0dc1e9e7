"""`bequest bench serve` against a server that can misbehave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bequest.bench import plot
from bequest.bench.client import Streamed
from bequest.bench.command import main
from bequest.bench.load import Level, LevelResult
from bequest.bench.load_report import summarise_load


class Server:
    """Streams as many words as are asked for."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults
        self.bodies: list[dict[str, Any]] = []
        self.starts: list[float] = []
        self.running = self.most = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 1000}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"id": "x", "choices": [], "usage": {"prompt_tokens": 400}})
        if "ignore_eos" in body and self.faults.get("strict"):
            return web.json_response({"error": {"message": "unknown field", "code": "unknown"}}, status=400)
        self.bodies.append(body)
        self.starts.append(time.perf_counter())
        if self.faults.get("fails") and len(self.bodies) % 2 == 0:
            return web.json_response({"error": {"message": "try later", "code": "queue_full"}}, status=429)
        self.running += 1
        self.most = max(self.most, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0.002)
            await response.write(b'data: {"choices": [{"delta": {"content": "a "}}]}\n\n')
        usage = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": body["max_tokens"]}}
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        self.running -= 1
        return response


Serve = Callable[..., Awaitable[tuple[Server, list[str]]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers = []

    async def start(**faults: Any) -> tuple[Server, list[str]]:
        fake = Server(**faults)
        server = TestServer(fake.app())
        await server.start_server()
        servers.append(server)
        flags = ["--requests", "4", "--prompt-tokens", "20", "--tokens", "5"]
        return fake, ["serve", "--base-url", str(server.make_url("/v1")), *flags]

    yield start
    for server in servers:
        await server.close()


async def run_main(arguments: list[str]) -> int:
    return await asyncio.to_thread(main, arguments)


async def test_levels_of_concurrency(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake, arguments = await serve()
    assert await run_main([*arguments, "--concurrency", "1,3", "--json", str(tmp_path / "load.json")]) == 0
    shown = capsys.readouterr()
    assert "1 at once" in shown.out and "3 at once" in shown.out and "output tokens/s" in shown.out
    assert fake.most == 3 and len(fake.bodies) == 1 + 4 + 4, "one to warm up"
    prompts = [body["messages"][0]["content"] for body in fake.bodies[1:5]]
    assert len(set(prompts)) == 4 and all(len(prompt.split()) == 10 for prompt in prompts), "400 tokens of 200 words"
    written = json.loads((tmp_path / "load.json").read_text())
    first, second = written["rows"]
    assert first["requests"] == second["requests"] == 4 and first["failed"] == 0
    assert set(first["first_ms"]) == {"p50", "p90", "p99"} and first["between_ms"]["p50"] >= 1
    assert "api_key" not in written["settings"]


async def test_rates(serve: Serve) -> None:
    fake, arguments = await serve()
    assert await run_main([*arguments, "--rate", "50", "--endpoint", "completions"]) == 0
    assert all("prompt" in body for body in fake.bodies)
    gaps = [b - a for a, b in zip(fake.starts[1:], fake.starts[2:], strict=False)]
    assert max(gaps) > 0.001, "they do not come at once"


async def test_failures_are_counted_and_told(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    _, arguments = await serve(fails=True)
    assert await run_main([*arguments, "--concurrency", "2"]) == 1
    assert "2 at once: 2 failed: 429 queue_full: try later" in capsys.readouterr().err


async def test_a_server_without_ignore_eos(serve: Serve) -> None:
    fake, arguments = await serve(strict=True)
    assert await run_main([*arguments, "--concurrency", "1"]) == 0
    assert not any("ignore_eos" in body for body in fake.bodies)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt-tokens", "999"], "a job needs 1004 tokens of context"),
        (["--model", "other"], "has no model 'other'"),
        (["--json", "/nowhere/x.json"], "the folder does not exist"),
        (["--json", "/"], "--json /: it is a folder; name a file"),
    ],
)
async def test_runs_that_cannot_start(
    serve: Serve, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, arguments = await serve()
    assert await run_main([*arguments, *flags]) == 2
    assert said in capsys.readouterr().err


async def test_a_file_that_may_not_be_written_is_found_before_the_run(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("bequest.bench.command.os.access", lambda path, mode: path != tmp_path)
    fake, arguments = await serve()
    assert await run_main([*arguments, "--json", str(tmp_path / "x.json")]) == 2
    assert "x.json: it may not be written" in capsys.readouterr().err and not fake.bodies


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert main(["serve", "--plot", "x.png"]) == 2
    assert "pip install 'bequest[bench]'" in capsys.readouterr().err


def test_figures_of_a_level() -> None:
    answers = tuple(Streamed(0.1 * n, 1.0, (0.01, 0.03), 10, 5) for n in (1, 2, 3))
    row = summarise_load(LevelResult(Level(3), 2.0, answers, ("no",)))
    assert row.requests == 4 and row.failed == 1 and row.requests_per_second == 1.5
    assert row.output_tokens_per_second == 7.5 and row.prompt_tokens_per_second == 15
    assert row.first_ms[50] == pytest.approx(200) and row.between_ms[50] == pytest.approx(20)
    empty = summarise_load(LevelResult(Level(1), 2.0, (), ("no",)))
    assert empty.first_ms == {} and empty.requests_per_second == 0
