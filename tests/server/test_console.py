"""The console: its page, its data, who may read them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from bequest.engine.watching.snapshot import FREE, IN_USE, LEASED, SHARED
from bequest.server.about.console import STATIC_PATHS, _field
from tests.server.conftest import Starter
from tests.server.front import Front

FILES = Path(__file__).parent.parent.parent / "server" / "console"


async def test_the_page_and_its_files(start: Starter) -> None:
    front = await start(api_key=["k"])
    assert len(STATIC_PATHS) == len(list(FILES.iterdir()))
    kinds = {"": "text/html", "js": "text/javascript", "css": "text/css"}
    for path in STATIC_PATHS:
        async with front.http.get(front.url + path) as answer:
            assert answer.status == 200 and answer.content_type == kinds[path.partition(".")[2]]
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
    async with front.http.get(front.url + "/console/index.html", headers={"Authorization": "Bearer k"}) as answer:
        assert answer.status == 404


def test_nothing_comes_from_elsewhere_and_nothing_needs_an_inline_script() -> None:
    for path in FILES.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$|\s// .*$", "", text, flags=re.MULTILINE), path.name
        if path.suffix == ".html":
            assert not re.search(r"<script>|\son\w+=|style=", text)
        if path.suffix == ".js":
            assert "innerHTML" not in text and "eval(" not in text
            for name in re.findall(r'byId\("([\w-]+)"\)', text):
                assert f'id="{name}"' in (FILES / "index.html").read_text(), name


async def test_what_operators_see(start: Starter, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text('keys = [{name = "boss", key = "b", operator = true}, {name = "guest", key = "g"}]')
    front: Front = await start(api_key_file=str(file))
    answer, body = await front.get("/console/state", headers={"Authorization": "Bearer g"})
    assert (
        answer.status == 403 and body["error"]["code"] == "permission_denied" and "'guest'" in body["error"]["message"]
    )
    assert (await front.get("/console/state"))[0].status == 401
    front.engine.held = True
    request = {"prompt": "abc", "request_id": "mine"}
    asking = asyncio.create_task(front.post("/v1/completions", request, headers={"Authorization": "Bearer g"}))
    await front.until(lambda: len(front.engine.runs) == 1)
    answer, state = await front.get("/console/state", headers={"Authorization": "Bearer b"})
    assert answer.status == 200 and state["state"] == "ready" and state["model"] == "fake/model"
    [shown] = state["requests"]
    assert shown["name"] == "mine" and shown["tenant"] == "guest" and shown["prompt_tokens"] == 4
    assert [error["code"] for error in state["errors"]] == ["invalid_api_key", "permission_denied"]
    assert state["blocks"] == {"total": 3, "used": 0, "per_cell": 1, "cells": "000"}
    assert len(state["figures"]["first_token"]["counts"]) == len(state["figures"]["first_token"]["bounds"]) + 1
    front.engine.advance()
    await asking


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 10_000])
def test_a_map_has_a_cell_for_every_block_or_for_several(size: int) -> None:
    kinds = np.arange(size, dtype=np.uint8) % 4
    field = _field(kinds)
    assert field["total"] == size and field["used"] == size - len(range(0, size, 4))
    assert len(field["cells"]) == -(-size // field["per_cell"]) <= 4096
    if field["per_cell"] == 1:
        assert field["cells"] == "".join(map(str, kinds))


def test_the_most_frequent_kind_stands_for_several_blocks() -> None:
    kinds = np.full(9000, FREE, np.uint8)
    kinds[0:3] = [SHARED, SHARED, IN_USE]
    kinds[3:6] = LEASED
    assert _field(kinds)["cells"][:3] == "230"
