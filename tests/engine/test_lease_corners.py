"""Leases and parents at the edges of their life: engines that die, records that fail, times that change."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineDraining,
    EngineError,
    InsufficientRetention,
    InternalError,
    ParentFailed,
    ParentNotFound,
)
from bequest.engine.inheritance.budget import LeaseBudget
from bequest.engine.types import Delta, Lineage, Request, Retain, SamplingParams
from tests.engine.harness import Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import expected_tokens

BASE = Setup(num_blocks=200, block_size=4, num_lease_blocks=90, num_host_blocks=60)


def params(count: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **fields)  # type: ignore[arg-type]


def child_of(engine: AsyncEngine, parent: str, suffix: list[int], count: int = 5, choice: int = 0) -> Request:
    tokens = engine.parent("t", parent).choices[choice].token_ids
    return request([*tokens, *suffix], params(count), lineage=Lineage(parent, choice, len(tokens)))


async def test_continuations_and_requests_of_the_same_urgency_wait_side_by_side() -> None:
    """A continuation passes 64 arrivals: it then stands exactly where another one stands."""
    async with running(Setup(max_num_seqs=1)) as (engine, runner):
        first = await ask(engine, request(range(20), params(3)))
        runner.gate = threading.Event()
        asked = [request([100 + i], params(1)) for i in range(70)]
        asked += [child_of(engine, first.id, [i], 1) for i in range(70)]
        answering = asyncio.ensure_future(ask_all(engine, asked))
        await until(lambda: engine.num_open == 140)
        runner.gate.set()
        for one, answer in zip(asked, await answering, strict=True):
            assert answer.token_ids[0] == expected_tokens(one.prompt_token_ids, 1)


# --- waiting for a parent -----------------------------------------------------------------------------------------


async def waiting_child(engine: AsyncEngine, parent: Request, deadline: float | None = None) -> asyncio.Future:
    """Somebody waits for the end of a parent that has begun."""
    deltas: list[Delta] = []
    engine.submit(parent, deltas.append)
    await until(lambda: deltas)
    waiting = asyncio.ensure_future(engine.parent_ended("t", parent.id, deadline))
    await asyncio.sleep(0)
    assert not waiting.done()
    return waiting


async def test_who_waits_for_a_parent_hears_of_the_engine_s_death() -> None:
    async with running(BASE) as (engine, runner):
        runner.hold_from, runner.gate = 4, threading.Event()
        waiting = await waiting_child(engine, request([7], params(100), retain=Retain(60)))
        runner.fail_at = runner.num_steps + 1
        runner.gate.set()
        with pytest.raises(EngineDead):
            await asyncio.wait_for(waiting, 5)


async def test_who_waits_for_a_parent_hears_of_a_stop() -> None:
    async with running(BASE) as (engine, runner):
        runner.hold_from, runner.gate = 4, threading.Event()
        waiting = await waiting_child(engine, request([7], params(100)))
        stopping = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0)
        runner.gate.set()
        await stopping
        ended = await asyncio.wait_for(waiting, 5)
        assert not ended.running
        with pytest.raises(EngineDraining):
            await ask(engine, request([*ended.choices[0].token_ids, 3], params(2)))


async def test_who_waits_for_a_parent_hears_of_its_deadline_its_abort_and_its_deletion() -> None:
    async with running(BASE) as (engine, runner):
        runner.hold_from, runner.gate = 4, threading.Event()
        slow = request([7], params(100))
        late = await waiting_child(engine, slow, time.monotonic() + 0.02)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(late, 5)
        aborted = asyncio.ensure_future(engine.parent_ended("t", slow.id, None))
        await asyncio.sleep(0)
        engine.abort(slow.id)
        assert not (await asyncio.wait_for(aborted, 5)).running
        runner.gate.set()
        deleted = request([8], params(30))
        waiting = await waiting_child(engine, deleted)
        engine.forget("t", deleted.id)
        with pytest.raises(ParentNotFound):
            await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("where", ["try_swap_out", "settle", "place", "end_plan"])
async def test_an_engine_that_dies_in_the_middle_of_a_plan_answers_everybody(where: str) -> None:
    setup = Setup(num_blocks=40, num_lease_blocks=10, num_host_blocks=60, max_model_len=110)
    engine_errors: list[BaseException] = []

    def broken(*_: object) -> object:
        raise RuntimeError("the plan fell apart")

    async with running(setup) as (engine, _):
        lease = await ask(engine, request(range(30), params(5), retain=Retain(60)))
        stream = engine.generate(slow := request([7], params(100)))
        await anext(stream)
        waiting = asyncio.ensure_future(engine.parent_ended("t", slow.id, None))
        await asyncio.sleep(0)
        setattr(engine.scheduler.cache, where, broken)
        asked = [request([50 + i] * 20, params(80)) for i in range(8)] + [child_of(engine, lease.id, [1])]
        answers = await asyncio.wait_for(
            asyncio.gather(*(ask(engine, one) for one in asked), waiting, return_exceptions=True), 10
        )
        assert all(isinstance(answer, EngineDead) for answer in answers)
        engine_errors.append(await engine.wait_dead())
        engine.scheduler.check_idle = lambda: None  # type: ignore[method-assign]  # a broken plan may lose blocks
    assert isinstance(engine_errors[0], RuntimeError)


# --- records that fail --------------------------------------------------------------------------------------------


async def test_nobody_inherits_from_a_parent_that_ran_into_nan() -> None:
    async with running(BASE) as (engine, runner):
        runner.bad_prompt_token = 666
        bad = request([5, 6, 666, 8, 9], params(9), retain=Retain(60), name="bad")
        with pytest.raises(InternalError):
            await ask(engine, bad)
        assert engine.load().retention_charged == engine.load().used_blocks == 0
        for refused in (lambda: engine.parent("t", bad.id), lambda: engine.set_ttl("t", bad.id, 5.0)):
            with pytest.raises(ParentFailed):
                refused()
        runner.bad_prompt_token = None
        child = await ask(engine, request([5, 6, 666, 8, 9, 1], params(4), lineage=Lineage(bad.id, 0, 5)))
        assert child.inheritance is not None
        assert (child.inheritance.source, child.inheritance.computed_tokens) == ("recompute", 6)


async def test_a_request_that_never_ran_cannot_be_leased_and_can_be_forgotten() -> None:
    async with running(Setup(num_lease_blocks=90, max_num_seqs=1)) as (engine, _):
        busy = asyncio.ensure_future(ask(engine, request([7], params(50))))
        await asyncio.sleep(0)
        engine.submit(queued := request([8], params(5), retain=Retain(0.01)), lambda _: None)
        engine.abort(queued.id)
        with pytest.raises(ParentFailed):
            engine.set_ttl("t", queued.id, 60)
        engine.forget("t", queued.id)
        # The timer of leases and deadlines still runs.
        short = await ask(engine, request([9], params(3), retain=Retain(0.02)))
        await busy
        await until(lambda: engine.load().retention_charged == 0)
        with pytest.raises(ParentNotFound):
            engine.parent("t", short.id)


# --- times that change --------------------------------------------------------------------------------------------


async def test_a_running_request_is_leased_with_the_choices_that_have_ended() -> None:
    """Two choices end at different tokens; between the two their owner asks for a lease."""
    seeds = range(200)
    sampled = [(s, [expected_tokens([30] * 9, 60, seed=s, choice=c, greedy=False) for c in (0, 1)]) for s in seeds]
    stop, seed = next(
        (tokens[0][3], s)
        for s, tokens in sampled
        if tokens[0][3] not in tokens[1][:40] and tokens[0][3] not in tokens[0][:3]
    )
    async with running(BASE) as (engine, runner):
        runner.hold_from, runner.gate = 12, threading.Event()
        asked = request(
            [30] * 9, SamplingParams(max_tokens=40, n=2, seed=seed, stop_token_ids=frozenset({stop}), ignore_eos=True)
        )
        answering = asyncio.ensure_future(ask(engine, asked))
        await until(lambda: 0 in getattr(engine.retention.get("t", asked.id), "kept", {}))
        assert engine.set_ttl("t", asked.id, 60).grade == "running"
        assert engine.load().retention_charged == 2 + 2 * 11
        runner.gate.set()
        answer = await answering
        assert len(answer.token_ids[0]) == 4 and len(answer.token_ids[1]) == 40
        record = engine.retention.find("t", asked.id)
        assert record.leased and all(kept.table is not None for kept in record.kept.values())
        assert engine.load().retention_charged == record.num_held_blocks() == 2 + 1 + 10
        for choice in (0, 1):
            second = await ask(engine, child := child_of(engine, asked.id, [4], choice=choice))
            assert second.inheritance is not None and second.inheritance.computed_tokens == 2
            assert second.token_ids[0] == expected_tokens(child.prompt_token_ids, 5)
        engine.forget("t", asked.id)


async def test_what_was_reused_cannot_be_leased_any_more() -> None:
    setup = Setup(num_blocks=40, block_size=4, num_lease_blocks=10, max_model_len=100)
    async with running(setup) as (engine, _):
        first = await ask(engine, request(range(40, 69), params(4)))
        for i in range(8):
            await ask(engine, request([200 + i, *range(60)], params(10)))
        with pytest.raises(InsufficientRetention) as broken:
            engine.set_ttl("t", first.id, 60)
        details = {"budget_blocks": 10, "used_blocks": 0, "needed_blocks": 9, "earliest_expiry": None}
        assert (broken.value.field, broken.value.details) == ("ttl", details)
        assert engine.load().retention_charged == engine.load().used_blocks == 0


async def test_a_lease_that_ends_stays_for_a_child_that_was_let_in() -> None:
    async with running(Setup(num_lease_blocks=90, max_num_seqs=1)) as (engine, runner):
        first = await ask(engine, request(range(21), params(6), retain=Retain(0.05)))
        runner.hold_from, runner.gate = runner.num_steps + 2, threading.Event()
        busy = asyncio.ensure_future(ask(engine, request([1], params(30))))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(ask(engine, child_of(engine, first.id, [3])))
        await until(lambda: engine.retention.get("t", first.id) is None)
        runner.gate.set()
        second = await waiting
        assert second.inheritance is not None
        assert (second.inheritance.source, second.inheritance.computed_tokens) == ("blocks", 2)
        await busy
        assert engine.load().used_blocks == engine.load().retention_charged == 0


async def test_prolonged_and_ended_leases_leave_nothing_behind() -> None:
    async with running(BASE) as (engine, _):
        leases = engine.retention.leases
        kept = await ask(engine, request(range(9), params(2), retain=Retain(600)))
        for i in range(300):
            engine.set_ttl("t", kept.id, 600 + i)
        for _ in range(100):
            short = await ask(engine, request(range(9), params(1), retain=Retain(600)))
            engine.forget("t", short.id)
        assert len(leases._expiries) < 100
        assert leases.next_expiry() == engine.retention.find("t", kept.id).lease.expires_at
        engine.forget("t", kept.id)


async def test_an_open_ended_lease_is_never_charged_for_more_than_it_can_become() -> None:
    setup = Setup(num_blocks=2000, block_size=4, num_lease_blocks=276, max_model_len=4000)
    async with running(setup) as (engine, _):
        grown = await ask(engine, request([9], params(1100), retain=Retain(60, open_ended=True)))
        assert grown.retained is not None and grown.retained.tokens == 1101 and grown.retained.blocks == 275
        engine.forget("t", grown.id)


async def test_log_probabilities_of_an_inherited_prompt_are_all_there() -> None:
    async with running(BASE) as (engine, _):
        first = await ask(engine, request(range(40, 61), params(4), retain=Retain(60)))
        child = child_of(engine, first.id, [3, 4])
        wants = request(child.prompt_token_ids, params(2, prompt_logprobs=1), lineage=child.terms.lineage)
        (delta, *_) = [delta async for delta in engine.generate(wants)]
        assert delta.prompt_logprobs is not None
        assert [p.token_id for p in delta.prompt_logprobs[1:] if p] == list(child.prompt_token_ids[1:])
        engine.forget("t", first.id)


async def test_choices_of_a_prompt_alone_share_it() -> None:
    async with running(BASE) as (engine, _):
        first = await ask(engine, request(range(18), params(0, n=3), retain=Retain(60)))
        assert first.retained is not None and (first.retained.tokens, first.retained.blocks) == (18, 5)
        for choice in range(3):
            second = await ask(engine, child := child_of(engine, first.id, [], choice=choice))
            assert second.inheritance is not None and second.inheritance.computed_tokens == 1
            assert second.token_ids[0] == expected_tokens(child.prompt_token_ids, 5)
        engine.forget("t", first.id)
        assert engine.load().used_blocks == 0


async def test_engines_with_leases_stop_and_die_cleanly() -> None:
    for dies in (False, True):
        async with running(BASE) as (engine, runner):
            await ask(engine, request(range(18), params(4), retain=Retain(60)))
            open_ones = [asyncio.ensure_future(ask(engine, request([i], params(90), retain=Retain(9)))) for i in (1, 2)]
            await until(lambda engine=engine: engine.load().running == 2)
            if dies:
                runner.fail_at = runner.num_steps + 1
            else:
                await engine.stop()
            for one in open_ones:
                with suppress(EngineError):
                    await asyncio.wait_for(one, 5)
            assert engine.retention.leases.budget.num_promised == 0


@pytest.mark.parametrize("retain", [None, Retain(60)])
async def test_a_child_inherits_only_the_tokens_it_has_in_common_with_its_parent(retain: Retain | None) -> None:
    """Its tokens were read off a parent whose choices have changed places since."""
    async with running(BASE) as (engine, _):
        first = await ask(engine, request(range(40, 61), params(6), retain=retain))
        tokens = [*engine.parent("t", first.id).choices[0].token_ids]
        for differs_at in (0, 7, 8, 20, 26):
            prompt = [*tokens[:differs_at], 1, *tokens[differs_at + 1 :]]
            asked = request(prompt, params(5), lineage=Lineage(first.id, 0, len(tokens)), retain=retain)
            answer = await ask(engine, asked)
            assert answer.token_ids[0] == expected_tokens(prompt, 5)
            assert answer.inheritance is not None and answer.inheritance.inherited_tokens <= differs_at
            if retain is not None:
                second = await ask(engine, child := child_of(engine, asked.id, [2]))
                assert second.token_ids[0] == expected_tokens(child.prompt_token_ids, 5)
                engine.forget("t", asked.id)
        if retain is not None:
            engine.forget("t", first.id)


def test_a_full_budget_tells_nothing_of_others() -> None:
    budget = LeaseBudget(10, 10, None)
    budget.open_lease("other", 8, 8, lambda tenant: None)
    budget.open_lease("mine", 1, 1, lambda tenant: None)
    with pytest.raises(InsufficientRetention) as full:
        budget.open_lease("mine", 5, 5, {"mine": 12.5, "other": 7.0}.get)
    assert full.value.reason == "leases_full"
    details = {"budget_blocks": 10, "used_blocks": 1, "needed_blocks": 5, "earliest_expiry": 12.5}
    assert full.value.details == details
