"""Continuation over the paged fake: what a child inherits, from whom, and what it costs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import (
    InsufficientRetention,
    NameInUse,
    ParentExpired,
    ParentFailed,
    ParentNotFound,
    RetentionTooLarge,
)
from bequest.engine.types import Lineage, Request, Retain, SamplingParams
from tests.engine.harness import Answer, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import expected_tokens

BASE = Setup(num_blocks=200, block_size=4, num_lease_blocks=90, num_host_blocks=60)


def params(count: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **fields)  # type: ignore[arg-type]


def child_of(
    engine: AsyncEngine, parent: str, suffix: list[int], count: int = 5, at: int | None = None, **fields: object
) -> Request:
    """A continuation as the server makes one: the parent's tokens, the new ones, and where they part."""
    choice = int(fields.pop("choice", 0))  # type: ignore[call-overload]
    known = engine.parent("t", parent).choices[choice]
    at = known.shown_len if at is None else at
    return request([*known.token_ids[:at], *suffix], params(count), lineage=Lineage(parent, choice, at), **fields)


async def parent_of(engine: AsyncEngine, length: int = 21, count: int = 6, **fields: object) -> Answer:
    return await ask(engine, request(list(range(30, 30 + length)), params(count), **fields))


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("retain", [None, Retain(60)])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 30])
async def test_a_child_computes_its_suffix_and_one_token(length: int, retain: Retain | None, pipelined: bool) -> None:
    async with running(Setup(num_lease_blocks=90, num_host_blocks=60, pipelined=pipelined)) as (engine, runner):
        for suffix in ([], [7], [7, 8, 9, 10, 11]):
            first = await parent_of(engine, length, retain=retain)
            before = runner.num_tokens
            asked = child_of(engine, first.id, suffix)
            second = await ask(engine, asked)
            assert second.token_ids[0] == expected_tokens(asked.prompt_token_ids, 5)
            assert second.inheritance is not None
            assert second.inheritance.source == "blocks"
            assert second.inheritance.computed_tokens == len(suffix) + 1
            assert second.inheritance.inherited_tokens == len(asked.prompt_token_ids) - len(suffix) - 1
            assert runner.num_tokens - before <= len(suffix) + 1 + 5 + pipelined
            engine.forget("t", first.id)


async def test_a_branch_computes_its_suffix() -> None:
    async with running(BASE) as (engine, _):
        first = await parent_of(engine)
        for at in range(1, 28):
            asked = child_of(engine, first.id, [9, 9], at=at)
            second = await ask(engine, asked)
            assert second.inheritance is not None and second.inheritance.source == "blocks"
            assert second.inheritance.computed_tokens == (2 if at < 27 else 3)
            assert second.token_ids[0] == expected_tokens(asked.prompt_token_ids, 5)


async def test_a_child_with_nothing_of_its_parent_is_a_recompute() -> None:
    """Of a parent that is there, and of one that is not; whatever the prefix index saves."""
    async with running(BASE) as (engine, _):
        first = await parent_of(engine)
        for parent in (first.id, "gone"):
            asked = request(list(range(30, 50)), params(5), lineage=Lineage(parent, 0, 0))
            second = await ask(engine, asked)
            assert second.token_ids[0] == expected_tokens(asked.prompt_token_ids, 5)
            assert second.inheritance is not None and second.inheritance.source == "recompute"
            assert second.inheritance.inherited_tokens + second.inheritance.computed_tokens == 20


async def test_a_prompt_alone_can_be_leased() -> None:
    async with running(BASE) as (engine, _):
        first = await ask(engine, request(list(range(40, 61)), params(0), retain=Retain(60)))
        assert first.retained is not None and first.retained.tokens == 21 and first.retained.blocks == 6
        for suffix, computed in (([], 1), ([3], 1), ([3, 4], 2)):
            second = await ask(engine, child_of(engine, first.id, suffix))
            assert second.inheritance is not None and second.inheritance.computed_tokens == computed
        engine.forget("t", first.id)


async def test_every_choice_can_be_continued() -> None:
    async with running(BASE) as (engine, _):
        sampled = SamplingParams(max_tokens=7, n=3, seed=4, ignore_eos=True)
        first = await ask(engine, request(range(50, 63), sampled, retain=Retain(60)))
        entry = engine.record("t", first.id)
        assert entry.grade == "leased" and [c.tokens for c in entry.choices] == [20] * 3
        assert all(c.shared_blocks == 3 for c in entry.choices)
        for choice in range(3):
            asked = child_of(engine, first.id, [5], choice=choice)
            assert list(asked.prompt_token_ids[13:20]) == first.token_ids[choice]
            second = await ask(engine, asked)
            assert second.token_ids[0] == expected_tokens(asked.prompt_token_ids, 5)
            assert second.inheritance is not None and second.inheritance.computed_tokens == 2
        engine.forget("t", first.id)


async def test_a_running_parent_can_be_branched_from() -> None:
    async with running(BASE) as (engine, _):
        stream = engine.generate(parent := request([80, 81, 82], params(60)))
        seen = 0
        children = []
        async for delta in stream:
            seen += sum(len(c.token_ids) for c in delta.choices)
            if seen in (3, 10, 30):
                children.append(child_of(engine, parent.id, [6]))
                answers = await ask_all(engine, children[-1:])
                inheritance = answers[0].inheritance
                assert inheritance is not None and inheritance.source == "blocks"
                assert inheritance.computed_tokens <= 2
                assert answers[0].token_ids[0] == expected_tokens(children[-1].prompt_token_ids, 5)
        assert len(children) == 3 and seen == 60


async def test_a_child_may_wait_for_the_end_of_its_parent() -> None:
    async with running(BASE) as (engine, _):
        asking = asyncio.ensure_future(ask(engine, parent := request([80, 81, 82], params(40))))
        await asyncio.sleep(0)
        ended = await engine.parent_ended("t", parent.id, None)
        assert not ended.running and len(ended.choices[0].token_ids) == 43
        assert list(ended.choices[0].token_ids[3:]) == (await asking).token_ids[0]


async def test_a_lease_survives_what_turns_the_cache_over() -> None:
    setup = Setup(num_blocks=60, block_size=4, num_lease_blocks=20, num_host_blocks=31, max_model_len=150)
    async with running(setup) as (engine, runner):
        leased = [await parent_of(engine, 17 + i, retain=Retain(600)) for i in range(4)]
        for i in range(30):
            await ask_all(engine, [request([100 + i, j, *range(60)], params(40)) for j in range(4)])
        assert runner.num_swapped_out > 0
        for first in leased:
            second = await ask(engine, asked := child_of(engine, first.id, [1, 2]))
            assert second.inheritance is not None and second.inheritance.source in ("blocks", "host")
            assert second.inheritance.computed_tokens == 3
            assert second.token_ids[0] == expected_tokens(asked.prompt_token_ids, 5)
            engine.forget("t", first.id)


async def test_fallbacks_in_order() -> None:
    """Without a lease: blocks while they are there, the prefix index's, then everything anew."""
    setup = Setup(num_blocks=40, block_size=4, max_model_len=100)
    async with running(setup) as (engine, _):
        first = await parent_of(engine, 29, 4)
        kept = engine.record("t", first.id)
        assert kept.grade == "warm" and kept.choices[0].blocks == 8
        for i in range(8):
            await ask(engine, request([200 + i, *range(60)], params(10)))
        assert engine.record("t", first.id).grade == "tokens"
        second = await ask(engine, child_of(engine, first.id, [1]))
        assert second.inheritance is not None
        assert second.inheritance.source == "recompute" and second.inheritance.computed_tokens == 34
        # Now an equal prefix is in the index again, under other blocks.
        third = await ask(engine, child_of(engine, first.id, [2]))
        assert third.inheritance is not None and third.inheritance.source == "prefix_cache"
        assert third.inheritance.computed_tokens <= 2


async def test_a_lease_that_cannot_be_honoured_is_refused_at_once() -> None:
    setup = Setup(num_blocks=60, block_size=4, num_lease_blocks=10, num_host_blocks=6)
    async with running(setup) as (engine, _):
        with pytest.raises(RetentionTooLarge) as too_large:
            await ask(engine, request(range(50), params(20), retain=Retain(5)))
        assert too_large.value.details == {"budget": 15, "needed": 18}
        first = await ask(engine, request(range(20), params(8), retain=Retain(60)))
        with pytest.raises(InsufficientRetention) as full:
            await ask(engine, request(range(30), params(10), retain=Retain(60)))
        assert full.value.details["used_blocks"] == 7 and full.value.details["needed_blocks"] == 10
        assert first.retained is not None
        assert full.value.details["earliest_expiry"] == first.retained.expires_at
        # A child pays only for what it does not share.
        child = await ask(engine, child_of(engine, first.id, [1, 2], retain=Retain(60)))
        assert child.retained is not None and engine.load().retention_charged <= 11
        engine.forget("t", first.id)
        engine.forget("t", child.id)
        assert engine.load().retention_charged == 0


async def test_an_open_ended_lease_grows_until_the_budget_ends() -> None:
    setup = Setup(num_blocks=2000, block_size=4, num_lease_blocks=650, max_model_len=4000)
    async with running(setup) as (engine, _):
        open_ended = Retain(60, open_ended=True)
        grown = await ask(engine, request([9], params(1500), retain=open_ended))
        assert grown.retained is not None and grown.retained.tokens == 1501
        outgrown = await ask(engine, request([8], params(1200), retain=open_ended))
        assert outgrown.retained is None and "outgrew" in (outgrown.retention_lost or "")
        assert engine.record("t", outgrown.id).grade == "warm"
        engine.forget("t", grown.id)


async def test_names_are_unique_among_what_is_retained() -> None:
    async with running(BASE) as (engine, _):
        first = await parent_of(engine, name="mine")
        with pytest.raises(NameInUse) as taken:
            await parent_of(engine, name="mine")
        assert taken.value.details == {"id": first.id, "status": "retained"}
        assert engine.parent("t", "mine").id == first.id
        await parent_of(engine, name="mine", tenant="other")
        engine.forget("t", "mine")
        second = await parent_of(engine, name="mine")
        assert engine.parent("t", "mine").id == second.id


async def test_an_aborted_request_leaves_what_it_computed_and_gives_its_name_back() -> None:
    async with running(BASE) as (engine, _):
        stream = engine.generate(asked := request([70, 71, 72], params(100), name="mine", retain=Retain(60)))
        async for delta in stream:
            if delta.choices and len(engine.parent("t", asked.id).choices[0].token_ids) > 20:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        assert engine.load().retention_charged == 0
        child = await ask(engine, child := child_of(engine, "mine", [4]))  # type: ignore[assignment]
        assert child.inheritance is not None and child.inheritance.source == "blocks"
        await parent_of(engine, name="mine")


async def test_the_name_of_an_ended_request_is_freed() -> None:
    async with running(BASE) as (engine, _):
        first = await parent_of(engine, name="mine")
        engine.free_name("other", "mine")
        with pytest.raises(NameInUse):
            await parent_of(engine, name="mine")
        engine.free_name("t", first.id)
        second = await parent_of(engine, name="mine")
        assert engine.parent("t", "mine").id == second.id and engine.parent("t", first.id).id == first.id


async def test_a_request_that_never_ran_cannot_be_continued() -> None:
    async with running(Setup(max_num_seqs=1)) as (engine, _):
        running_one = asyncio.ensure_future(ask(engine, request([7], params(50))))
        await asyncio.sleep(0)
        engine.submit(queued := request([8], params(5)), lambda _: None)
        engine.abort(queued.id)
        with pytest.raises(ParentFailed):
            engine.parent("t", queued.id)
        await running_one


async def test_tenants_do_not_see_each_other() -> None:
    async with running(BASE) as (engine, _):
        first = await parent_of(engine, name="mine")
        messages = []
        for reference in (first.id, "mine", "nothing"):
            with pytest.raises(ParentNotFound) as unknown:
                engine.parent("other", reference)
            messages.append(str(unknown.value).replace(reference, "…"))
        assert len(set(messages)) == 1
        assert engine.records("other") == []


async def test_what_is_not_to_be_kept_is_not() -> None:
    async with running(BASE) as (engine, _):
        first = await parent_of(engine, keep_record=False)
        with pytest.raises(ParentNotFound):
            engine.parent("t", first.id)


async def test_records_without_a_lease_are_bounded() -> None:
    async with running(Setup(max_records=3)) as (engine, _):
        answers = [await parent_of(engine) for _ in range(5)]
        with pytest.raises(ParentExpired):
            engine.parent("t", answers[0].id)
        assert [entry.id for entry in engine.records("t")] == [answer.id for answer in answers[2:]]


async def test_a_lease_ends_with_its_time() -> None:
    async with running(BASE) as (engine, _):
        first = await parent_of(engine, retain=Retain(0.25))
        assert engine.record("t", first.id).grade == "leased"
        await until(lambda: engine.load().retention_charged == 0)
        with pytest.raises(ParentExpired):
            engine.parent("t", first.id)
        assert engine.load().retention_charged == 0 and engine.load().used_blocks == 0


async def test_a_lease_can_be_given_prolonged_and_ended() -> None:
    async with running(BASE) as (engine, _):
        first = await parent_of(engine)
        entry = engine.set_ttl("t", first.id, 60)
        assert entry.grade == "leased" and entry.expires_at is not None and engine.load().used_blocks == 7
        prolonged = engine.set_ttl("t", first.id, 600)
        assert prolonged.expires_at is not None and prolonged.expires_at > entry.expires_at + 500
        assert engine.set_ttl("t", first.id, None).grade == "warm"
        assert engine.load().used_blocks == 0 and engine.load().retention_charged == 0
        second = await ask(engine, child_of(engine, first.id, [1]))
        assert second.inheritance is not None and second.inheritance.computed_tokens == 2


async def test_a_lease_stays_for_the_children_it_let_in() -> None:
    async with running(Setup(num_lease_blocks=90, max_num_seqs=1)) as (engine, _):
        first = await parent_of(engine, retain=Retain(60))
        busy = asyncio.ensure_future(ask(engine, request([1], params(30))))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(ask(engine, child_of(engine, first.id, [3])))
        await asyncio.sleep(0)
        engine.forget("t", first.id)
        second = await waiting
        assert second.inheritance is not None and second.inheritance.computed_tokens == 2
        await busy
        assert engine.load().used_blocks == 0


async def test_a_cheap_continuation_passes_a_long_prompt() -> None:
    async with running(Setup(num_blocks=400, chunk=8, max_num_seqs=4)) as (engine, runner):
        first = await parent_of(engine)
        runner.gate, runner.hold_from = threading.Event(), runner.num_steps + 3
        order: list[str] = []

        async def noted(asked: Request, name: str) -> None:
            await ask(engine, asked)
            order.append(name)

        long = asyncio.ensure_future(noted(request(range(300), params(1)), "long"))
        await until(lambda: engine.load().running)
        short = asyncio.ensure_future(noted(child_of(engine, first.id, [3], count=2), "child"))
        await asyncio.sleep(0)
        runner.gate.set()
        await asyncio.gather(long, short)
        assert order == ["child", "long"]
