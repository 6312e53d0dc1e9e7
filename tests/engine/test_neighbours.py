"""Leases of servers beside each other: those of one that ended move to whoever asks, those of one that runs do not."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import ParentElsewhere, ParentLost, ParentNotFound
from bequest.engine.vault.neighbours import NeighbourShelf
from bequest.engine.vault.shelf import Shelf
from tests.engine.harness import ask, running, until
from tests.engine.test_estates import child_of
from tests.engine.test_vault import LASTING, SETUP, _is_free, a_lease, check_child, files


@asynccontextmanager
async def server(path: Path) -> AsyncIterator[AsyncEngine]:
    """An engine whose directory stands beside others; its end leaves its leases there."""
    async with running(SETUP) as (engine, _):
        await engine.open_files(NeighbourShelf(path), 20.0)
        try:
            yield engine
            assert await engine.drain(20)
        finally:
            for record in engine.retention.leases.holders():
                engine.retention.leases.end(record)
    await until(lambda: _is_free(path))


async def left(path: Path, **fields: object) -> str:
    """The id of a lease that a server left when it ended."""
    async with server(path) as engine:
        parent, answer = await a_lease(engine, **fields)
        assert answer.retained is not None and answer.retained.durable
    return parent.id


@pytest.mark.parametrize("reference", ["its id", "mine"])
async def test_a_lease_moves_to_whoever_asks(tmp_path: Path, reference: str) -> None:
    """By its id and by its name. A second start of its first server does not have it any more."""
    parent = await left(tmp_path / "r1", name="mine")
    async with server(tmp_path / "r2") as engine:
        with pytest.raises(ParentNotFound):
            engine.parent("t", parent)
        await engine.seek("t", parent if reference == "its id" else reference)
        assert engine.record("t", parent).grade == "stored" and engine.record("t", "mine").id == parent
        await check_child(engine, parent, "file")
    assert not files(tmp_path / "r1") and len(files(tmp_path / "r2")) == 1
    async with server(tmp_path / "r1") as engine, server(tmp_path / "r2") as other:
        assert not engine.records("t") and not files(tmp_path / "r1", "blocks")
        await check_child(other, "mine", "file")


async def test_a_lease_of_one_that_runs_is_its_own(tmp_path: Path) -> None:
    async with server(tmp_path / "r1") as owner, server(tmp_path / "r2") as engine:
        parent, _ = await a_lease(owner)
        with pytest.raises(ParentElsewhere) as refused:
            await engine.seek("t", parent.id)
        assert refused.value.details == {"replica": "r1"} and refused.value.code == "wrong_replica"
        await check_child(owner, parent.id, "blocks")
        assert not engine.records("t")


async def test_what_nobody_has_is_not_found(tmp_path: Path) -> None:
    """And neither is another tenant's."""
    parent = await left(tmp_path / "r1")
    async with server(tmp_path / "r2") as engine:
        for tenant, reference in (("t", "unknown"), ("other", parent)):
            await engine.seek(tenant, reference)
            with pytest.raises(ParentNotFound):
                engine.parent(tenant, reference)
    assert len(files(tmp_path / "r1")) == 1


async def test_a_folder_that_cannot_be_used_hides_no_other(tmp_path: Path) -> None:
    """It may be anybody's: the top of a file system has such folders."""
    parent = await left(tmp_path / "r1")
    shutil.copytree(tmp_path / "r1" / "leases", tmp_path / "r0" / "leases")
    (tmp_path / "r0" / "taking").mkdir()
    async with server(tmp_path / "r2") as engine:
        await engine.seek("t", parent)
        await check_child(engine, parent, "file")


async def test_several_ask_at_once(tmp_path: Path) -> None:
    """Requests of one server, and of two: one of these gets it, and the other one says so."""
    parent = await left(tmp_path / "r1")
    async with server(tmp_path / "r2") as one, server(tmp_path / "r3") as two:
        asked = [engine.seek("t", parent) for engine in (one, two) for _ in range(4)]
        await asyncio.gather(*asked, return_exceptions=True)
        holders = [engine for engine in (one, two) if engine.records("t")]
        assert len(holders) == 1
        await check_child(holders[0], parent, "file")
        [other] = [engine for engine in (one, two) if engine is not holders[0]]
        with pytest.raises(ParentElsewhere):
            await other.seek("t", parent)


async def test_a_child_that_shares_its_parents_blocks_moves_alone(tmp_path: Path) -> None:
    """Bytes that both have stay with both."""
    async with server(tmp_path / "r1") as engine:
        parent, _ = await a_lease(engine)
        child = child_of(engine, parent.id, [5] * 8, retain=LASTING)
        await ask(engine, child)
    async with server(tmp_path / "r2") as engine:
        await engine.seek("t", child.id)
        await check_child(engine, child.id, "file")
    async with server(tmp_path / "r1") as owner, server(tmp_path / "r2") as engine:
        await check_child(owner, parent.id, "file")
        owner.forget("t", parent.id)
        await until(lambda: not files(tmp_path / "r1", "blocks"))
        await check_child(engine, child.id, "file")
        engine.forget("t", child.id)
        await until(lambda: not files(tmp_path / "r2", "blocks") and not files(tmp_path / "r2"))


async def test_a_name_that_is_taken_here_stays(tmp_path: Path) -> None:
    """What comes is found by its id, and goes as a whole."""
    parent = await left(tmp_path / "r1", name="mine")
    async with server(tmp_path / "r2") as engine:
        own, _ = await a_lease(engine, 20, name="mine")
        await engine.seek("t", parent)
        assert engine.record("t", "mine").id == own.id and engine.record("t", parent).name is None
        engine.forget("t", parent)
        await until(lambda: len(files(tmp_path / "r2")) == 1)


async def test_broken_leases_are_lost(tmp_path: Path) -> None:
    for number, folder in enumerate(("leases", "blocks")):
        place = tmp_path / folder
        parent = await left(place / "r1")
        [file] = files(place / "r1", folder)
        file.write_bytes(file.read_bytes()[:-1])
        async with server(place / "r2") as engine:
            with pytest.raises(ParentLost):
                await engine.seek("t", parent)
                await ask(engine, child_of(engine, parent, [number]))


async def test_a_server_waits_for_a_neighbour(tmp_path: Path) -> None:
    """A lease that is taken out holds up the start of its server for that long, and no longer."""
    other = Shelf(tmp_path / "r1")
    opening = asyncio.get_running_loop().run_in_executor(None, NeighbourShelf, tmp_path / "r1")
    await asyncio.sleep(0.2)
    assert not opening.done()
    began = time.monotonic()
    other.close()
    (await opening).close()
    assert time.monotonic() - began < 5


def test_it_needs_a_directory() -> None:
    with pytest.raises(ValueError, match="estate_peers needs estate_dir"):
        EngineConfig(estate_peers=True)
