"""Stored responses behind a restart: fetched and continued as before, whole or not at all; no disk costs an answer."""

from __future__ import annotations

import sqlite3
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bequest.server.stores import response_file
from bequest.server.stores.response_file import ResponseFile
from bequest.server.stores.responses import ResponseStore
from tests.engine.harness import until
from tests.server.conftest import LEASES, Starter
from tests.server.fakes import FakeEngine, seeing_engine
from tests.server.front import Front
from tests.server.test_estates import auth, lasting
from tests.server.test_responses import PATH, events, streamed
from tests.server.test_responses_store import response
from tests.server.test_responses_stored import prompt_text, saying
from tests.tiny_seeing import data_url, encoded, picture

KEYS = '[[keys]]\nname = "may"\ntenant = "acme"\nkey = "m"\n'


async def begin(start: Starter, folder: Path, *answers: str) -> Front:
    front: Front = await start(FakeEngine(saying(*answers)), leases=replace(LEASES, directory=str(folder)))
    return front


async def say(front: Front, text: Any, **body: Any) -> Any:
    answer, told = await front.post(PATH, {"input": text, **body})
    assert answer.status == 200, told
    return told


async def test_a_conversation_goes_on(start: Starter, tmp_path: Path) -> None:
    front = await begin(start, tmp_path, "one", "two")
    first = await say(front, "a", request_id="mine")
    second = await streamed(front, {"input": "b", "previous_response_id": first["id"]})
    await front.stop()
    front = await begin(start, tmp_path, "by its id", "three")
    assert (await front.get(f"{PATH}/mine"))[1] == first
    last = second[-1]["response"]
    async with front.http.get(f"{front.url}{PATH}/{last['id']}?stream=true") as answer:
        assert events(await answer.read()) == second, "as it was streamed"
    _, items = await front.get(f"{PATH}/{last['id']}/input_items?order=asc")
    texts = [item["content"][0]["text"] for item in items["data"]]
    assert texts == ["a", "one", "b"]
    await say(front, [{"role": "user", "content": "d"}, {"id": first["output"][0]["id"]}])
    assert "one" in prompt_text(front.engine.submitted[-1])
    await say(front, "c", previous_response_id=last["id"])
    prompt = prompt_text(front.engine.submitted[-1])
    assert all(text in prompt for text in ("a", "one", "b", "two", "c"))
    lineage = front.engine.submitted[-1].terms.lineage
    assert lineage is not None and lineage.parent == last["id"] and lineage.at > len("one")


async def test_what_was_deleted_stays_deleted_but_not_its_words_in_others(start: Starter, tmp_path: Path) -> None:
    front = await begin(start, tmp_path, "one", "two", "three")
    first = await say(front, "secret")
    second = await say(front, "b", previous_response_id=first["id"])
    alone = await say(front, "alone")
    for gone in (first, alone):
        async with front.http.delete(f"{front.url}{PATH}/{gone['id']}") as answer:
            assert answer.status == 200
    await front.stop()
    assert b"alone" not in (tmp_path / "responses.sqlite").read_bytes(), "it is overwritten"
    front = await begin(start, tmp_path, "four")
    for gone in (first, alone):
        assert (await front.get(f"{PATH}/{gone['id']}"))[0].status == 404
    await say(front, "c", previous_response_id=second["id"])
    assert "secret" in prompt_text(front.engine.submitted[-1])
    async with front.http.delete(f"{front.url}{PATH}/{second['id']}") as answer:
        assert answer.status == 200
    for kept in list(front.engine.found):
        await front.http.delete(f"{front.url}{PATH}/{kept[1]}")
    await front.stop()
    with sqlite3.connect(tmp_path / "responses.sqlite") as database:
        assert database.execute("SELECT count(*) FROM responses").fetchone() == (0,)


async def test_a_parent_that_goes_while_its_child_runs(start: Starter, tmp_path: Path) -> None:
    """What the child goes on from is in the file with it, and leaves with it."""
    front = await begin(start, tmp_path, "one", "two", "three")
    first = await say(front, "a")
    second = await say(front, "b", previous_response_id=first["id"])
    front.engine.held = True
    third = await say(front, "c", previous_response_id=second["id"], background=True)
    for gone in (second, first):
        async with front.http.delete(f"{front.url}{PATH}/{gone['id']}") as answer:
            assert answer.status == 200
    while front.engine.advance():
        pass
    await front.stop()
    front = await begin(start, tmp_path, "four")
    assert (await front.get(f"{PATH}/{third['id']}"))[1]["status"] == "completed"
    for gone in (first, second):
        assert (await front.get(f"{PATH}/{gone['id']}"))[0].status == 404
    _, items = await front.get(f"{PATH}/{third['id']}/input_items?order=asc")
    assert [item["content"][0]["text"] for item in items["data"]] == ["a", "one", "b", "two", "c"]
    async with front.http.delete(f"{front.url}{PATH}/{third['id']}") as answer:
        assert answer.status == 200
    await front.stop()
    with sqlite3.connect(tmp_path / "responses.sqlite") as database:
        assert database.execute("SELECT count(*) FROM responses").fetchone() == (0,)


async def test_store_false_and_others_tenants(start: Starter, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS + '\n[[keys]]\nname = "other"\nkey = "o"\n')
    leases = replace(LEASES, directory=str(tmp_path))
    front = await start(FakeEngine(saying("one", "two")), leases=leases, api_key_file=str(keys))
    _, kept = await front.post(PATH, {"input": "a"}, headers=auth("m"))
    _, unkept = await front.post(PATH, {"input": "a", "store": False}, headers=auth("m"))
    await front.stop()
    front = await start(FakeEngine(), leases=leases, api_key_file=str(keys))
    seen = [(kept["id"], "m", 200), (kept["id"], "o", 404), (unkept["id"], "m", 404)]
    for reference, key, status in seen:
        async with front.http.get(f"{front.url}{PATH}/{reference}", headers=auth(key)) as answer:
            assert answer.status == status
    assert (tmp_path / "responses.sqlite").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["noise", "cut"])
async def test_a_broken_file_is_set_aside(start: Starter, tmp_path: Path, damage: str) -> None:
    front = await begin(start, tmp_path, "one")
    await say(front, "a")
    await front.stop()
    file = tmp_path / "responses.sqlite"
    data = file.read_bytes()
    file.write_bytes(bytes(len(data)) if damage == "noise" else data[: len(data) // 2 + 100])
    front = await begin(start, tmp_path, "two")
    told = await say(front, "b")
    await front.stop()
    assert (tmp_path / "responses.sqlite.broken").exists()
    front = await begin(start, tmp_path)
    assert (await front.get(f"{PATH}/{told['id']}"))[0].status == 200


@pytest.mark.parametrize("obstacle", ["folder", "vanished"])
async def test_a_disk_that_fails_costs_no_answer(start: Starter, tmp_path: Path, obstacle: str) -> None:
    folder = tmp_path / "there"
    if obstacle == "folder":
        (folder / "responses.sqlite").mkdir(parents=True)
    front = await begin(start, folder, "one", "two")
    first = await say(front, "a")
    await say(front, "b", previous_response_id=first["id"])


async def test_another_model_goes_on_from_the_words(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path / "r", "one model")
    await file.load()
    file.put(replace(response(4), prompt_text="hello", num_prompt=2))
    await file.close()
    file = ResponseFile(tmp_path / "r", "another")
    [found] = await file.load()
    assert found.token_ids == array("i") and (found.num_prompt, found.prompt_text) == (0, "")
    assert found.turn.all_items()[0]["id"] == "in4"
    await file.close()


async def test_the_adapter_of_a_response_is_brought_back(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path / "r", "m")
    await file.load()
    file.put(replace(response(4), adapter="legal"))
    await file.close()
    [found] = await ResponseFile(tmp_path / "r", "m").load()
    assert found.adapter == "legal"


async def test_the_failure_of_a_response_is_brought_back(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path / "r", "m")
    await file.load()
    file.put(replace(response(4), failure=b"why"))
    await file.close()
    [found] = await ResponseFile(tmp_path / "r", "m").load()
    assert found.failure == b"why"


async def test_a_disk_that_is_too_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit into the queue is in memory alone; a child that fits brings its words. A conversation that is
    not whole is not brought back."""
    file = ResponseFile(tmp_path / "r", "m")
    await file.load()
    parent = response(1)
    monkeypatch.setattr(response_file, "_MOST_WAITING", 0)
    file.put(parent)
    monkeypatch.undo()
    file.put(response(2, parent))
    file.put(response(3))
    await until(lambda: file._num_waiting == 0)
    await file.close()
    file = ResponseFile(tmp_path / "r", "m")
    found = await file.load()
    assert [one.id for one in found] == ["resp_2", "resp_3"]
    assert found[0].turn.all_items() == response(2, parent).turn.all_items()
    await file.close()
    with sqlite3.connect(tmp_path / "r") as database:
        database.execute("DELETE FROM responses WHERE id = 'resp_1'")
    file = ResponseFile(tmp_path / "r", "m")
    assert [one.id for one in await file.load()] == ["resp_3"]
    await file.close()


async def test_fewer_fit_than_were_kept(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path / "r", "m")
    await file.load()
    for number in range(5):
        file.put(response(number))
    await file.close()
    file = ResponseFile(tmp_path / "r", "m")
    store = ResponseStore(2, 2**30, file)
    store.restore(await file.load())
    assert len(store) == 2 and store.get("t", "resp_4") is not None
    await file.close()
    file = ResponseFile(tmp_path / "r", "m")
    assert [found.id for found in await file.load()] == ["resp_3", "resp_4"]
    await file.close()


@pytest.mark.parametrize("lost", [False, True])
async def test_the_next_turn_reads_the_lease_of_the_last_one(start: Starter, tmp_path: Path, lost: bool) -> None:
    """Where its files are broken, the conversation is computed again: its words are here."""
    keys, folder = tmp_path / "keys.toml", tmp_path / "e"
    keys.write_text(KEYS)
    leases = replace(LEASES, directory=str(folder))
    async with lasting(start, str(keys), folder, leases) as (_, front):
        body = {"input": "abc", "max_output_tokens": 4, "retain": {"ttl": 600, "durable": True}}
        answer, first = await front.post(PATH, body, headers=auth("m"))
        assert answer.status == 200 and first["retained"]["durable"] is True
        await front.stop()
    for segment in (folder / "blocks").iterdir() if lost else ():
        segment.unlink()
    async with lasting(start, str(keys), folder, leases) as (_, front):
        body = {"input": "d", "previous_response_id": first["id"], "max_output_tokens": 2}
        answer, told = await front.post(PATH, body, headers=auth("m"))
        assert answer.status == 200, told
        if lost:
            assert told["continuation"]["source"] == "recompute"
        else:
            assert told["continuation"]["source"] == "file"
            assert told["continuation"]["inherited_tokens"] > 3


async def test_ids_of_images_are_not_kept(start: Starter, tmp_path: Path) -> None:
    """They mean something in one process alone: the conversation is told again, with its image."""

    async def seeing() -> Front:
        front: Front = await start(seeing_engine(), leases=replace(LEASES, directory=str(tmp_path)))
        return front

    front = await seeing()
    image = {"type": "input_image", "image_url": data_url(encoded(picture(9, 7)))}
    first = await say(front, [{"role": "user", "content": [image, {"type": "input_text", "text": "a"}]}])  # type: ignore[arg-type]
    await front.stop()
    front = await seeing()
    await say(front, "b", previous_response_id=first["id"])
    asked = front.engine.submitted[-1]
    assert len(asked.images) == 1 and asked.images[0].first_id in asked.prompt_token_ids
    assert asked.terms.lineage is None or asked.terms.lineage.at == 0
