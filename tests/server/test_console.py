"""The console: its page, its data, who may read them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bequest.engine.types.recurrent import StateLoad
from bequest.engine.watching.block_map import (
    FREE,
    IN_USE,
    LEASED,
    NO_GROUP,
    NOBODY,
    SHARED,
    WARM,
    BlockField,
    BlockMap,
)
from bequest.engine.watching.snapshot import OpenRequest, Snapshot
from bequest.server.about.console import STATIC_PATHS
from bequest.server.about.console_state import field_of
from tests.server.conftest import Starter
from tests.server.fakes import FakeEngine
from tests.server.front import Front

FILES = Path(__file__).parent.parent.parent / "server" / "console"
LONGEST_FILE = 500


def files() -> list[Path]:
    return [path for path in FILES.rglob("*") if path.is_file()]


async def test_the_page_and_its_files(start: Starter) -> None:
    front = await start(api_key=["k"])
    assert len(STATIC_PATHS) == len(files())
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
    page = (FILES / "index.html").read_text()
    made = "".join(path.read_text() for path in files() if path.suffix == ".js")
    for path in files():
        text = path.read_text()
        assert len(text.splitlines()) < LONGEST_FILE, path.name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)\w", text), path.name
        if path.suffix == ".html":
            assert not re.search(r"<script>|\son\w+=|style=", text)
        if path.suffix == ".css":
            assert "url(" not in text and "@import" not in text
        if path.suffix == ".js":
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
            for name in re.findall(r'byId\("([\w-]+)"\)', text):
                assert f'id="{name}"' in page or f'id: "{name}"' in made, name


async def test_what_operators_see(start: Starter, tmp_path: Path) -> None:
    front: Front = await start(api_key_file=key_file(tmp_path))
    assert (await front.get("/console/state"))[0].status == 401
    front.engine.held = True
    request = {"prompt": "abc", "request_id": "mine"}
    asking = asyncio.create_task(front.post("/v1/completions", request, headers=bearer("g")))
    await front.until(lambda: len(front.engine.runs) == 1)
    answer, state = await front.get("/console/state", headers=bearer("b"))
    assert answer.status == 200 and state["state"] == "ready" and state["scope"] == "all"
    assert state["models"] == ["fake/model"] and state["takes"] == ["text"] and state["max_model_len"] == 512
    [shown] = state["requests"]
    assert shown["name"] == "mine" and shown["tenant"] == "guest" and shown["prompt_tokens"] == 4
    assert [error["code"] for error in state["errors"]] == ["invalid_api_key"]
    counts = {"free": 3, "warm": 0, "running": 0, "shared": 0, "leased": 0, "stored": 0}
    cells = {"per_cell": 1, "cells": "000", "owners": "...", "groups": "..."}
    assert state["blocks"] == {"total": 3, "counts": counts, **cells}
    assert len(state["figures"]["first_token"]["counts"]) == len(state["figures"]["first_token"]["bounds"]) + 1
    assert state["figures"]["draft_tokens"] == 0 and state["states"] is None
    front.engine.advance()
    await asking


class TwoTenants(FakeEngine):
    """Blocks and requests of two tenants, of layers that see all tokens, of a window, and recurrent ones."""

    def snapshot(self) -> Snapshot:
        kinds = np.array([LEASED, IN_USE, WARM, SHARED, WARM, FREE], np.uint8)
        owners = np.array([0, 1, 1, 1, NOBODY, NOBODY], np.int16)
        requests = tuple(
            OpenRequest(f"r-{tenant}", None, tenant, "running", 1.0, 3, 3, 0, 9, 1, 1) for tenant in ("boss", "guest")
        )
        groups = np.array([1, 0, 0, 1, NO_GROUP, NO_GROUP], np.int8)
        device, host = BlockField(kinds, owners, groups), BlockField(kinds[:2], owners[:2], groups[:2])
        blocks = BlockMap(("boss", "guest"), (0, 8), device, host)
        return Snapshot(16, blocks, requests, StateLoad(9, 5, 1), 2, block_bytes=1000, state_bytes=70_000)


async def test_a_tenant_sees_its_own_alone(start: Starter, tmp_path: Path) -> None:
    front: Front = await start(engine=TwoTenants(), api_key_file=key_file(tmp_path))
    _, whole = await front.get("/console/state", headers=bearer("b"))
    assert whole["blocks"]["cells"] == "421310" and whole["blocks"]["owners"] == "0111.."
    assert whole["tenants"] == ["boss", "guest"] and len(whole["requests"]) == 2
    full, window, states = whole["groups"]
    assert whole["blocks"]["groups"] == "1001.." and whole["host_blocks"]["groups"] == "10"
    assert full["kind"] == "full" and full["bytes_each"] == 1000 and full["tenants"] == [0, 3]
    assert full["device"] == {"warm": 1, "running": 1, "shared": 0, "leased": 0, "stored": 0}
    assert window["kind"] == "window" and window["window"] == 8 and window["tenants"] == [2, 1]
    assert window["device"] == {"warm": 0, "running": 0, "shared": 1, "leased": 1, "stored": 0}
    assert window["host"] == {"warm": 0, "running": 0, "shared": 0, "leased": 1, "stored": 0}
    held = {"running": 3, "leased": 2, "warm": 1}
    assert states == {"kind": "state", "bytes_each": 70_000, "device": held}
    answer, own = await front.get("/console/state", headers=bearer("g"))
    assert [group["tenants"] for group in own["groups"]] == [[3], [1]]
    assert own["groups"][1]["device"]["leased"] == 0 and own["blocks"]["groups"] == ".001.."
    assert answer.status == 200 and own["scope"] == "own"
    assert own["blocks"]["cells"] == "021300" and own["blocks"]["owners"] == ".000.."
    assert own["host_blocks"]["cells"] == "02" and own["tenants"] == ["guest"]
    assert [request["id"] for request in own["requests"]] == ["r-guest"] and own["running"] == 1
    assert not {"figures", "errors", "retained", "states"} & own.keys()
    assert "boss" not in str(own)


def key_file(folder: Path) -> str:
    path = folder / "keys"
    path.write_text('keys = [{name = "boss", key = "b", operator = true}, {name = "guest", key = "g"}]')
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def field(kinds: Any, owners: Any = None) -> dict[str, Any]:
    owners = np.full(len(kinds), NOBODY, np.int16) if owners is None else owners
    return field_of(BlockField(kinds, owners, np.zeros(len(kinds), np.int8)))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 10_000])
def test_a_map_has_a_cell_for_every_block_or_for_several(size: int) -> None:
    kinds = (np.arange(size) % 6).astype(np.uint8)
    shown = field(kinds)
    assert shown["total"] == size == sum(shown["counts"].values())
    assert shown["counts"]["free"] == len(range(0, size, 6))
    assert len(shown["cells"]) == len(shown["owners"]) == -(-size // shown["per_cell"]) <= 4096
    if shown["per_cell"] == 1:
        assert shown["cells"] == "".join(map(str, kinds))


def test_the_most_frequent_kind_stands_for_several_blocks() -> None:
    kinds = np.full(9000, FREE, np.uint8)
    kinds[0:3] = [SHARED, SHARED, IN_USE]
    kinds[3:6] = LEASED
    owners = np.full(9000, NOBODY, np.int16)
    owners[0:3] = [1, 0, 1]
    shown = field(kinds, owners)
    assert shown["cells"][:3] == "340" and shown["owners"][:3] == "1.."


def test_tenants_behind_the_last_digit_are_nobody() -> None:
    owners = np.array([0, 61, 62, NOBODY], np.int16)
    assert field(np.full(4, IN_USE, np.uint8), owners)["owners"] == "0Z.."
