"""Leases in a Mooncake store: as in files, two copies of each, and another server goes on where one was killed."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from bequest.engine.types.store_url import parse_store_url
from bequest.engine.vault.mooncake import MooncakeStore
from tests.engine import shelf_trials as trials
from tests.engine.shelf_trials import engine_on
from tests.engine.shelves import Objects
from tests.engine.test_vault import a_lease, check_child
from tests.store.mooncake_world import Store, running_store, why_not

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def running() -> Iterator[Store]:
    with running_store() as store:
        yield store


@pytest.fixture(scope="module")
def client(running: Store) -> Iterator[MooncakeStore]:
    store = MooncakeStore(parse_store_url(running.url()))
    yield store
    store.close()


@pytest.fixture
def shared(client: MooncakeStore) -> Objects:
    return Objects(client, f"t{secrets.token_hex(4)}")


async def test_a_lease_outlives_its_process(shared: Objects) -> None:
    await trials.outlives_its_process(shared)


async def test_shared_blocks_are_stored_once(shared: Objects) -> None:
    await trials.stores_shared_blocks_once(shared)


async def test_a_crowd(shared: Objects) -> None:
    await trials.serves_a_crowd(shared)


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
async def test_broken_blocks(shared: Objects, how: str) -> None:
    await trials.refuses_what_is_broken(shared, how)


async def test_broken_manifests(shared: Objects) -> None:
    await trials.refuses_broken_manifests(shared, 5)


async def test_another_model(shared: Objects) -> None:
    await trials.leaves_others_alone(shared)


def test_objects(client: MooncakeStore, shared: Objects) -> None:
    key = f"{shared.name}/blocks/a/0"
    assert client.get(key) is None and not client.exists(key)
    client.remove(key)
    client.put(key, b"abc")
    client.put(f"{shared.name}/blocks/b/0", memoryview(b"x" * 100))
    assert client.get(key) == b"abc" and client.exists(key)
    client.put(key, b"another")
    assert client.get(key) == b"abc", "what is there stays"
    assert len(client.keys(f"{shared.name}/")) == 2
    client.remove_under(f"{shared.name}/blocks/a/")
    assert client.keys(f"{shared.name}/") == [f"{shared.name}/blocks/b/0"]


def test_no_room(client: MooncakeStore, shared: Objects) -> None:
    """Nothing is pushed out for others."""
    first, data = f"{shared.name}/first", bytes(32 << 20)
    client.put(first, b"abc")
    with pytest.raises(OSError, match=r"it has no room|only . of its machines"):
        for number in range(8):
            client.put(f"{shared.name}/{number}", data)
    assert client.get(first) == b"abc"
    client.remove_under(f"{shared.name}/")


async def test_copies() -> None:
    """A lease has two copies, or it is not promised; one machine of the store may go."""
    with running_store(num_nodes=1) as store:
        client = MooncakeStore(parse_store_url(store.url()))
        shared = Objects(client)
        async with engine_on(shared) as engine:
            parent, answer = await a_lease(engine)
            assert answer.retained is not None and not answer.retained.durable
            assert "only 1 of its machines has room" in str(answer.retained.durable_reason)
            store.add_node(128)
            second, answer = await a_lease(engine, 20)
            assert answer.retained is not None and answer.retained.durable
            engine.forget("t", parent.id)
        store.nodes[0].kill()
        async with engine_on(shared) as engine:
            await check_child(engine, second.id, "file")
        client.close()
