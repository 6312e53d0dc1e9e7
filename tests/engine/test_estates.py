"""Estates leave one engine and come into another: the same tokens from the same KV, all or nothing."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import (
    EngineDead,
    EngineError,
    EstateMismatch,
    InsufficientRetention,
    InvalidEstate,
    InvalidRequest,
    NameInUse,
    ParentExpired,
    ParentFailed,
    ParentNotFound,
    RetentionTooLarge,
)
from bequest.engine.formats.estate_file import from_bytes, to_bytes
from bequest.engine.types import BeamParams, Lineage, OutputMode, Request, Retain, SamplingParams
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.estate import Estate
from tests.engine.harness import Answer, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import PagedFakeRunner, expected_tokens
from tests.engine.test_hidden_states import wants

SETUP = Setup(num_blocks=60, num_host_blocks=80, num_lease_blocks=40)
ENCODING = replace(SETUP, encoder_len=40)


@asynccontextmanager
async def two(setup: Setup = SETUP, other: Setup | None = None) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine]]:
    async with running(setup) as (here, _), running(other or setup) as (there, _):
        yield here, there


def params(max_tokens: int = 6, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **fields)  # type: ignore[arg-type]


def child_of(engine: AsyncEngine, parent: str, suffix: list[int], choice: int = 0, **fields: object) -> Request:
    known = engine.parent("t", parent)
    before = known.choices[choice].token_ids
    lineage = Lineage(known.id, choice, len(before))
    told = {"lineage": lineage, "encoder": known.encoder, "cache_salt": known.cache_salt}
    return request([*before, *suffix], params(), **(told | fields))


async def moved(here: AsyncEngine, there: AsyncEngine, reference: str, ttl: float = 600) -> str:
    """By way of bytes, as anybody would."""
    estate = await here.export_estate("t", reference)
    return await there.import_estate("t", from_bytes(to_bytes(estate)), ttl)


async def check_children_alike(here: AsyncEngine, there: AsyncEngine, parent: str, num_choices: int = 1) -> None:
    """A child there has the tokens of one here, and computes its suffix and what its parent never fed back."""
    for choice in range(num_choices):
        one = await ask(here, child_of(here, parent, [7, 8, 9], choice))
        other = await ask(there, child_of(there, parent, [7, 8, 9], choice))
        assert one.token_ids == other.token_ids and one.token_ids[0]
        assert other.inheritance is not None and one.inheritance is not None
        assert other.inheritance.computed_tokens == one.inheritance.computed_tokens == 4
        assert other.inheritance.source in ("blocks", "host")


def forget(parent: str, *engines: AsyncEngine) -> None:
    for engine in engines:
        engine.forget("t", parent)


# --- there and back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17, 30])
@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_a_child_elsewhere_computes_no_more(length: int, prefix_caching: bool) -> None:
    async with two(replace(SETUP, prefix_caching=prefix_caching)) as (here, there):
        parent = request([3] * length, params(), retain=Retain(600), name="mine")
        await ask(here, parent)
        assert await moved(here, there, "mine") == parent.id
        assert there.record("t", "mine").grade == "leased"
        await check_children_alike(here, there, parent.id)
        forget(parent.id, here, there)


async def test_tokens_are_the_oracles() -> None:
    async with two() as (here, there):
        parent = request([3, 1, 4, 1, 5], params(), retain=Retain(600))
        await ask(here, parent)
        await moved(here, there, parent.id)
        child = child_of(there, parent.id, [9, 2])
        assert (await ask(there, child)).token_ids[0] == expected_tokens(child.prompt_token_ids, 6)
        forget(parent.id, here, there)


async def test_choices_share_their_prompt() -> None:
    async with two() as (here, there):
        asked = SamplingParams(max_tokens=6, n=3, temperature=1, seed=3, ignore_eos=True)
        parent = request([3] * 18, asked, retain=Retain(600))
        await ask(here, parent)
        estate = await here.export_estate("t", parent.id)
        assert len(estate.content) == 4 + 3 * 2, "the four full blocks of the prompt are there once"
        await moved(here, there, parent.id)
        assert there.load().retention_charged == here.load().retention_charged == 10
        await check_children_alike(here, there, parent.id, num_choices=3)
        forget(parent.id, here, there)


@pytest.mark.parametrize("leased", [True, False])
async def test_beams(leased: bool) -> None:
    async with two(replace(SETUP, num_blocks=90)) as (here, there):
        asked = params(8, n=3, beams=BeamParams(4, 1.0, early_stopping=False))
        retain = Retain(600) if leased else None
        parent = request([3] * 9, asked, retain=retain, output=OutputMode.FINAL)
        await ask(here, parent)
        await moved(here, there, parent.id)
        await check_children_alike(here, there, parent.id, num_choices=3)
        forget(parent.id, here, there)


async def test_a_lease_on_the_host() -> None:
    setup = replace(SETUP, num_blocks=25, num_lease_blocks=4)
    async with two(setup) as (here, there):
        parent = request([3] * 18, params(), retain=Retain(600))
        await ask(here, parent)
        await ask(here, request([2] * 50, params(40)))
        assert here.load().used_host_blocks > 0
        await moved(here, there, parent.id)
        await ask(there, request([2] * 50, params(40)))
        assert there.load().used_host_blocks > 0, "and moves there as any lease does"
        await check_children_alike(here, there, parent.id)
        forget(parent.id, here, there)


async def test_an_encoder_input_travels() -> None:
    async with two(ENCODING) as (here, there):
        encoder = EncoderInput.of_tokens(range(50, 67))
        parent = request([1, 3, 3], params(), retain=Retain(600), encoder=encoder, cache_salt="salt")
        await ask(here, parent)
        await moved(here, there, parent.id)
        known = there.parent("t", parent.id)
        assert known.encoder == encoder and known.cache_salt == "salt"
        await check_children_alike(here, there, parent.id)
        child = child_of(there, parent.id, [5])
        told = (await ask(there, child)).token_ids[0]
        assert told == expected_tokens(child.prompt_token_ids, 6, encoder=encoder.token_ids)
        forget(parent.id, here, there)


async def test_piece_by_piece_between_steps() -> None:
    async with two() as (here, there):
        for engine in (here, there):
            engine._estates.piece_bytes = 1  # a block at a time
        parent = request([3] * 30, params(), retain=Retain(600))
        await ask(here, parent)
        crowd = [request([9, i], params(40)) for i in range(8)]
        answers, _ = await asyncio.gather(ask_all(here, crowd), moved(here, there, parent.id))
        for one, answer in zip(crowd, answers, strict=True):
            assert answer.token_ids[0] == expected_tokens(one.prompt_token_ids, 40)
        await check_children_alike(here, there, parent.id)
        forget(parent.id, here, there)


@pytest.mark.parametrize("length", range(30, 34))
async def test_what_a_parent_is_given_meanwhile_stays(length: int) -> None:
    """An extraction hands over the KV of the last token, which the blocks on their way have not got."""
    async with running(SETUP) as (engine, _):
        parent, desk = request([3] * length, params(), retain=Retain(600)), engine._estates
        await ask(engine, parent)
        record = engine.retention.find("t", parent.id)
        kept, before = record.kept[0], record.kept[0].computed
        leaving = desk.leave(record)
        lineage = Lineage(parent.id, 0, len(kept.tokens))
        await ask(engine, request(kept.tokens[:], params(0), hidden_states=wants("last"), lineage=lineage))
        assert kept.computed == len(kept.tokens) == before + 1
        deed = leaving.deed(await desk.identity("t"), desk.notes)
        assert deed.choices[0].computed == before and not [*deed.flaws(len(leaving.entries))]
        leaving.close()
        engine.forget("t", parent.id)


async def test_under_load_nothing_is_mixed_up() -> None:
    """Tight caches on both sides, with requests, imports and exports at once."""
    setup = replace(SETUP, num_blocks=40, num_lease_blocks=12, num_host_blocks=100)
    async with two(setup) as (here, there):
        for engine in (here, there):
            engine._estates.piece_bytes = 64
        draw = random.Random(4)
        parents = [request([20 + i] * draw.randint(1, 25), params(), retain=Retain(600)) for i in range(8)]
        await ask_all(here, parents)

        async def flood(engine: AsyncEngine) -> None:
            for wave in range(4):
                asked = [request([wave, i, *range(60)], params(20)) for i in range(4)]
                for one, answer in zip(asked, await ask_all(engine, asked), strict=True):
                    assert answer.token_ids[0] == expected_tokens(one.prompt_token_ids, 20)

        async def move_and_continue(parent: Request) -> None:
            while True:
                try:
                    await moved(here, there, parent.id)
                    break
                except InsufficientRetention:  # running requests have the blocks
                    await asyncio.sleep(0.01)
            child = child_of(there, parent.id, [5])
            answer = await ask(there, child)
            assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 6)
            assert answer.inheritance is not None and answer.inheritance.computed_tokens == 2
            forget(parent.id, here, there)

        await asyncio.gather(flood(here), flood(there), *map(move_and_continue, parents))


async def test_swaps_that_wait_for_a_step_come_first() -> None:
    """A lease makes room for an estate, whose bytes then go where the lease's were; one that was told to go is read."""
    async with two(SETUP, replace(SETUP, num_blocks=25, num_lease_blocks=4)) as (here, there):
        lease = request([2] * 70, params(), retain=Retain(600))
        await ask(there, lease)
        parent, estate = await an_estate(here, 25)
        assert there.scheduler.pool.num_free < len(estate.content)
        await there.import_estate("t", estate, 600)
        assert there.load().used_host_blocks > 0
        assert there.scheduler.cache.make_room(12), "again, and no step follows"
        assert all((await there.export_estate("t", parent)).content.ravel() == estate.content.ravel())
        for one in (parent, lease.id):
            child = child_of(there, one, [5])
            answer = await ask(there, child)
            assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 6)
            assert answer.inheritance is not None and answer.inheritance.computed_tokens == 2
        forget(parent, here, there)
        forget(lease.id, there)


async def test_a_lease_may_end_while_it_is_read() -> None:
    async with running(SETUP) as (here, runner):
        here._estates.piece_bytes = 1
        parent = request([3] * 30, params(), retain=Retain(600))
        await ask(here, parent)
        task = asyncio.create_task(here.export_estate("t", parent.id))
        await until(lambda: runner.num_read > 0)
        here.forget("t", parent.id)
        crowd = [request([9, i] * 10, params(20)) for i in range(8)]  # which would take its blocks
        estate, _ = await asyncio.gather(task, ask_all(here, crowd))
        await here.import_estate("t", estate, 600)
        child = child_of(here, parent.id, [5])
        assert (await ask(here, child)).token_ids[0] == expected_tokens(child.prompt_token_ids, 6)
        here.forget("t", parent.id)


# --- all or nothing ----------------------------------------------------------------------------------------------


async def an_estate(engine: AsyncEngine, length: int = 9, **fields: object) -> tuple[str, Estate]:
    parent = request([3] * length, params(), retain=Retain(600), **fields)
    await ask(engine, parent)
    return parent.id, await engine.export_estate("t", parent.id)


async def check_refused(engine: AsyncEngine, estate: Estate, error: type[EngineError]) -> EngineError:
    """An import raises, and leaves everything as it was."""
    pool, load, known = engine.scheduler.pool, engine.load(), engine.records("t")
    with pytest.raises(error) as raised:
        await engine.import_estate("t", estate, 600)
    pool.check()
    assert engine.load() == load and engine.records("t") == known
    return raised.value


async def test_tokens_beyond_the_vocabulary() -> None:
    async with two() as (here, there):
        parent, estate = await an_estate(here)
        choice = estate.deed.choices[0]
        wrong = replace(choice, token_ids=(*choice.token_ids[:-1], 5000))
        await check_refused(there, Estate(replace(estate.deed, choices=(wrong,)), estate.content), InvalidEstate)
        here.forget("t", parent)


async def test_an_estate_of_another_engine() -> None:
    async with two(SETUP, replace(SETUP, block_size=8)) as (here, there):
        parent, estate = await an_estate(here)
        error = await check_refused(there, estate, EstateMismatch)
        assert error.code == "estate_mismatch" and error.details == {"differs": ["cache"]}
        here.forget("t", parent)
        identity = estate.deed.identity
        for name, other in {"weights": "w", "dtype": "bfloat16", "tenant": "u"}.items():
            foreign = replace(estate.deed, identity=replace(identity, **{name: other}))
            error = await check_refused(here, Estate(foreign, estate.content), EstateMismatch)
            assert error.details == {"differs": [name]}


async def test_an_encoder_input_that_the_model_does_not_read() -> None:
    async with two(ENCODING, SETUP) as (here, there):
        parent, estate = await an_estate(here, encoder=EncoderInput.of_tokens([8, 9]))
        await check_refused(there, estate, InvalidRequest)
        here.forget("t", parent)


async def test_a_lease_is_charged_when_it_comes() -> None:
    async with two(SETUP, replace(SETUP, num_blocks=60, num_lease_blocks=6, num_host_blocks=1)) as (here, there):
        large, estate = await an_estate(here, 40)
        await check_refused(there, estate, RetentionTooLarge)
        first, one = await an_estate(here)
        second, other = await an_estate(here, 8)
        await there.import_estate("t", one, 600)
        error = await check_refused(there, other, InsufficientRetention)
        assert error.details["used_blocks"] == 4 and error.details["budget_blocks"] == 6
        assert error.details["earliest_expiry"] is not None
        there.forget("t", first)
        await there.import_estate("t", other, 600)
        for parent in (large, first, second):
            here.forget("t", parent)
        there.forget("t", second)


async def test_running_requests_have_the_blocks() -> None:
    async with two(SETUP, replace(SETUP, num_blocks=25)) as (here, there):
        parent, estate = await an_estate(here)
        stream = there.generate(request([2] * 60, params(34)))
        await anext(stream)
        await until(lambda: there.scheduler.pool.num_free < 4)
        with pytest.raises(InsufficientRetention):
            await there.import_estate("t", estate, 600)
        async for _ in stream:
            pass
        await there.import_estate("t", estate, 600)
        forget(parent, here, there)


async def test_its_name_is_taken() -> None:
    async with running(SETUP) as (engine, _):
        parent, estate = await an_estate(engine, name="mine")
        await check_refused(engine, estate, NameInUse)
        await check_refused(engine, Estate(replace(estate.deed, id="other"), estate.content), NameInUse)
        engine.forget("t", parent)
        done = await asyncio.gather(*(engine.import_estate("t", estate, 600) for _ in range(3)), return_exceptions=True)
        assert [type(one) for one in done].count(NameInUse) == 2 and parent in done, "one of them came first"
        engine.forget("t", parent)


async def test_what_cannot_be_exported() -> None:
    async with running(SETUP) as (engine, _):
        with pytest.raises(ParentNotFound):
            await engine.export_estate("t", "nobody")
        parent, _ = await an_estate(engine)
        with pytest.raises(ParentNotFound):
            await engine.export_estate("u", parent)
        engine.set_ttl("t", parent, None)
        warm = await engine.export_estate("t", parent)
        assert len(warm.content) == 4, "while its blocks are there a warm record is as good as a lease"
        await ask_all(engine, [request([9, i] * 40, params(40)) for i in range(6)])
        with pytest.raises(InsufficientRetention):
            await engine.export_estate("t", parent)
        stream = engine.generate(asked := request([2], params(300)))
        await anext(stream)
        with pytest.raises(InvalidRequest):
            await engine.export_estate("t", asked.id)
        await stream.aclose()  # type: ignore[attr-defined]
        aborted = request([2] * 90, params(4))
        engine.submit(aborted, lambda _: None)
        engine.abort(aborted.id)
        with pytest.raises(ParentFailed):
            await engine.export_estate("t", aborted.id)


async def test_a_lease_from_elsewhere_expires() -> None:
    async with two() as (here, there):
        parent, estate = await an_estate(here)
        await there.import_estate("t", estate, 0.05)
        await until(lambda: there.load().retention_charged == 0)
        with pytest.raises(ParentExpired):
            there.parent("t", parent)
        here.forget("t", parent)


# --- who goes meanwhile ------------------------------------------------------------------------------------------


def hold(runner: PagedFakeRunner) -> Callable[[], None]:
    """The device thread waits in front of the next read or write."""
    gate = threading.Event()
    read, write = runner.read_blocks, runner.write_blocks
    runner.read_blocks = lambda item: (gate.wait(10), read(item))[1]  # type: ignore[method-assign]
    runner.write_blocks = lambda item: (gate.wait(10), write(item))[1]  # type: ignore[method-assign,func-returns-value]
    return gate.set


async def test_who_asked_goes_away() -> None:
    async with running(SETUP) as (engine, runner):
        parent, estate = await an_estate(engine)
        engine.forget("t", parent)
        kept, _ = await an_estate(engine, 12)
        let_go = hold(runner)
        coming = asyncio.create_task(engine.import_estate("t", estate, 600))
        leaving = asyncio.create_task(engine.export_estate("t", kept))
        await until(lambda: engine._device._num_transfers == 2)
        coming.cancel()
        leaving.cancel()
        done = await asyncio.gather(coming, leaving, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in done)
        engine.forget("t", kept)
        assert engine.load().used_blocks == 0 and engine.load().retention_charged == 0
        let_go()
        crowd = [request([9, i] * 10, params(20)) for i in range(8)]  # in the blocks that are still written
        for one, answer in zip(crowd, await ask_all(engine, crowd), strict=True):
            assert answer.token_ids[0] == expected_tokens(one.prompt_token_ids, 20)


@pytest.mark.parametrize("dies", [True, False])
async def test_the_engine_ends_meanwhile(dies: bool) -> None:
    async with running(SETUP) as (engine, runner):
        parent, estate = await an_estate(engine)
        engine.forget("t", parent)
        kept, _ = await an_estate(engine, 12)
        let_go = hold(runner)
        tasks = [
            asyncio.create_task(engine.import_estate("t", estate, 600)),
            asyncio.create_task(engine.export_estate("t", kept)),
        ]
        await until(lambda: engine._device._num_transfers == 2)
        if dies:
            engine._die(RuntimeError("the device fell off the bus"))
        else:
            asyncio.get_running_loop().call_later(0.05, let_go)
            await engine.stop()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, EngineError) for one in done)
        let_go()
        with pytest.raises(EngineError) as refused:
            await engine.export_estate("t", kept)
        assert isinstance(refused.value, EngineDead) == dies
        engine.forget("t", kept)


async def test_answers_stay_as_they_are() -> None:
    """An estate that is read changes nothing for its owner."""
    async with running(SETUP) as (engine, _):
        parent, _ = await an_estate(engine)
        before = engine.record("t", parent)
        estates = await asyncio.gather(*(engine.export_estate("t", parent) for _ in range(5)))
        assert engine.record("t", parent) == before
        assert len({to_bytes(estate) for estate in estates}) == 1
        answer: Answer = await ask(engine, child_of(engine, parent, [5]))
        assert answer.inheritance is not None and answer.inheritance.computed_tokens == 2
        engine.forget("t", parent)
