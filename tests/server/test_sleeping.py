"""Sleep over HTTP, with the real engine over the paged fake."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Setup, running
from tests.server.conftest import Starter
from tests.server.test_estates import auth

KEYS = """
[[keys]]
name = "boss"
tenant = "acme"
key = "b"
operator = true

[[keys]]
name = "nurse"
tenant = "acme"
key = "n"
permissions = ["admin"]

[[keys]]
name = "guest"
tenant = "acme"
key = "g"
"""
ASKED = {"prompt": [3, 1, 4], "max_tokens": 3}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return str(file)


async def test_without_keys_everybody_is_an_operator(start: Starter) -> None:
    async with running(Setup()) as (engine, _):
        front = await start(engine)
        for path, asleep in (("/sleep", True), ("/wake_up", False)):
            answer, told = await front.post(path, {})
            assert (answer.status, told["is_sleeping"]) == (200, asleep)


async def test_it_sleeps_until_it_is_woken(start: Starter, keys: str) -> None:
    async with running(Setup()) as (engine, runner):
        front = await start(engine, api_key_file=keys)

        async def post(path: str, key: str = "b", **body: Any) -> tuple[int, Any]:
            answer, told = await front.post(path, body, headers=auth(key))
            return answer.status, told

        for path in ("/sleep", "/wake_up"):
            status, told = await post(path, "g")
            assert (status, told["error"]["code"]) == (403, "permission_denied")
            assert "'admin'" in told["error"]["message"]
            assert (await post(path, "n"))[0] == 200
        status, told = await post("/sleep")
        assert (status, told) == (200, {"is_sleeping": True, "bytes_given_back": 1000})
        answer, told = await front.post("/v1/completions", ASKED, headers=auth("g"))
        assert (answer.status, told["error"]["code"]) == (503, "sleeping")
        assert answer.headers["Retry-After"] == "1" and "/wake_up" in told["error"]["message"]
        async with front.http.get(f"{front.url}/is_sleeping", headers=auth("b")) as answer:
            assert await answer.json() == {"is_sleeping": True}
        assert await post("/wake_up") == (200, {"is_sleeping": False})
        assert (await post("/v1/completions", "g", **ASKED))[0] == 200
        assert (await post("/sleep?wake_on_request=true"))[0] == 200 and runner.asleep
        assert (await post("/v1/completions", "g", **ASKED))[0] == 200 and not runner.asleep
        status, told = await post("/sleep?wake_on_request=perhaps")
        assert (status, told["error"]["param"]) == (400, "wake_on_request")
        runner.cannot_wake = True
        await post("/sleep")
        status, told = await post("/wake_up")
        assert (status, told["error"]["code"]) == (503, "sleeping") and "memory" in told["error"]["message"]
        runner.cannot_wake = False
        await post("/wake_up")


async def test_it_does_not_sleep_while_requests_are_open(start: Starter, keys: str) -> None:
    async with running(Setup()) as (engine, runner):
        front = await start(engine, api_key_file=keys)
        runner.gate, runner.hold_from = threading.Event(), 3
        body = {"prompt": [3] * 20, "max_tokens": 100, "stream": True}
        async with front.http.post(f"{front.url}/v1/completions", json=body, headers=auth("g")) as stream:
            await stream.content.readline()
            answer, told = await front.post("/sleep", {}, headers=auth("b"))
            assert (answer.status, told["error"]["code"]) == (409, "engine_busy")
            assert answer.headers["x-should-retry"] == "false"
            runner.gate.set()
            assert b"[DONE]" in await stream.read()
