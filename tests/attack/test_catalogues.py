"""Catalogues: items that are long, and uploads that take long to build."""

from __future__ import annotations

import asyncio
import threading

import orjson
import pytest

from tests.attack.conftest import Victim

_LINES = {"Content-Type": "application/x-ndjson"}


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (b'"' + b"a " * 500_000 + b'"', "characters"),
        (orjson.dumps([7] * 300_000), "tokens"),
        (orjson.dumps({"tokens": [7] * 4097}), "tokens"),
    ],
)
async def test_a_long_item_is_refused_unbuilt(fake: Victim, item: bytes, why: str) -> None:
    """The tree has a level for each token, and one of a million of them took minutes."""
    for body, path, headers in (
        (b"[1]\n" + item + b"\n", "/v1/catalogues?name=long", _LINES),
        (b'{"name": "long", "items": [[1], ' + item + b"]}", "/v1/catalogues", {}),
    ):
        async with fake.probe() as probe:
            answer, content = await fake.front.post(path, body, headers=headers)
        assert answer.status == 400 and content["error"]["param"] == "items[1]", content
        assert why in content["error"]["message"] and probe.server_cpu_s < 1, probe


async def test_the_longest_item_is_taken(fake: Victim) -> None:
    answer, content = await fake.front.post("/v1/catalogues", {"name": "long", "items": [[7] * 4096, [8]]})
    assert answer.status == 200 and content["depth"] == 4096, content


async def test_one_tenants_building_does_not_hold_anothers(fake: Victim) -> None:
    builder, go = fake.server.context.builder, threading.Event()

    def begin() -> asyncio.Task[bool]:
        return asyncio.ensure_future(builder.run("heavy", lambda: go.wait(60)))

    held = await fake.server.on_loop(begin)
    answer, content = await fake.front.post("/v1/catalogues", {"name": "small", "items": [[7], [8]]})
    assert answer.status == 200 and content["items"] == 2, content
    assert not await fake.server.on_loop(held.done)
    go.set()
