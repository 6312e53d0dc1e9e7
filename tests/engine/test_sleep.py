"""An engine that sleeps: leases are as they were, nothing else is counted on, and requests wake it or are refused."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import EngineAsleep, EngineBusy, EngineDraining
from bequest.engine.types import Retain
from bequest.engine.types.recurrent import StateSizes
from bequest.engine.vault.shelf import Shelf
from tests.engine.harness import Setup, ask, ask_all, make_engine, request, running, until
from tests.engine.paged_fake import PagedFakeRunner, expected_tokens
from tests.engine.test_estates import child_of, params
from tests.engine.test_vault import end_leases

SETUP = Setup(num_blocks=60, num_host_blocks=40, num_lease_blocks=30)
FILED = replace(SETUP, num_file_blocks=200)
SETUPS = {
    "decoder": SETUP,
    "windows": replace(SETUP, num_blocks=200, num_lease_blocks=90, windows=(0, 6, 6), state_interval=48),
    "recurrent": replace(SETUP, states=StateSizes(num_slots=60, num_lease_slots=30, interval=24)),
}


async def check_child(engine: AsyncEngine, parent: str) -> None:
    child = child_of(engine, parent, [7, 8])
    answer = await ask(engine, child)
    assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 6)
    assert answer.inheritance is not None and answer.inheritance.computed_tokens == 3


@pytest.mark.parametrize("name", SETUPS)
async def test_leases_are_kept_and_nothing_else(name: str) -> None:
    async with running(SETUPS[name]) as (engine, runner):
        leased = [request([3 + i] * (20 + i), params(), retain=Retain(600)) for i in range(3)]
        warm = request([9] * 21, params())
        await ask_all(engine, [*leased, warm])
        cache = engine.scheduler.cache
        cache.make_room(cache.pool.num_free + 6)  # some lie on the host, and some swaps are still to be carried out
        assert await engine.sleep(wakes_itself=True) > 0 and engine.asleep and runner.asleep
        assert engine.record("t", warm.id).grade == "tokens"
        again = await ask(engine, request([9] * 21, params()))
        assert again.token_ids[0] == expected_tokens([9] * 21, 6)
        assert again.usage is not None and again.usage.cached_tokens == 0, "what was warm is forgotten"
        assert not engine.asleep and not runner.asleep
        for parent in leased:
            await check_child(engine, parent.id)
            engine.forget("t", parent.id)


async def test_it_stays_asleep_if_that_was_asked_for() -> None:
    async with running(SETUP) as (engine, runner):
        parent = request([3] * 9, params(), retain=Retain(600))
        await ask(engine, parent)
        await engine.sleep(wakes_itself=False)
        for _ in range(2):
            with pytest.raises(EngineAsleep):
                await ask(engine, request([3] * 9, params()))
        with pytest.raises(EngineAsleep):
            await engine.export_estate("t", parent.id)
        assert runner.asleep
        await engine.sleep(wakes_itself=True)  # now a request may wake it
        estate = await engine.export_estate("t", parent.id)
        assert not engine.asleep and len(estate.content)
        await engine.sleep(wakes_itself=False)
        await engine.wake()
        await engine.wake()
        await check_child(engine, parent.id)
        engine.forget("t", parent.id)


async def test_who_runs_is_not_disturbed() -> None:
    async with running(SETUP) as (engine, _):
        stream = engine.generate(request([3] * 9, params(20)))
        await anext(stream)
        with pytest.raises(EngineBusy):
            await engine.sleep(wakes_itself=True)
        assert not engine.asleep
        assert [delta async for delta in stream][-1].finished


async def test_who_sends_it_to_sleep_at_an_end_waits_for_the_last_step() -> None:
    """An end by a token is known when the step behind it has begun."""
    async with running(SETUP) as (engine, runner):
        slow(runner, "launch", 0.01)
        prompt = [3] * 9
        for _ in range(3):
            stop = frozenset([expected_tokens(prompt, 6)[2]])
            answer = await ask(engine, request(prompt, replace(params(20), stop_token_ids=stop)))
            assert len(answer.token_ids[0]) <= 3
            await engine.sleep(wakes_itself=True)
            assert runner.asleep


async def test_it_falls_asleep_by_itself_and_wakes_for_a_crowd() -> None:
    async with running(replace(SETUP, idle_sleep=0.05)) as (engine, runner):
        for _ in range(3):
            await until(lambda: runner.asleep)
            asked = [request([9, i] * 8, params(20)) for i in range(8)]
            for one, answer in zip(asked, await ask_all(engine, asked), strict=True):
                assert answer.token_ids[0] == expected_tokens(one.prompt_token_ids, 20)
        await until(lambda: runner.asleep)


async def test_a_request_that_comes_while_it_falls_asleep_is_served() -> None:
    async with running(SETUP) as (engine, runner):
        falling = asyncio.ensure_future(engine.sleep(wakes_itself=True))
        await asyncio.sleep(0)
        asked = request([4] * 9, params())
        answer = await ask(engine, asked)
        assert answer.token_ids[0] == expected_tokens([4] * 9, 6)
        await asyncio.gather(falling, return_exceptions=True)
        await until(lambda: not runner.asleep)


async def test_memory_that_is_gone_fails_requests_but_not_the_engine() -> None:
    async with running(SETUP) as (engine, runner):
        parent = request([3] * 9, params(), retain=Retain(600))
        await ask(engine, parent)
        await engine.sleep(wakes_itself=True)
        runner.cannot_wake = True
        for _ in range(2):
            with pytest.raises(EngineAsleep):
                await ask(engine, request([3] * 9, params()))
        with pytest.raises(EngineAsleep):
            await engine.wake()
        runner.cannot_wake = False
        await check_child(engine, parent.id)
        engine.forget("t", parent.id)


async def test_a_sleeping_engine_ends() -> None:
    async with running(SETUP) as (engine, runner):
        assert isinstance(runner, PagedFakeRunner)
        await engine.sleep(wakes_itself=True)
        assert await engine.drain(1)


@pytest.mark.parametrize("mode", ["falling", "asleep", "waking"])
async def test_a_drain_wakes_for_leases_that_only_memory_has(tmp_path: Path, mode: str) -> None:
    parent = request([3] * 9, params(), retain=Retain(600))
    async with running(FILED) as (engine, runner):
        await engine.open_files(Shelf(tmp_path), 20.0)
        await ask(engine, parent)
        slow(runner, "sleep", 0.02)
        slow(runner, "wake", 0.02)
        change: asyncio.Future[object] = asyncio.ensure_future(engine.sleep(wakes_itself=False))
        if mode != "falling":
            await change
        if mode == "waking":
            change = asyncio.ensure_future(engine.wake())
        await until(lambda: engine._sleep.mode == mode)
        assert await engine.drain(10)
        await change
        end_leases(engine)
    async with running(FILED) as (engine, _):
        await engine.open_files(Shelf(tmp_path, 10.0), 20.0)
        assert engine.record("t", parent.id).grade == "stored"


async def test_a_drain_ends_where_nobody_can_be_woken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(FILED) as (engine, runner):
        await engine.open_files(Shelf(tmp_path), 20.0)
        await ask(engine, request([3] * 9, params(), retain=Retain(600)))
        await engine.sleep(wakes_itself=False)
        runner.cannot_wake = True
        assert await engine.drain(10)
        assert "leases that are not in files end with this process: The engine cannot wake" in caplog.text
        end_leases(engine)


async def test_nobody_falls_asleep_while_an_estate_is_on_its_way() -> None:
    async with running(replace(SETUP, idle_sleep=0.02)) as (engine, runner):
        parent = request([3] * 30, params(), retain=Retain(600))
        await ask(engine, parent)
        engine._estates.piece_bytes = 1
        slow(runner, "read_blocks", 0.03)
        going = asyncio.ensure_future(engine.export_estate("t", parent.id))
        await until(lambda: runner.num_read > 0)
        with pytest.raises(EngineBusy):
            await engine.sleep(wakes_itself=True)
        estate = await going
        await until(lambda: runner.asleep)
        engine.forget("t", parent.id)
        slow(runner, "write_blocks", 0.03)
        await engine.import_estate("t", estate, 600)
        await check_child(engine, parent.id)
        await until(lambda: runner.asleep)
        engine.forget("t", parent.id)


async def test_nobody_falls_asleep_within_an_answer_of_several_requests() -> None:
    async with running(replace(SETUP, idle_sleep=0.02)) as (engine, runner):
        await engine.sleep(wakes_itself=True)
        async with engine.long_answer():
            for _ in range(2):
                await ask(engine, request([3] * 30, params()))
                with pytest.raises(EngineBusy):
                    await engine.sleep(wakes_itself=False)
                await asyncio.sleep(0.03)
                assert not runner.asleep
        await until(lambda: runner.asleep)


@pytest.mark.parametrize("change", ["sleep", "wake"])
async def test_who_sends_it_to_sleep_or_wakes_it_may_leave_meanwhile(change: str) -> None:
    """The device does not hear of that."""
    async with running(SETUP) as (engine, runner):
        parent = request([3] * 9, params(), retain=Retain(600))
        await ask(engine, parent)
        if change == "wake":
            await engine.sleep(wakes_itself=True)
        began = slow(runner, change, 0.05)
        leaves = asyncio.ensure_future(engine.sleep(wakes_itself=True) if change == "sleep" else engine.wake())
        await until(began.is_set)
        leaves.cancel()
        await asyncio.wait({leaves})
        for _ in range(2):
            await check_child(engine, parent.id)
        engine.forget("t", parent.id)


@pytest.mark.parametrize("change", ["sleep", "wake"])
async def test_who_waits_for_it_hears_of_its_end(change: str) -> None:
    engine, runner = make_engine(SETUP)
    if change == "wake":
        await engine.sleep(wakes_itself=True)
    began = slow(runner, change, 0.3)
    waits = asyncio.ensure_future(engine.sleep(wakes_itself=True) if change == "sleep" else engine.wake())
    await until(began.is_set)
    await engine.stop(0.1)
    with pytest.raises(EngineDraining):
        await asyncio.wait_for(waits, 1)


async def test_who_sends_it_to_sleep_waits_for_those_who_woke_it() -> None:
    async with running(SETUP) as (engine, runner):
        parent = request([3] * 30, params(), retain=Retain(600))
        await ask(engine, parent)
        await engine.sleep(wakes_itself=True)
        slow(runner, "wake", 0.02)
        going = asyncio.ensure_future(engine.export_estate("t", parent.id))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy):
            await asyncio.gather(*(engine.sleep(wakes_itself=True) for _ in range(3)))
        assert len((await going).content)
        engine.forget("t", parent.id)


async def test_who_finds_no_room_for_leases_stays_awake_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases run out while nobody asks for anything."""
    async with running(replace(SETUP, idle_sleep=0.02)) as (engine, runner):
        tried = threading.Event()

        def fail(*told: object) -> int:
            tried.set()
            raise MemoryError("6 GB are needed")

        with monkeypatch.context() as patch:
            patch.setattr(runner, "sleep", fail)
            parent = request([3] * 9, params(), retain=Retain(600))
            await ask(engine, parent)
            with pytest.raises(EngineBusy, match="no room for what leases hold: 6 GB are needed"):
                await engine.sleep(wakes_itself=True)
            await until(tried.is_set)
            await check_child(engine, parent.id)
            tried.clear()
            await until(tried.is_set)
        await until(lambda: runner.asleep)
        engine.forget("t", parent.id)


def slow(runner: PagedFakeRunner, name: str, seconds: float) -> threading.Event:
    """What the device does takes its time from now on. The event: it has begun."""
    work, began = getattr(runner, name), threading.Event()

    def slowly(*told: object) -> object:
        began.set()
        time.sleep(seconds)
        return work(*told)

    setattr(runner, name, slowly)
    return began
