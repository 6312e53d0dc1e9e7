"""Estates over HTTP: out of one server and into another, with the real engine over the paged fake on both sides."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from bequest.cli.estates import main as estate_command
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import InvalidEstate
from bequest.engine.formats.estate_file import from_bytes, to_bytes
from bequest.engine.types.estate import Estate
from bequest.engine.vault.shelf import Shelf
from bequest.server.asks.extension import Conversation
from bequest.server.asks.notes import ConversationNotes
from bequest.server.stores.leases import LeaseTimes
from tests.engine.harness import Setup, running, until
from tests.server.conftest import LEASES, Starter
from tests.server.front import Front

SETUP = Setup(num_blocks=60, num_host_blocks=80, num_lease_blocks=40, notes=ConversationNotes())
KEYS = """
[[keys]]
name = "may"
tenant = "acme"
key = "m"
permissions = ["estates"]

[[keys]]
name = "colleague"
tenant = "acme"
key = "c"

[[keys]]
name = "stranger"
key = "s"
permissions = ["estates"]
"""
OCTETS = "application/octet-stream"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return str(file)


@asynccontextmanager
async def serving(start: Starter, keys: str, setup: Setup = SETUP) -> AsyncIterator[tuple[AsyncEngine, Front]]:
    async with running(setup) as (engine, _):
        yield engine, await start(engine, api_key_file=keys, max_estate_mb=1)


def auth(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **headers}


async def complete(front: Front, key: str = "m", **body: Any) -> Any:
    asked = {"max_tokens": 5, "temperature": 0, **body}
    answer, told = await front.post("/v1/completions", asked, headers=auth(key))
    assert answer.status == 200, told
    return told


async def fetch(front: Front, reference: str, key: str = "m") -> tuple[int, bytes]:
    async with front.http.get(f"{front.url}/v1/continuations/{reference}/estate", headers=auth(key)) as answer:
        return answer.status, await answer.read()


async def put(front: Front, name: str, data: bytes, key: str = "m", query: str = "", kind: str = OCTETS) -> Any:
    url, headers = f"{front.url}/v1/continuations/{name}/estate{query}", auth(key, **{"Content-Type": kind})
    async with front.http.put(url, data=io.BytesIO(data), headers=headers) as answer:
        return answer.status, await answer.json()


async def a_file(front: Front, **body: Any) -> tuple[str, bytes]:
    told = await complete(front, prompt=[3, 1, 4, 1, 5, 9], retain=True, **body)
    status, data = await fetch(front, told["id"])
    assert status == 200
    return told["id"], data


async def drop(front: Front, *references: str) -> None:
    for reference in references:
        await front.http.delete(f"{front.url}/v1/continuations/{reference}", headers=auth("m"))


async def test_a_lease_goes_to_another_server(start: Starter, keys: str) -> None:
    async with serving(start, keys) as (_, here), serving(start, keys) as (_, there):
        record, data = await a_file(here, request_id="mine")
        before = time.time()
        status, entry = await put(there, "moved", data, query="?ttl=600")
        assert status == 200 and (entry["id"], entry["request_id"], entry["grade"]) == (record, "moved", "leased")
        assert before + 599 <= entry["expires_at"] <= time.time() + 601  # it is told in whole seconds
        ask = {"prompt": [7, 8, 9], "return_token_ids": True}
        one = await complete(here, continuation_of="mine", **ask)
        other = await complete(there, continuation_of="moved", **ask)
        assert other["choices"][0]["token_ids"] == one["choices"][0]["token_ids"]
        assert other["continuation"] == {**one["continuation"], "computed_tokens": 4}
        await drop(here, record)
        await drop(there, record)


async def test_under_its_own_id_it_keeps_its_name(start: Starter, keys: str) -> None:
    async with serving(start, keys) as (_, here), serving(start, keys) as (_, there):
        record, data = await a_file(here, request_id="mine")
        status, entry = await put(there, record, data)
        assert status == 200 and entry["request_id"] == "mine"
        status, told = await put(there, "another", data)
        assert status == 409 and told["error"]["code"] == "request_id_in_use"
        await drop(here, record)
        await drop(there, record)


async def test_a_conversation_travels(start: Starter, keys: str) -> None:
    async with serving(start, keys) as (here_engine, here), serving(start, keys) as (there_engine, there):
        body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "retain": True}
        _, told = await here.post("/v1/chat/completions", body, headers=auth("m"))
        _, data = await fetch(here, told["id"])
        await put(there, "chat", data)
        origin = there_engine.parent("acme", "chat").origin
        assert isinstance(origin, Conversation) and origin == here_engine.parent("acme", told["id"]).origin
        await drop(here, told["id"])
        await drop(there, "chat")


async def test_only_a_key_with_the_permission(start: Starter, keys: str) -> None:
    async with serving(start, keys) as (_, front):
        record, data = await a_file(front)
        assert (await fetch(front, record, key="c"))[0] == 403
        status, told = await put(front, "x", data, key="c")
        assert status == 403 and "permissions" in told["error"]["message"]
        assert (await fetch(front, record, key="s"))[0] == 404, "another tenant's is not there"
        status, told = await put(front, "x", data, key="s")
        assert status == 409 and told["error"]["details"] == {"differs": ["tenant"]}
        await drop(front, record)


async def test_nobody_without_a_key_file(start: Starter) -> None:
    async with running(SETUP) as (engine, _):
        front = await start(engine)
        status, told = await fetch(front, "x")
        assert status == 403 and b"Only a key can have the permission 'estates'. In the key file (--api-key" in told


async def test_an_estate_of_another_model(start: Starter, keys: str) -> None:
    async with serving(start, keys) as (_, here), serving(start, keys, replace(SETUP, block_size=8)) as (_, there):
        record, data = await a_file(here)
        status, told = await put(there, "x", data)
        assert (status, told["error"]["code"]) == (409, "estate_mismatch")
        assert told["error"]["details"] == {"differs": ["cache"]} and "--block-size" in told["error"]["message"]
        await drop(here, record)


async def test_broken_files(start: Starter, keys: str) -> None:
    async with serving(start, keys) as (_, front):
        record, data = await a_file(front)
        await drop(front, record)
        for wrong in (b"", data[:-1], data[:100], data[:-1] + bytes([data[-1] ^ 1]), b"hello" * 100):
            status, told = await put(front, "x", wrong)
            assert (status, told["error"]["code"]) == (400, "invalid_estate"), wrong[:20]
        estate = from_bytes(data)
        forged = Estate(replace(estate.deed, origin=b"\xff\x00"), estate.content)
        assert (await put(front, "x", to_bytes(forged)))[0] == 400
        with pytest.raises(InvalidEstate):
            Estate(replace(estate.deed, id='"\r\nSet-Cookie: x'), estate.content)
        status, told = await put(front, "x", data, kind="text/plain")
        assert status == 415
        status, told = await put(front, "x", bytes(2 << 20))
        assert status == 413 and "--max-estate-mb" in told["error"]["message"]
        for query in ("?ttl=never", "?ttl=0", "?ttl=1e9", "?ttl=nan"):
            assert (await put(front, "x", data, query=query))[0] == 400
        assert (await put(front, "cmpl-x", data))[0] == 400


async def test_the_official_client_does_not_try_a_mismatch_again(start: Starter, keys: str) -> None:
    async with serving(start, keys) as (_, front):
        record, data = await a_file(front)
        client = front.client(api_key="s", max_retries=2)
        with pytest.raises(openai.ConflictError) as raised:
            headers = {"Content-Type": OCTETS}
            await client.put("/continuations/x/estate", cast_to=object, options={"headers": headers}, content=data)
        assert raised.value.code == "estate_mismatch"
        assert raised.value.response.headers["x-should-retry"] == "false"
        await drop(front, record)


async def test_what_is_not_there(start: Starter, keys: str) -> None:
    async with serving(start, keys) as (_, front):
        assert (await fetch(front, "nobody"))[0] == 404
        async with front.http.head(f"{front.url}/v1/continuations/nobody/estate", headers=auth("m")) as answer:
            assert answer.status == 404


async def test_inspect(start: Starter, keys: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(start, keys) as (_, front):
        record, data = await a_file(front, request_id="mine")
        await drop(front, record)
    file = tmp_path / "an.estate"
    file.write_bytes(data)
    assert estate_command(["inspect", str(file)]) == 0
    told = capsys.readouterr().out
    assert record in told and "11 tokens" in told and "acme" in told and "checksums are right" in told
    assert estate_command(["inspect", "--json", str(file)]) == 0
    assert '"token_ids": [3, 1, 4, 1, 5, 9' in capsys.readouterr().out
    file.write_bytes(data[:-1])
    assert estate_command(["inspect", str(file)]) == 1
    assert "cut short" in capsys.readouterr().err
    assert estate_command(["inspect", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


# --- leases in files ---------------------------------------------------------------------------------------------

LASTING = replace(SETUP, num_file_blocks=100)


@asynccontextmanager
async def lasting(
    start: Starter, keys: str, path: Path, leases: LeaseTimes = LEASES
) -> AsyncIterator[tuple[AsyncEngine, Front]]:
    async with running(LASTING) as (engine, _):
        await engine.open_files(Shelf(path), 20.0)
        yield engine, await start(engine, leases=leases, api_key_file=keys)
        for record in engine.retention.leases.holders():
            engine.retention.leases.end(record)
    await until(lambda: is_free(path))


async def test_a_lease_comes_back(start: Starter, keys: str, tmp_path: Path) -> None:
    retain = {"ttl": 600, "durable": True}
    async with lasting(start, keys, tmp_path / "e") as (_, front):
        told = await complete(front, prompt=[3, 1, 4, 1, 5], retain=retain, request_id="mine")
        assert told["retained"]["durable"] is True and "durable_reason" not in told["retained"]
        body = {"prompt": [3, 1, 4], "max_tokens": 3, "retain": retain, "stream": True}
        _, events = await front.post("/v1/completions", body, headers=auth("m"))
        assert b'"durable":true' in events
        chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "retain": retain}
        _, talk = await front.post("/v1/chat/completions", chat, headers=auth("m"))
    async with lasting(start, keys, tmp_path / "e") as (engine, front):
        answer, entry = await front.post("/v1/continuations/mine/prefetch", {}, headers=auth("m"))
        assert answer.status == 202 and entry["grade"] == "stored"
        child = await complete(front, continuation_of="mine", prompt=[7, 8])
        assert child["continuation"]["source"] == "file" and child["continuation"]["computed_tokens"] == 3
        assert isinstance(engine.parent("acme", talk["id"]).origin, Conversation)
        await drop(front, "mine", talk["id"])


async def test_a_lost_lease_is_gone_unless_there_is_a_fallback(start: Starter, keys: str, tmp_path: Path) -> None:
    async with lasting(start, keys, tmp_path / "e") as (_, front):
        await complete(front, prompt=[3, 1, 4, 1, 5], retain={"durable": True}, request_id="mine")
    for segment in (tmp_path / "e" / "blocks").iterdir():
        segment.write_bytes(bytes(segment.stat().st_size))
    async with lasting(start, keys, tmp_path / "e") as (_, front):
        body = {"continuation_of": "mine", "prompt": [7], "max_tokens": 2}
        answer, told = await front.post("/v1/completions", body, headers=auth("m"))
        assert answer.status == 410 and told["error"]["code"] == "continuation_parent_lost"
        whole = await complete(front, **body, continuation_fallback=[3, 1, 4, 1, 5, 7])
        assert whole["continuation"]["source"] == "recompute"
        client = front.client(api_key="m", max_retries=2)
        with pytest.raises(openai.APIStatusError) as raised:
            await client.completions.create(model="fake", prompt="", extra_body={"continuation_of": "mine"})
        assert (raised.value.status_code, raised.value.code) == (410, "continuation_parent_lost")


@pytest.mark.parametrize("place", [None, "end", 3, "now"])
async def test_a_fallback_serves_at_any_place_and_choice(start: Starter, keys: str, tmp_path: Path, place: Any) -> None:
    async with lasting(start, keys, tmp_path / "e") as (_, front):
        await complete(front, prompt=[3, 1, 4, 1, 5], n=2, seed=1, retain={"durable": True}, request_id="mine")
    for segment in (tmp_path / "e" / "blocks").iterdir():
        data = bytearray(segment.read_bytes())
        data[-1] ^= 1  # of the second choice
        segment.write_bytes(data)
    async with lasting(start, keys, tmp_path / "e") as (_, front):
        body = {"continuation_of": "mine", "continuation_choice": 1, "prompt": [7], "max_tokens": 2}
        whole = await complete(front, **body, continuation_at=place, continuation_fallback=[3, 1, 4, 1, 5, 7])
        assert whole["continuation"]["source"] == "recompute"
        answer, told = await front.post("/v1/completions", {**body, "continuation_at": place}, headers=auth("m"))
        assert answer.status == 410 and told["error"]["code"] == "continuation_parent_lost"


async def test_an_estate_leaves_out_of_files(start: Starter, keys: str, tmp_path: Path) -> None:
    async with lasting(start, keys, tmp_path / "e") as (_, front):
        await complete(front, prompt=[3, 1, 4, 1, 5], retain={"durable": True}, request_id="mine")
        await complete(front, prompt=[3, 1, 4, 1, 5, 6], retain={"durable": True}, request_id="lost")
    async with lasting(start, keys, tmp_path / "e") as (engine, front), serving(start, keys) as (_, other):
        assert engine.record("acme", "mine").choices[0].blocks == 0, "it is in files alone"
        status, data = await fetch(front, "mine")
        assert status == 200 and from_bytes(data).deed.name == "mine"
        assert (await put(other, "mine", data))[0] == 200
        child = await complete(other, continuation_of="mine", prompt=[7, 8])
        assert child["continuation"]["computed_tokens"] == 3
        await drop(other, "mine")
        for segment in (tmp_path / "e" / "blocks").iterdir():
            segment.unlink()
        status, data = await fetch(front, "lost")
        assert status == 410 and b"continuation_parent_lost" in data


async def test_what_retain_says(start: Starter, keys: str) -> None:
    async with serving(start, keys) as (_, front):
        for durable, code in ((True, "invalid_value"), (1, "invalid_type"), ("yes", "invalid_type")):
            body = {"prompt": [3], "max_tokens": 2, "retain": {"durable": durable}}
            answer, told = await front.post("/v1/completions", body, headers=auth("m"))
            assert (answer.status, told["error"]["code"], told["error"]["param"]) == (400, code, "retain.durable")
        told = await complete(front, prompt=[3], retain={"durable": False})
        assert "durable" not in told["retained"]
        await drop(front, told["id"])


def is_free(path: Path) -> bool:
    try:
        Shelf(path).close()
    except OSError:
        return False
    return True
