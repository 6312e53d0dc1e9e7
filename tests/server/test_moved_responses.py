"""Stored responses of servers beside each other: those of one that ended move to whoever asks."""

from __future__ import annotations

import asyncio
import fcntl
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bequest.engine.errors import ParentElsewhere
from tests.server.conftest import LEASES, Starter
from tests.server.fakes import FakeEngine
from tests.server.front import Front
from tests.server.test_responses import PATH
from tests.server.test_responses_stored import prompt_text, saying


async def begin(start: Starter, folder: Path, *answers: str) -> Front:
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    leases = replace(LEASES, directory=str(folder), has_neighbours=True)
    front: Front = await start(FakeEngine(saying(*answers)), leases=leases, replica_tag=folder.name)
    return front


async def say(front: Front, text: str, **body: Any) -> Any:
    answer, told = await front.post(PATH, {"input": text, **body})
    assert answer.status == 200, told
    return told


async def test_a_conversation_goes_on_elsewhere(start: Starter, tmp_path: Path) -> None:
    """And after a restart of its new server; its first one does not have it any more."""
    one = await begin(start, tmp_path / "r1", "one", "two")
    first = await say(one, "hello")
    second = await say(one, "more", previous_response_id=first["id"])
    await one.stop()
    two = await begin(start, tmp_path / "r2", "three")
    third = await say(two, "still", previous_response_id=second["id"])
    said = prompt_text(two.engine.submitted[-1])
    for text in ("hello", "one", "more", "two", "still"):
        assert text in said
    await two.stop()
    again = await begin(start, tmp_path / "r2", "four")
    for told in (second, third):
        answer, shown = await again.get(f"{PATH}/{told['id']}")
        assert answer.status == 200 and shown["id"] == told["id"]
    await again.stop()
    home = await begin(start, tmp_path / "r1")
    answer, _ = await home.get(f"{PATH}/{first['id']}")
    assert answer.status == 200, "nobody has asked for this one"
    with (tmp_path / "r2" / "lock").open("w") as lock:  # as if its new server ran
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer, _ = await home.get(f"{PATH}/{second['id']}")
        assert (answer.status, answer.headers["X-Bequest-Replica"]) == (421, "r2")


async def test_servers_of_several_machines_share_no_log(start: Starter, tmp_path: Path) -> None:
    """They share no memory, by which SQLite's readers of a log know what of it is written. A file that had one, of a
    server that was alone, has none behind the next start."""
    folder = tmp_path / "r1"
    folder.mkdir()
    alone = await start(FakeEngine(saying("one")), leases=replace(LEASES, directory=str(folder)))
    first = await say(alone, "hello")
    assert (folder / "responses.sqlite-wal").exists()
    await alone.stop()
    one = await begin(start, folder, "two")
    second = await say(one, "more", previous_response_id=first["id"])
    database = folder / "responses.sqlite"
    await one.until(lambda: second["id"].encode() in database.read_bytes())
    assert not (folder / "responses.sqlite-wal").exists()


async def test_a_parent_that_moves_after_its_child(start: Starter, tmp_path: Path) -> None:
    """Its turn came with the child, and both are there after a restart."""
    one = await begin(start, tmp_path / "r1", "one", "two")
    first = await say(one, "hello")
    second = await say(one, "more", previous_response_id=first["id"])
    await one.stop()
    two = await begin(start, tmp_path / "r2")
    for told in (second, first):
        answer, _ = await two.get(f"{PATH}/{told['id']}")
        assert answer.status == 200
    await two.stop()
    again = await begin(start, tmp_path / "r2")
    for told in (second, first):
        answer, shown = await again.get(f"{PATH}/{told['id']}")
        assert answer.status == 200 and shown["id"] == told["id"]


async def test_one_of_a_server_that_runs_is_its_own(start: Starter, tmp_path: Path) -> None:
    one, two = await begin(start, tmp_path / "r1", "one"), await begin(start, tmp_path / "r2", "two")
    first = await say(one, "hello")
    await one.stop()  # what it has is in its file
    with (tmp_path / "r1" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer, told = await two.post(PATH, {"input": "x", "previous_response_id": first["id"]})
        assert (answer.status, answer.headers["X-Bequest-Replica"]) == (421, "r1"), told
        answer, _ = await two.get(f"{PATH}/{first['id']}")
        assert answer.status == 421
    answer, _ = await two.get(f"{PATH}/{first['id']}")
    assert answer.status == 200


async def test_it_is_deleted_where_it_moved_to(start: Starter, tmp_path: Path) -> None:
    one = await begin(start, tmp_path / "r1", "one")
    first = await say(one, "hello")
    await one.stop()
    two = await begin(start, tmp_path / "r2")
    async with two.http.delete(f"{two.url}{PATH}/{first['id']}") as answer:
        assert answer.status == 200
    await two.stop()
    for tag in ("r1", "r2"):
        front = await begin(start, tmp_path / tag)
        answer, _ = await front.get(f"{PATH}/{first['id']}", headers={"X-Bequest-Owner": "gone"})
        assert answer.status == 404
        await front.stop()


async def test_without_neighbours_nobody_looks(start: Starter, tmp_path: Path) -> None:
    one = await begin(start, tmp_path / "r1", "one")
    first = await say(one, "hello")
    await one.stop()
    (tmp_path / "r2").mkdir()
    two: Front = await start(FakeEngine(), leases=replace(LEASES, directory=str(tmp_path / "r2")))
    answer, _ = await two.get(f"{PATH}/{first['id']}")
    assert answer.status == 404


async def test_a_file_that_cannot_be_read_hides_no_other(
    start: Starter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does one of a server that was killed before it had written anything."""
    one = await begin(start, tmp_path / "r2", "one")
    first = await say(one, "hello")
    await one.stop()
    for tag, held in (("r0", b"no database" * 100), ("r1", b"")):
        await asyncio.to_thread((tmp_path / tag).mkdir)
        await asyncio.to_thread((tmp_path / tag / "responses.sqlite").write_bytes, held)
    three = await begin(start, tmp_path / "r3", "two")
    with caplog.at_level(logging.WARNING):
        await say(three, "more", previous_response_id=first["id"])
    assert f"{tmp_path / 'r0'} were not looked at" in caplog.text


class Sought(FakeEngine):
    """What was sought; some of it is a lease of another server that runs."""

    def __init__(self, elsewhere: str | None = None) -> None:
        super().__init__(saying("one", "two"))
        self.elsewhere = elsewhere
        self.sought: list[str] = []

    async def seek(self, tenant: str, reference: str) -> None:
        self.sought.append(reference)
        if self.elsewhere is not None:
            details = {"replica": self.elsewhere}
            raise ParentElsewhere("it runs", reason="parent_elsewhere", details=details, reference=reference)


async def test_a_response_and_its_lease_stay_together(start: Starter, tmp_path: Path) -> None:
    """Where one of them is, the other one goes, whoever asks for which."""
    one = await begin(start, tmp_path / "r1", "one")
    first = await say(one, "hello")
    await one.stop()
    await asyncio.to_thread((tmp_path / "r2").mkdir)
    leases = replace(LEASES, directory=str(tmp_path / "r2"), has_neighbours=True)
    two: Front = await start(Sought("r3"), leases=leases, replica_tag="r2")
    for _ in range(2):
        answer, _ = await two.get(f"{PATH}/{first['id']}")
        assert (answer.status, answer.headers["X-Bequest-Replica"]) == (421, "r3"), "its lease has gone there before"
    two.engine.elsewhere, two.engine.sought = None, []
    answer, _ = await two.get(f"{PATH}/{first['id']}")
    assert answer.status == 200 and two.engine.sought == [first["id"]]


async def test_a_response_whose_lease_has_gone_is_continued(start: Starter, tmp_path: Path) -> None:
    """Its server was away, another one took the lease alone. That one would send every turn back."""
    await asyncio.to_thread((tmp_path / "r1").mkdir)
    leases = replace(LEASES, directory=str(tmp_path / "r1"), has_neighbours=True)
    home: Front = await start(Sought(), leases=leases, replica_tag="r1")
    first = await say(home, "hello")
    home.engine.elsewhere = "r2"
    await say(home, "more", previous_response_id=first["id"])
    assert first["id"] in home.engine.sought and "hello" in prompt_text(home.engine.submitted[-1])
