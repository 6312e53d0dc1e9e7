"""A door is added by adding a folder: its routes are served and guarded, described, and fail in its own form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
DOOR = """
    from typing import Any, ClassVar
    import msgspec
    from bequest.server.asks.call import begin
    from bequest.server.door import Door, DoorRoute, Operation
    from bequest.server.transport.replies import json_response
    from bequest.server.wire.errors import ApiError
    from bequest.server.wire.fields import Rules

    class KnockBody(msgspec.Struct, frozen=True, kw_only=True):
        rules: ClassVar[Rules] = Rules(elsewhere={"bell": ((), "this door has none")})
        model: str | None = None
        times: int = 1

    class Knocked(msgspec.Struct):
        heard: int

    async def knock(http):
        call = await begin(http, KnockBody, "knock-")
        return json_response({"heard": call.body.times}, call.headers)

    DOOR = Door(
        routes=(DoorRoute("POST", "/knock", knock, Operation("Knocks.", Knocked, KnockBody)),),
        paths=("/knock",),
        error_form=lambda error: b"no: " + error.message.encode(),
    )
"""
SESSION = """
    import asyncio
    import sys
    import bequest.server.doors as doors
    doors.__path__.append(sys.argv[1])
    from aiohttp.test_utils import TestClient, TestServer
    from bequest.engine.config import ServerConfig
    from bequest.server.access.keys import KeyRing
    from bequest.server.app import make_app
    from bequest.server.operation.metrics import Metrics
    from tests.server.conftest import LEASES
    from tests.server.fakes import FakeEngine, FakeText

    async def main():
        app = make_app(FakeEngine(), FakeText(), ServerConfig(api_key=["k"]), LEASES, KeyRing(["k"], None), Metrics())
        async with TestClient(TestServer(app), headers={"Authorization": "Bearer k"}) as client:
            for body in ({"times": 2}, {"bell": 1}, {"model": "x"}):
                answer = await client.post("/knock", json=body)
                print(answer.status, await answer.text())
            answer = await client.post("/knock", json={}, headers={"Authorization": "Bearer x"})
            print(answer.status, await answer.text())
            answer = await client.get("/knock/twice")
            print(answer.status, await answer.text())
            document = await (await client.get("/openapi.json")).json()
            fields = document["components"]["schemas"]["KnockBody"]["properties"]
            print(document["paths"]["/knock"]["post"]["summary"], *fields)

    asyncio.run(main())
"""


def test_a_folder_is_a_door(tmp_path: Path) -> None:
    (tmp_path / "knock").mkdir()
    (tmp_path / "knock" / "__init__.py").touch()
    (tmp_path / "knock" / "door.py").write_text(dedent(DOOR))
    done = subprocess.run(
        [sys.executable, "-c", dedent(SESSION), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        '200 {"heard":2}',
        "400 no: `bell` cannot be used here: this door has none. Leave it out.",
        "404 no: The model 'x' does not exist here; this server serves 'fake/model'.",
        "401 no: The API key is not one of this server's keys; check the Authorization header.",
        "404 no: There is nothing at GET /knock/twice.",
        "Knocks. model times",
    ]
