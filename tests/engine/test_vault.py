"""Leases in files: a child behind a restart has its tokens and computes suffix + 1; no answer fails with a disk."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import (
    EngineDraining,
    InsufficientRetention,
    InvalidEstate,
    InvalidRequest,
    ParentLost,
    ParentNotFound,
    RetentionTooLarge,
)
from bequest.engine.types import Lineage, Request, Retain, SamplingParams
from bequest.engine.types.estate import StoredBlock
from bequest.engine.vault import manifest as manifests
from bequest.engine.vault import shelf as shelves
from bequest.engine.vault.shelf import Shelf
from bequest.engine.vault.shelving import BrokenBlocks
from tests.engine.harness import Answer, Setup, ask, ask_all, make_engine, request, running, until
from tests.engine.paged_fake import expected_tokens
from tests.engine.test_estates import child_of, params
from tests.engine.test_hidden_states import wants

SETUP = Setup(num_blocks=60, num_host_blocks=40, num_lease_blocks=30, num_file_blocks=200)
LASTING = Retain(600, durable=True)


@asynccontextmanager
async def vault(path: Path, setup: Setup = SETUP, wait: float = 20.0) -> AsyncIterator[AsyncEngine]:
    """An engine whose leases are in `path`; its end leaves them there."""
    async with running(setup) as (engine, _):
        await engine.open_files(Shelf(path), wait)
        try:
            yield engine
            assert await engine.drain(20)
        finally:
            end_leases(engine)
    await until(lambda: _is_free(path))


def end_leases(engine: AsyncEngine) -> None:
    """What memory holds of them goes with the process."""
    for record in engine.retention.leases.holders():
        engine.retention.leases.end(record)


def _is_free(path: Path) -> bool:
    try:
        Shelf(path).close()
    except OSError:
        return False
    return True


async def a_lease(engine: AsyncEngine, length: int = 30, **fields: object) -> tuple[Request, Answer]:
    parent = request([3 + length] * length, params(), retain=LASTING, **fields)
    answer = await ask(engine, parent)
    assert answer.retained is not None
    return parent, answer


async def check_child(engine: AsyncEngine, parent: str, source: str) -> None:
    child = child_of(engine, parent, [7, 8, 9])
    answer = await ask(engine, child)
    assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 6)
    assert answer.inheritance is not None
    assert (answer.inheritance.source, answer.inheritance.computed_tokens) == (source, 4)


def files(path: Path, folder: str = "leases") -> list[Path]:
    return sorted((path / folder).iterdir())


# --- there and back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 17, 30])
@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_a_lease_outlives_its_process(tmp_path: Path, length: int, prefix_caching: bool) -> None:
    setup = replace(SETUP, prefix_caching=prefix_caching)
    async with vault(tmp_path, setup) as engine:
        parent, answer = await a_lease(engine, length, name="mine", cache_salt="s")
        assert answer.retained is not None and answer.retained.durable
        assert engine.record("t", "mine").grade == "stored"
    async with vault(tmp_path, setup) as engine:
        entry = engine.record("t", "mine")
        assert (entry.id, entry.grade, entry.choices[0].blocks) == (parent.id, "stored", 0)
        assert entry.expires_at is not None and 590 < entry.expires_at - time.time() <= 600
        await check_child(engine, parent.id, "file")
        await check_child(engine, parent.id, "blocks")
    async with vault(tmp_path, setup) as engine:
        await check_child(engine, parent.id, "file")
        engine.forget("t", parent.id)
        await until(lambda: not files(tmp_path) and not files(tmp_path, "blocks"))


async def test_choices_and_a_tree_store_shared_blocks_once(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        asked = SamplingParams(max_tokens=6, n=3, temperature=1, seed=3, ignore_eos=True)
        parent = request([3] * 18, asked, retain=LASTING)
        await ask(engine, parent)
        size = sum(file.stat().st_size for file in files(tmp_path, "blocks"))
        child = child_of(engine, parent.id, [5] * 8, choice=1, retain=LASTING)
        await ask(engine, child)
        block = engine._device.block_layout.num_bytes
        assert size == (4 + 3 * 2) * block
        more = sum(file.stat().st_size for file in files(tmp_path, "blocks")) - size
        assert more == (-(-(18 + 6 + 8 + 5) // 4) - 5) * block, "five whole blocks are the parent's"
        engine.forget("t", parent.id)
        assert engine.retention.books.used == 10 + more // block, "which its child still needs"
    async with vault(tmp_path) as engine:
        with pytest.raises(ParentNotFound):
            engine.parent("t", parent.id)
        await check_child(engine, child.id, "file")
        engine.forget("t", child.id)
        await until(lambda: not files(tmp_path, "blocks"))
        assert engine.retention.books.used == 0


@pytest.mark.parametrize("block_size", [1, 4])
async def test_a_child_borrows_no_more_than_files_have_of_its_parent(tmp_path: Path, block_size: int) -> None:
    """An extraction gives the parent the KV of its last token, which came too late for the files."""
    setup = replace(SETUP, block_size=block_size, num_blocks=300, num_lease_blocks=150, num_file_blocks=900)
    async with vault(tmp_path, setup) as engine:
        parent, _ = await a_lease(engine, 30)
        tokens = engine.parent("t", parent.id).choices[0].token_ids
        assert len(tokens) % block_size == 0
        lineage = Lineage(parent.id, 0, len(tokens))
        await ask(engine, request(tokens, params(0), hidden_states=wants("last"), lineage=lineage))
        child = child_of(engine, parent.id, [7, 8], retain=LASTING)
        answer = await ask(engine, child)
        assert answer.inheritance is not None and answer.inheritance.computed_tokens == 2
        assert answer.retained is not None and answer.retained.durable
    async with vault(tmp_path, setup) as engine:
        for one in (child.id, parent.id):
            await check_child(engine, one, "file")
            engine.forget("t", one)


async def test_many_children_in_a_crowd(tmp_path: Path) -> None:
    """In a cache that is too small for them, and with leases that have to move for what comes out of files."""
    setup = replace(SETUP, num_blocks=40, num_host_blocks=60, num_lease_blocks=20)
    async with vault(tmp_path, setup) as engine:
        parents = [(await a_lease(engine, 10 + 3 * i))[0] for i in range(5)]
    async with vault(tmp_path, setup) as engine:
        held = request([2] * 40, params(), retain=Retain(600))
        await ask(engine, held)
        children = [child_of(engine, parent.id, [i, 5]) for i in range(6) for parent in parents]
        crowd = [request([9, i] * 8, params(20)) for i in range(8)]
        answers = await ask_all(engine, [*children, *crowd])
        for asked, answer in zip([*children, *crowd], answers, strict=True):
            assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, asked.params.max_tokens)
        for answer in answers[: len(children)]:
            assert answer.inheritance is not None and answer.inheritance.computed_tokens == 3
        await check_child(engine, held.id, engine_source(engine, held.id))
        engine.forget("t", held.id)


def engine_source(engine: AsyncEngine, parent: str) -> str:
    kept = engine.retention.find("t", parent).kept[0]
    return "blocks" if kept.table is not None and kept.table.resident else "host"


async def test_a_tenant_finds_its_own_alone(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        parent, _ = await a_lease(engine, tenant="u", name="mine")
    async with vault(tmp_path) as engine:
        with pytest.raises(ParentNotFound):
            engine.parent("t", "mine")
        assert engine.parent("u", "mine").id == parent.id


async def test_nothing_is_promised_of_files_behind_the_end(tmp_path: Path) -> None:
    async with running(SETUP) as (engine, _):
        await engine.open_files(Shelf(tmp_path), 20.0)
        await engine.written()
    with pytest.raises(EngineDraining):
        await engine.written()


async def test_times_last_too(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        longer, shorter = (await a_lease(engine))[0], (await a_lease(engine, 9))[0]
        engine.set_ttl("t", longer.id, 5000)
        engine.set_ttl("t", shorter.id, None)
        assert engine.record("t", shorter.id).grade == "warm"
        await until(lambda: len(files(tmp_path)) == 1)
    async with vault(tmp_path) as engine:
        assert [entry.id for entry in engine.records("t")] == [longer.id]
        expires_at = engine.record("t", longer.id).expires_at
        assert expires_at is not None and expires_at - time.time() > 4000
        engine.set_ttl("t", longer.id, 0.01)
        await until(lambda: not files(tmp_path))


async def test_a_lease_that_ends_meanwhile_serves_those_who_were_let_in(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        parent, _ = await a_lease(engine)
    async with vault(tmp_path) as engine:
        child = child_of(engine, parent.id, [7])
        stream = engine.generate(child)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        engine.forget("t", parent.id)
        assert (await first).inheritance is not None
        async for _ in stream:
            pass
        await until(lambda: not files(tmp_path))


async def while_written(engine: AsyncEngine) -> AsyncIterator[tuple[int, Request, asyncio.Future[Answer]]]:
    """Requests for leases in files that have ended, each a little longer ago, and who waits for their answers."""
    for turns in range(40):
        parent = request([3 + turns] * 9, params(), retain=LASTING)
        asked = asyncio.ensure_future(ask(engine, parent))
        await until(lambda name=parent.id: any(entry.id == name for entry in engine.records("t")))  # type: ignore[misc]
        for _ in range(turns):
            await asyncio.sleep(0.0002)
        yield turns, parent, asked


async def test_who_waits_for_files_finds_them_as_they_shall_be(tmp_path: Path) -> None:
    """Also a lease that is forgotten while it is written, at whatever point."""
    async with vault(tmp_path) as engine:
        kept, gone = (await a_lease(engine))[0], (await a_lease(engine, 9))[0]
        engine.set_ttl("t", kept.id, 5000)
        engine.forget("t", gone.id)
        await engine.written()
        [left] = [manifests.from_bytes(path.read_bytes()) for path in files(tmp_path)]
        assert left.deed.id == kept.id and left.expires_at - time.time() > 4000
        engine.forget("t", kept.id)
        await engine.written()
        assert not files(tmp_path) and not files(tmp_path, "blocks")
        async for turns, parent, asked in while_written(engine):
            engine.forget("t", parent.id)
            await engine.written()
            assert not files(tmp_path), turns
            await asked


async def test_a_lease_that_is_given_back_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    """At whatever point; its answer says what became of it."""
    told = set()
    async with vault(tmp_path) as engine:
        async for turns, parent, asked in while_written(engine):
            engine.set_ttl("t", parent.id, None)
            answer = await asked
            told |= {None if answer.retained is None else answer.retained.durable_reason}
            assert engine.record("t", parent.id).grade == "warm"
            await engine.written()
            assert not files(tmp_path) and not files(tmp_path, "blocks"), turns
    assert told <= {None, "the lease ended while it was written"}


async def test_who_waits_for_a_disk_hears_of_the_end_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer whose lease is being written is whole, and goes out as it is."""
    go_on = threading.Event()
    engine, _ = make_engine(SETUP)
    await engine.open_files(Shelf(tmp_path), 20.0)
    stored, _ = await a_lease(engine, 9)
    engine.retention.leases.let_stored_go()
    engine.scheduler.cache.forget_warm()
    monkeypatch.setattr(Shelf, "read", lambda *args: go_on.wait(5))
    monkeypatch.setattr("bequest.engine.vault.shelf.os.fsync", lambda descriptor: go_on.wait(5))
    parent = request([3] * 9, params(), retain=LASTING)
    answer = asyncio.ensure_future(ask(engine, parent))
    await until(lambda: engine.retention.get("t", parent.id) is not None and engine.num_open == 0)
    reading = asyncio.ensure_future(engine.reach("t", stored.id, 0))
    await asyncio.sleep(0.02)
    assert not answer.done() and not reading.done()
    await engine.stop()
    told = (await asyncio.wait_for(answer, 1)).retained
    assert told is not None and told.durable is False and "ended" in str(told.durable_reason)
    await asyncio.wait_for(reading, 1)
    with pytest.raises(EngineDraining):
        await engine.written()
    assert engine.set_ttl("t", stored.id, 900).grade == "stored"
    with pytest.raises(EngineDraining):
        await engine.written()
    await asyncio.wait_for(engine.reach("t", stored.id, 0), 1)
    with pytest.raises(EngineDraining):
        await ask(engine, child_of(engine, stored.id, [7]))
    go_on.set()
    await until(lambda: _is_free(tmp_path))


async def test_who_leaves_before_the_disk_has_spoken_has_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has heard of it, and whoever asks again has the same name for it."""
    go_on = threading.Event()
    async with vault(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("bequest.engine.vault.shelf.os.fsync", lambda descriptor: go_on.wait(5))
            parent = request([3] * 9, params(), retain=LASTING, name="mine")
            answer = asyncio.ensure_future(ask(engine, parent))
            await until(lambda: engine.retention.get("t", parent.id) is not None and engine.num_open == 0)
            answer.cancel()
            await asyncio.wait({answer})
            assert engine.record("t", parent.id).grade == "warm" and engine.load().retention_charged == 0
            again = request([3] * 9, params(), name="mine")
            await ask(engine, again)
            assert engine.parent("t", "mine").id == again.id
            go_on.set()
            await engine.written()
        await until(lambda: not files(tmp_path) and not files(tmp_path, "blocks"))
        assert engine.retention.books.used == 0


@pytest.mark.parametrize("late", [False, True])
async def test_a_lease_that_ends_while_it_is_read(tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, and its tokens are not lost with its files."""
    go_on, read = threading.Event(), Shelf.read

    def slowly(*told: object) -> None:
        go_on.wait(5)
        read(*told)  # type: ignore[arg-type]

    monkeypatch.setattr(Shelf, "read", slowly)
    async with vault(tmp_path) as engine:
        parent, _ = await a_lease(engine)
        engine.retention.leases.let_stored_go()
        engine.scheduler.cache.forget_warm()
        reading = asyncio.ensure_future(engine.reach("t", parent.id, 0))
        await asyncio.sleep(0.05 if late else 0)
        engine.set_ttl("t", parent.id, None)
        await until(lambda: not files(tmp_path, "blocks"))
        go_on.set()
        await asyncio.wait_for(reading, 5)
        child = child_of(engine, parent.id, [7])
        answer = await ask(engine, child)
        assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 6)
        assert answer.inheritance is not None and answer.inheritance.source == "recompute"


async def test_a_lease_is_read_from_the_device_from_the_end_of_its_request_on(tmp_path: Path) -> None:
    """Who falls asleep just then waits for it."""
    async with vault(tmp_path) as engine:
        deliver, waits = engine._vault.deliver, []

        def delivered(*told: object) -> None:
            deliver(*told)  # type: ignore[arg-type]
            try:
                engine._vault.settled().send(None)
            except StopIteration:
                waits.append(False)
            else:
                waits.append(True)

        engine._vault.deliver = delivered  # type: ignore[method-assign]
        await a_lease(engine)
        assert waits[-1]


async def test_a_drain_writes_what_is_leased(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        parent = request([3] * 20, params(), retain=Retain(600))
        answer = await ask(engine, parent)
        assert answer.retained is not None and answer.retained.durable is None
        assert await engine.drain(10)
    async with vault(tmp_path) as engine:
        await check_child(engine, parent.id, "file")


async def test_leases_in_files_give_way_in_memory(tmp_path: Path) -> None:
    """Far more are promised than memory holds; each is continued, from wherever it is."""
    setup = replace(SETUP, num_blocks=40, num_host_blocks=11, num_lease_blocks=20, num_file_blocks=400)
    async with vault(tmp_path, setup) as engine:
        parents = [(await a_lease(engine, 20 + i))[0] for i in range(20)]
        assert engine.load().retention_charged <= 30
        assert {entry.grade for entry in engine.records("t")} == {"stored"}
        sources = set()
        for parent in parents:
            child = child_of(engine, parent.id, [7, 8])
            answer = await ask(engine, child)
            assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 6)
            assert answer.inheritance is not None and answer.inheritance.computed_tokens == 3
            sources.add(answer.inheritance.source)
        assert "file" in sources and sources <= {"blocks", "host", "file"}


async def test_a_child_does_not_push_out_what_its_parent_pays_for(tmp_path: Path) -> None:
    async with vault(tmp_path, replace(SETUP, num_host_blocks=1, num_lease_blocks=13)) as engine:
        parent, _ = await a_lease(engine, 30)
        child = child_of(engine, parent.id, [7] * 8, retain=LASTING)
        try:
            answer = await ask(engine, child)
        except InsufficientRetention:  # the parent is open, and stays
            return
        assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 6)


async def test_a_lease_of_memory_alone_does_not_give_way(tmp_path: Path) -> None:
    async with vault(tmp_path, replace(SETUP, num_host_blocks=1, num_lease_blocks=16)) as engine:
        held = request([2] * 20, params(), retain=Retain(600))
        await ask(engine, held)
        await a_lease(engine, 20)
        await a_lease(engine, 21)
        assert engine.record("t", held.id).choices[0].blocks == 7
        await check_child(engine, held.id, "blocks")
        engine.forget("t", held.id)


# --- what is not promised ----------------------------------------------------------------------------------------


async def test_without_files() -> None:
    async with running(replace(SETUP, num_file_blocks=0)) as (engine, _):
        with pytest.raises(InvalidRequest) as raised:
            await ask(engine, request([3], params(), retain=LASTING))
        assert raised.value.reason == "no_files"


async def test_files_are_charged_at_admission(tmp_path: Path) -> None:
    async with vault(tmp_path, replace(SETUP, num_file_blocks=10)) as engine:
        with pytest.raises(RetentionTooLarge):
            await ask(engine, request([3] * 40, params(), retain=LASTING))
        parent, _ = await a_lease(engine, 20)
        with pytest.raises(InsufficientRetention) as raised:
            await ask(engine, request([4] * 20, params(), retain=LASTING))
        assert raised.value.reason == "files_full"
        assert engine.load().retention_charged == 7, "nothing of what was refused is charged"
        engine.forget("t", parent.id)


@pytest.mark.parametrize("broken", ["vanished", "full", "slow", "read-only", "odd"])
async def test_a_disk_that_fails(tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with vault(tmp_path, wait=0.1 if broken == "slow" else 20.0) as engine:
        if broken == "vanished":
            (tmp_path / "blocks").rename(tmp_path / "elsewhere")
        if broken == "full":
            monkeypatch.setattr("bequest.engine.vault.shelf._write", _no_space)
        if broken == "read-only":
            monkeypatch.setattr("bequest.engine.vault.shelf._private", _read_only)
        if broken == "odd":
            monkeypatch.setattr("bequest.engine.vault.shelf._write", lambda *args: {}["nobody expects this"])
        if broken == "slow":
            monkeypatch.setattr("bequest.engine.vault.shelf.os.fsync", lambda descriptor: time.sleep(0.2))
        parent, answer = await a_lease(engine)
        assert answer.token_ids[0] == expected_tokens(parent.prompt_token_ids, 6)
        assert answer.retained is not None and answer.retained.durable is False
        said = {"vanished": "No such file", "full": "No space left", "slow": "longer than 0.1 s"}
        said["odd"] = "in the server's log"
        assert said.get(broken, "Read-only file system") in str(answer.retained.durable_reason)
        await check_child(engine, parent.id, "blocks")
        if broken == "slow":
            await until(lambda: engine.record("t", parent.id).grade == "stored")
        else:
            assert engine.record("t", parent.id).grade == "leased"
        monkeypatch.undo()
        if broken == "vanished":
            (tmp_path / "elsewhere").rename(tmp_path / "blocks")
        engine.forget("t", parent.id)
        await until(lambda: not files(tmp_path) and not files(tmp_path, "blocks"))


def _read_only(path: str, flags: int) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


async def test_a_disk_that_stands_still_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, leases of memory and children that read files go on while a lease is written, for however long."""
    moves, write = threading.Event(), shelves._write

    def wait(descriptor: int, data: memoryview) -> None:
        assert moves.wait(60)
        write(descriptor, data)

    async with vault(tmp_path) as engine:
        before, _ = await a_lease(engine, 20)
    async with vault(tmp_path, wait=0.1) as engine:
        monkeypatch.setattr(shelves, "_write", wait)
        try:
            slow, answer = await a_lease(engine)
            assert answer.retained is not None and answer.retained.durable is False
            assert "longer than 0.1 s" in str(answer.retained.durable_reason)
            others = [request([9, i] * 4, params(9), retain=Retain(600) if i % 2 else None) for i in range(4)]
            for asked, told in zip(others, await ask_all(engine, others), strict=True):
                assert told.token_ids[0] == expected_tokens(asked.prompt_token_ids, 9)
            await check_child(engine, before.id, "file")
            await check_child(engine, slow.id, "blocks")
            assert engine.record("t", slow.id).grade == "leased"
        finally:
            moves.set()
        await until(lambda: engine.record("t", slow.id).grade == "stored")


async def test_a_disk_that_fails_later_keeps_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of before are continued from a disk that has become read-only; new ones are in memory, ends cannot be
    moved, and what is deleted there comes back."""
    async with vault(tmp_path) as engine:
        parent, _ = await a_lease(engine)
    async with vault(tmp_path) as engine:
        monkeypatch.setattr("bequest.engine.vault.shelf._private", _read_only)
        await check_child(engine, parent.id, "file")
        engine.set_ttl("t", parent.id, 5000)
        other, answer = await a_lease(engine, 12)
        assert answer.retained is not None and answer.retained.durable is False
        await check_child(engine, other.id, "blocks")
        monkeypatch.undo()
    async with vault(tmp_path) as engine:
        expires_at = engine.record("t", parent.id).expires_at
        assert expires_at is not None and expires_at - time.time() < 600


def _no_space(descriptor: int, data: memoryview) -> None:
    raise OSError(28, os.strerror(28))


async def test_one_server_at_a_time(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    with pytest.raises(OSError, match="another server"):
        Shelf(tmp_path)
    shelf.close()
    Shelf(tmp_path).close()


# --- what is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
async def test_lost_blocks_are_never_computed_again(tmp_path: Path, how: str) -> None:
    async with vault(tmp_path) as engine:
        parent, _ = await a_lease(engine)
    [segment] = files(tmp_path, "blocks")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 4
    if how == "gone":
        segment.unlink()
    else:
        segment.write_bytes(data[:-1] if how == "cut" else data)
    async with vault(tmp_path) as engine:
        if how == "flipped":  # which only shows when it is read
            with pytest.raises(ParentLost):
                await ask(engine, child_of(engine, parent.id, [7]))
        with pytest.raises(ParentLost):
            engine.parent("t", parent.id)
        with pytest.raises(ParentLost):
            await engine.parent_ended("t", parent.id, None)
        engine.forget("t", parent.id)
        with pytest.raises(ParentNotFound):
            engine.parent("t", parent.id)


async def test_a_torn_manifest_is_a_lease_that_is_lost(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        parent, _ = await a_lease(engine, name="mine")
        other, _ = await a_lease(engine, 9, name="other")
    torn = next(file for file in files(tmp_path) if manifests.from_bytes(file.read_bytes()).deed.id == parent.id)
    torn.write_bytes(torn.read_bytes()[:-3])
    for _ in range(2):  # it stays known
        async with vault(tmp_path) as engine:
            for reference in (parent.id, "mine"):
                with pytest.raises(ParentLost):
                    engine.parent("t", reference)
            for tenant, reference in (("u", "mine"), ("t", "min")):
                with pytest.raises(ParentNotFound):
                    engine.parent(tenant, reference)
            await check_child(engine, other.id, "file")
    os.utime(torn, (1.0, 1.0))
    async with vault(tmp_path) as engine:
        with pytest.raises(ParentNotFound):
            engine.parent("t", "mine")
        again, _ = await a_lease(engine, name="mine")
        assert engine.parent("t", "mine").id == again.id


async def test_what_is_left_of_others_is_cleared(tmp_path: Path) -> None:
    async with vault(tmp_path) as engine:
        await a_lease(engine)
    [lease] = files(tmp_path)
    (tmp_path / "leases" / "torn").write_bytes(lease.read_bytes()[:-3])
    (tmp_path / "leases" / "coming.new").write_bytes(b"")
    (tmp_path / "blocks" / "orphan").write_bytes(b"abc")
    async with vault(tmp_path) as engine:
        assert files(tmp_path) == [lease] and len(files(tmp_path, "blocks")) == 1
    async with vault(tmp_path, replace(SETUP, block_size=8)) as engine:
        assert not engine.records("t") and not files(tmp_path) and not files(tmp_path, "blocks")


async def test_ten_thousand_mutations(tmp_path: Path) -> None:
    """Of a manifest and of its blocks: whole, or refused."""
    async with vault(tmp_path) as engine:
        await a_lease(engine)
    [lease], [segment], draw = files(tmp_path), files(tmp_path, "blocks"), random.Random(5)
    data, shelf = lease.read_bytes(), Shelf(tmp_path)
    manifest = manifests.from_bytes(data)
    size = manifest.deed.identity.cache.num_bytes
    whole = _read(shelf, manifest.blocks, size)
    for number in range(10_000):
        if number % 10:
            with pytest.raises(InvalidEstate):
                manifests.from_bytes(mutated(data, draw))
            continue
        changed = mutated(whole, draw)
        segment.write_bytes(changed)
        if changed[: len(whole)] == whole:  # what is behind the blocks is nobody's
            assert _read(shelf, manifest.blocks, size) == whole
            continue
        with pytest.raises(BrokenBlocks):
            _read(shelf, manifest.blocks, size)
    shelf.close()


def _read(shelf: Shelf, blocks: tuple[StoredBlock, ...], size: int) -> bytes:
    content = np.empty((len(blocks), size), np.uint8)
    shelf.read(blocks, content)
    return content.tobytes()


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Flipped bits, bytes that are others or missing, an end cut off or put on."""
    changed = bytearray(data)
    at = draw.randrange(len(data))
    match draw.randrange(5):
        case 0:
            changed[at] ^= 1 << draw.randrange(8)
        case 1:
            changed[at] = (changed[at] + draw.randrange(1, 256)) % 256
        case 2:
            del changed[at:]
        case 3:
            changed += draw.randbytes(1 + at % 7)
        case 4:
            changed[at : at + 8] = bytes(b ^ 0x5A for b in changed[at : at + 8])
    return bytes(changed)
