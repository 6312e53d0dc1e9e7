"""Leases in a store of objects: as in files, and shared by servers that do not know of each other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import ParentLost, ParentNotFound
from bequest.engine.vault import objects
from tests.engine import shelf_trials as trials
from tests.engine.harness import ask, until
from tests.engine.shelf_trials import engine_on
from tests.engine.shelves import Files, MemoryStore, Objects, Shelves
from tests.engine.test_estates import child_of
from tests.engine.test_vault import LASTING, a_lease, check_child


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def shared(store: MemoryStore) -> Objects:
    return Objects(store)


@pytest.fixture(params=["files", "objects"])
def shelves(request: pytest.FixtureRequest, tmp_path: Path, shared: Objects) -> Shelves:
    return Files(tmp_path) if request.param == "files" else shared


# --- as in files -------------------------------------------------------------------------------------------------


async def test_a_lease_outlives_its_process(shelves: Shelves) -> None:
    await trials.outlives_its_process(shelves)


async def test_shared_blocks_are_stored_once(shelves: Shelves) -> None:
    await trials.stores_shared_blocks_once(shelves)


async def test_a_crowd(shelves: Shelves) -> None:
    await trials.serves_a_crowd(shelves)


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
async def test_broken_blocks(shelves: Shelves, how: str) -> None:
    await trials.refuses_what_is_broken(shelves, how)


async def test_broken_manifests(shelves: Shelves) -> None:
    await trials.refuses_broken_manifests(shelves, 20)


async def test_another_model(shelves: Shelves) -> None:
    await trials.leaves_others_alone(shelves)


async def test_blocks_in_many_objects(shared: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_per_object", lambda block_bytes: 3)
    await trials.serves_a_crowd(shared)


# --- shared ------------------------------------------------------------------------------------------------------


async def test_a_lease_of_a_server_beside_this_one(shared: Objects) -> None:
    async with engine_on(shared) as one, engine_on(shared) as two:
        parent, _ = await a_lease(one, 30, name="mine")
        for reference in (parent.id, "mine"):
            with pytest.raises(ParentNotFound):
                two.parent("t", reference)
        await two.seek("t", "mine")
        await two.seek("t", "nothing")
        await two.seek("u", "mine")
        await check_child(two, "mine", "file")
        await check_child(two, parent.id, "blocks")
        with pytest.raises(ParentNotFound):
            two.parent("u", "mine")
        assert two.retention.books.used == one.retention.books.used


async def test_a_name_that_two_servers_gave(shared: Objects) -> None:
    """Who has it keeps it; the other one is found by its id."""
    async with engine_on(shared) as one, engine_on(shared) as two:
        first, _ = await a_lease(one, 30, name="mine")
        second, _ = await a_lease(two, 20, name="mine")
        await two.seek("t", first.id)
        assert two.parent("t", "mine").id == second.id
        await check_child(two, first.id, "file")


async def test_an_end_that_another_server_has_moved(shared: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_on(shared) as one, engine_on(shared) as two:
        parent, _ = await a_lease(one)
        await two.seek("t", parent.id)
        two.set_ttl("t", parent.id, 5000)
        await until(lambda: _expiry(shared) > 4000)
        stored = one.retention.find("t", parent.id).stored
        assert stored is not None
        shelf = objects.ObjectShelf(shared.store, shared.name, lambda: time.time() + 1000)
        shelf.withdraw(stored, [stored.blocks[0].segment])  # as `one` does when its own time is over
        assert shared.num_leases() == 1 and shared.num_bytes() > 0
        two.forget("t", parent.id)
        await until(lambda: shared.is_empty)


def _expiry(shared: Objects) -> float:
    found = shared.open().scan(lambda manifest: None).found
    return found[0].manifest.expires_at - time.time()


@pytest.mark.parametrize("order", ["parent first", "child first"])
async def test_who_shares_blocks_of_whom(shared: Objects, order: str) -> None:
    """A child borrows of a parent that another server knows, too, and the other one ends it."""
    async with engine_on(shared) as one, engine_on(shared) as two:
        parent, _ = await a_lease(one, 30)
        await two.seek("t", parent.id)
        child = child_of(two, parent.id, [5] * 8, retain=LASTING)
        await ask(two, child)
        before = shared.num_bytes()
        await one.seek("t", child.id)
        if order == "parent first":
            one.forget("t", parent.id)
            await until(lambda: shared.num_leases() == 1)
            assert shared.num_bytes() == before, "the child has blocks of it"
            await _unload(two, child.id)
            await check_child(two, child.id, "file")
            two.forget("t", child.id)
        else:
            two.forget("t", child.id)
            await until(lambda: shared.num_leases() == 1)
            await _unload(one, parent.id)
            await check_child(one, parent.id, "file")
            one.forget("t", parent.id)
            two.forget("t", parent.id)
        await until(lambda: shared.num_leases() == 0)
        for engine in (one, two):
            for reference in (parent.id, child.id):
                if engine.retention.get("t", reference) is not None:
                    engine.forget("t", reference)
    assert shared.num_bytes() == 0


async def _unload(engine: AsyncEngine, reference: str) -> None:
    """Nothing of a lease is in memory."""
    record = engine.retention.find("t", reference)
    while record.tables():
        assert engine.retention.leases.let_stored_go()
    for kept in record.kept.values():
        kept.epochs = type(kept.epochs)()
    engine._vault._unload((record, 0))  # type: ignore[union-attr]


async def test_a_parent_that_goes_while_its_child_is_written(shared: Objects, store: MemoryStore) -> None:
    """The child then writes all blocks itself."""
    async with engine_on(shared) as engine:
        parent, _ = await a_lease(engine, 30)
        size = shared.num_bytes()
        for key in store.keys("test/leases"):
            store.remove(key)
        child = child_of(engine, parent.id, [5] * 8, retain=LASTING)
        answer = await ask(engine, child)
        assert answer.retained is not None and answer.retained.durable
        assert shared.num_bytes() > 2 * size
        engine.forget("t", parent.id)
        await until(lambda: shared.num_bytes() < 2 * size)
        await _unload(engine, child.id)
        await check_child(engine, child.id, "file")


async def test_both_places_of_a_manifest(shared: Objects, store: MemoryStore) -> None:
    """A process that ended between writing the new one and removing the old one."""
    async with engine_on(shared) as engine:
        parent, _ = await a_lease(engine)
        [old] = store.keys("test/leases")
        data = store.objects[old]
        engine.set_ttl("t", parent.id, 5000)
        await until(lambda: old not in store.objects)
    store.put(old, data)
    async with engine_on(shared) as engine:
        expires_at = engine.record("t", parent.id).expires_at
        assert expires_at is not None and expires_at - time.time() > 4000, "the younger one counts"
        engine.set_ttl("t", parent.id, 3000)
        await until(lambda: shared.num_leases() == 1 and 2900 < _expiry(shared) < 3100)


async def test_what_is_left_goes_at_a_later_start(shared: Objects, store: MemoryStore) -> None:
    """Bytes without a manifest may be on their way for an hour."""
    async with engine_on(shared) as engine:
        await a_lease(engine)
    for key in store.keys("test/leases"):
        store.remove(key)

    def later(seconds: float) -> objects.ObjectShelf:
        return objects.ObjectShelf(store, "test", lambda: time.time() + seconds)

    later(60).scan(lambda manifest: None)
    assert shared.num_bytes() > 0
    later(4000).scan(lambda manifest: None)
    assert shared.is_empty


async def test_expired_ones_go_at_a_start(shared: Objects, store: MemoryStore) -> None:
    async with engine_on(shared) as engine:
        await a_lease(engine, name="mine")
    shelf = objects.ObjectShelf(store, "test", lambda: time.time() + 601)
    assert not shelf.scan(lambda manifest: None).found
    assert shared.is_empty


# --- a store that fails ------------------------------------------------------------------------------------------


async def test_a_store_that_is_down(shared: Objects, store: MemoryStore) -> None:
    async with engine_on(shared) as engine:
        store.is_down = True
        parent, answer = await a_lease(engine)
        assert answer.retained is not None and answer.retained.durable is False
        assert answer.retained.durable_reason == "the store failed: nobody answers"
        await check_child(engine, parent.id, "blocks")
        await engine.seek("t", "unknown")
        store.is_down = False
        other, answer = await a_lease(engine, 20)
        assert answer.retained is not None and answer.retained.durable
        store.is_down = True
        await _unload(engine, other.id)
        with pytest.raises(ParentLost):
            await ask(engine, child_of(engine, other.id, [7]))
        store.is_down = False
        engine.forget("t", parent.id)
        engine.forget("t", other.id)
        await until(lambda: shared.is_empty)
