"""Recurrent layers over the paged fake: every sequence goes on from a state of its own tokens, whatever happens."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from bequest.engine.errors import InsufficientRetention, InvalidRequest, RetentionTooLarge
from bequest.engine.types import BeamParams, Lineage, Retain, SamplingParams
from bequest.engine.types.hidden import HiddenStatesParams
from bequest.engine.types.recurrent import StateSizes
from tests.engine.drafters import OracleDrafter
from tests.engine.harness import Setup, ask, ask_all, request, running
from tests.engine.paged_fake import expected_tokens
from tests.engine.test_differential import check, crowd, crowd_size
from tests.engine.test_scoring import SCORED, histories

STATES = StateSizes(num_slots=120, num_lease_slots=60, interval=24)
FEW = StateSizes(num_slots=36, num_lease_slots=4, interval=8)


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("num_blocks", [400, 42], ids=["ample", "tiny"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100_000])
@pytest.mark.parametrize("states", [STATES, FEW], ids=["many", "few"])
async def test_tokens_equal_the_oracle_alone_and_in_a_crowd(
    states: StateSizes, chunk: int, num_blocks: int, pipelined: bool
) -> None:
    setup = Setup(num_blocks, chunk=chunk, pipelined=pipelined, max_model_len=160, states=states, num_host_blocks=60)
    jobs = crowd(seed=chunk, count=crowd_size(chunk))
    async with running(setup) as (engine, _):
        for prompt, params in jobs[:4]:
            check(prompt, params, (await ask(engine, request(prompt, params))).token_ids)
        answers = await ask_all(engine, [request(*job) for job in jobs])
        for (prompt, params), answer in zip(jobs, answers, strict=True):
            check(prompt, params, answer.token_ids)


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("num_blocks", [400, 42], ids=["ample", "tiny"])
@pytest.mark.parametrize("truth", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("states", [STATES, FEW], ids=["many", "few"])
async def test_drafts_change_no_token(states: StateSizes, truth: float, num_blocks: int, pipelined: bool) -> None:
    """The fake compares each state with the tokens that a sequence's blocks hold."""
    drafter = OracleDrafter(3, truth)
    setup = Setup(
        num_blocks, pipelined=pipelined, max_model_len=160, states=states, num_host_blocks=60, drafter=drafter
    )
    jobs = crowd(seed=int(10 * truth), count=24)
    async with running(setup) as (engine, _):
        for prompt, params in jobs[:4]:
            check(prompt, params, (await ask(engine, request(prompt, params))).token_ids)
        answers = await ask_all(engine, [request(*job) for job in jobs])
        for (prompt, params), answer in zip(jobs, answers, strict=True):
            check(prompt, params, answer.token_ids)
    assert drafter.num_right + drafter.num_wrong > 50


@pytest.mark.parametrize("stops_at", [None, 6, 7, 8, 9])
async def test_a_child_of_a_drafted_parent_computes_its_suffix_and_one_token(stops_at: int | None) -> None:
    """Wherever among the drafts that were right the parent has ended."""
    drafter = OracleDrafter(2, 1.0, most=9)
    async with running(Setup(states=STATES, num_lease_blocks=60, drafter=drafter)) as (engine, _):
        whole = expected_tokens(prompt(30), 10)
        ends = frozenset() if stops_at is None else frozenset({whole[stops_at]})
        params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, stop_token_ids=ends)
        parent = await ask(engine, request(prompt(30), params, retain=Retain(60)))
        tokens = [*prompt(30), *parent.token_ids[0]]
        child = await ask(engine, request([*tokens, 7, 8], PARAMS, lineage=Lineage(parent.id, 0, len(tokens))))
        assert child.inheritance is not None and child.inheritance.computed_tokens == 3
        assert child.token_ids[0] == expected_tokens([*tokens, 7, 8], 10)
        assert drafter.num_right > 0
        engine.forget("t", parent.id)


async def test_who_comes_has_room_beside_drafts() -> None:
    """Drafts may have all spare slots: they are given back to a request that waits for them."""
    some = StateSizes(num_slots=16, num_lease_slots=8, interval=8)
    drafter = OracleDrafter(2, 1.0, most=9)
    params = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    async with running(Setup(states=some, drafter=drafter, max_num_seqs=4, max_model_len=160)) as (engine, _):
        long = asyncio.create_task(ask(engine, request(prompt(9), params)))
        for _ in range(5):
            await asyncio.sleep(0)
        several = SamplingParams(max_tokens=3, n=3, temperature=0, ignore_eos=True)
        answer = await ask(engine, request(prompt(5, seed=1), several))
        assert not long.done() and answer.token_ids[2] == expected_tokens(prompt(5, seed=1), 3)
        assert (await long).token_ids[0] == expected_tokens(prompt(9), 120)
        assert drafter.num_right > 20


async def test_as_much_is_drafted_as_there_are_slots_for() -> None:
    """Neither leases nor running sequences lose a slot by it."""
    few = StateSizes(num_slots=8, num_lease_slots=4, interval=8)  # of which a running sequence counts on two
    drafter = OracleDrafter(2, 1.0, most=9)
    async with running(Setup(states=few, drafter=drafter, max_num_seqs=1)) as (engine, runner):
        answer = await ask(engine, request(prompt(9), SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)))
        assert answer.token_ids[0] == expected_tokens(prompt(9), 60)
        assert runner.num_steps > 60 / 3


PARAMS = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 900) for _ in range(length)]


async def test_an_equal_prompt_starts_at_its_last_whole_block() -> None:
    async with running(Setup(states=STATES)) as (engine, _):
        await ask(engine, request(prompt(50), PARAMS))
        again = await ask(engine, request(prompt(50), PARAMS))
        other_end = await ask(engine, request([*prompt(50)[:49], 5, 6, 7], PARAMS))
        assert again.usage is not None and again.usage.cached_tokens == 48
        assert other_end.usage is not None and other_end.usage.cached_tokens == 48


async def test_a_common_beginning_starts_at_the_interval() -> None:
    async with running(Setup(states=STATES)) as (engine, _):
        await ask(engine, request(prompt(100), PARAMS))
        other = await ask(engine, request([*prompt(100)[:60], *prompt(9, seed=1)], PARAMS))
        assert other.usage is not None and other.usage.cached_tokens == 48  # two intervals of 24


@pytest.mark.parametrize("retain", [None, Retain(60)], ids=["warm", "leased"])
@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
async def test_a_child_at_the_end_computes_its_suffix_and_one_token(retain: Retain | None, pipelined: bool) -> None:
    async with running(Setup(states=STATES, num_lease_blocks=60, pipelined=pipelined)) as (engine, _):
        parent = await ask(engine, request(prompt(30), PARAMS, retain=retain))
        tokens = [*prompt(30), *parent.token_ids[0]]
        child = await ask(engine, request([*tokens, 7, 8], PARAMS, lineage=Lineage(parent.id, 0, len(tokens))))
        assert child.inheritance is not None and child.inheritance.computed_tokens == 3
        for at in (12, 24, 30, 35):
            branch = request([*tokens[:at], 9], PARAMS, lineage=Lineage(parent.id, 0, at))
            answer = await ask(engine, branch)
            assert answer.inheritance is not None
            assert answer.inheritance.computed_tokens == 1 + at - (0 if at < 24 else 24 if at < 28 else 28)
        full, states = engine.record("t", parent.id).groups
        assert (full.kind, states.kind) == ("full", "state")
        assert (states.blocks > 0) == (retain is not None), "those that a lease holds"
        assert states.num_bytes == states.blocks * engine.block_layout.state_bytes
        if retain is not None:
            engine.forget("t", parent.id)


async def test_leases_keep_their_states_from_a_crowd() -> None:
    """More states come than there are slots: what is leased stays, what is warm goes."""
    states = StateSizes(num_slots=44, num_lease_slots=8, interval=24)
    async with running(Setup(states=states, num_lease_blocks=60)) as (engine, _):
        leased = await ask(engine, request(prompt(30), PARAMS, retain=Retain(60)))
        warm = await ask(engine, request(prompt(30, seed=1), PARAMS))
        for round_number in range(4):
            crowd = [request(prompt(40, seed=10 + i + 20 * round_number), PARAMS) for i in range(20)]
            await ask_all(engine, crowd)
        for parent, seed, is_there in ((leased, 0, True), (warm, 1, False)):
            tokens = [*prompt(30, seed), *parent.token_ids[0]]
            child = await ask(engine, request([*tokens, 7], PARAMS, lineage=Lineage(parent.id, 0, len(tokens))))
            assert child.inheritance is not None
            assert (child.inheritance.computed_tokens == 2) == is_there
        engine.forget("t", leased.id)


async def test_a_lease_is_refused_where_states_are_short() -> None:
    async with running(Setup(states=FEW, num_lease_blocks=100)) as (engine, _):
        with pytest.raises(RetentionTooLarge):
            await ask(engine, request(prompt(30), SamplingParams(max_tokens=40), retain=Retain(60)))
        few = SamplingParams(max_tokens=1, temperature=0)
        kept = await ask(engine, request(prompt(9), few, retain=Retain(60)))
        with pytest.raises(InsufficientRetention):
            await ask(engine, request(prompt(9, seed=1), few, retain=Retain(60)))
        engine.forget("t", kept.id)
        again = await ask(engine, request(prompt(9, seed=1), few, retain=Retain(60)))
        engine.forget("t", again.id)


async def test_a_warm_record_can_be_leased_while_its_state_is_there() -> None:
    async with running(Setup(states=FEW, num_lease_blocks=100)) as (engine, _):
        parent = await ask(engine, request(prompt(9), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)))
        engine.set_ttl("t", parent.id, 60)
        engine.forget("t", parent.id)


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("chunk", [1, 5, 100_000])
@pytest.mark.parametrize("num_slots", [8, 12, 16, 20])
async def test_suffixes_are_scored_where_slots_are_few(num_slots: int, chunk: int, pipelined: bool) -> None:
    """However few there are one leader has room for a candidate, and leaders do not take each other's."""
    states = StateSizes(num_slots=num_slots, num_lease_slots=num_slots // 2, interval=8)
    most = num_slots // 4
    setup = Setup(chunk=chunk, pipelined=pipelined, states=states, max_num_seqs=most, num_host_blocks=60)
    suffixes = ((7,), (8, 9, 10), (11,) * 9)
    async with running(setup) as (engine, runner):
        scored = [request(prompt(n, seed=n), SCORED, suffixes=suffixes) for n in (1, 2, 5, 17, 20, 21)]
        others = [request(prompt(9 + n, seed=50 + n), PARAMS) for n in range(3)]
        answers = await asyncio.wait_for(ask_all(engine, [*scored, *others]), 10)
        for asked, answer in zip(others, answers[len(scored) :], strict=True):
            check(asked.prompt_token_ids, PARAMS, answer.token_ids)
        assert set(runner.scored) == set().union(*(histories([*a.prompt_token_ids], suffixes) for a in scored))


async def test_marks_of_others_leave_a_leader_what_its_candidates_go_on_from() -> None:
    """They are of the same step, and would take all slots."""
    states = StateSizes(num_slots=12, num_lease_slots=6, interval=2)
    async with running(Setup(chunk=100, states=states, max_num_seqs=3)) as (engine, runner):
        asked = request(prompt(20, seed=1), SCORED, suffixes=((7,), (8, 9)))
        await asyncio.wait_for(ask_all(engine, [request(prompt(40), PARAMS), asked]), 10)
        assert set(runner.scored) == histories(prompt(20, seed=1), asked.suffixes)


@pytest.mark.parametrize("searches", [False, True], ids=["sampled", "beams"])
@pytest.mark.parametrize("num_slots", [8, 12, 16])
async def test_states_of_as_many_choices_as_may_run(num_slots: int, searches: bool) -> None:
    """Each may have to pass its tokens again. Leases hold all the slots that they may."""
    states = StateSizes(num_slots=num_slots, num_lease_slots=num_slots // 2, interval=1000)
    n = num_slots // (8 if searches else 4)
    beams = BeamParams(n) if searches else None
    wanted = HiddenStatesParams((0, 1), positions="all", include_prompt=True)
    async with running(Setup(states=states, max_num_seqs=num_slots // 4, num_lease_blocks=100)) as (engine, _):
        for seed in range(num_slots // 4):
            await ask(engine, request(prompt(9, seed=seed), SamplingParams(max_tokens=1), retain=Retain(60)))
        params = SamplingParams(n=n, max_tokens=6, ignore_eos=True, beams=beams)
        asked = [request(prompt(9, seed=70 + i), params, hidden_states=wanted) for i in range(3)]
        for answer in await asyncio.wait_for(ask_all(engine, asked), 10):
            assert answer.states is not None and len(answer.states.choices) == n


@pytest.mark.parametrize("chunk", [7, 100])
@pytest.mark.parametrize("width", [2, 3])
async def test_as_many_beams_as_may_search(width: int, chunk: int) -> None:
    """What stands behind the prompt is held beside them, and beams that end hold states of their own."""
    num_slots = 2 * (3 * width + 1)
    states = StateSizes(num_slots=num_slots, num_lease_slots=num_slots // 2, interval=1000)
    async with running(Setup(chunk=chunk, states=states, max_num_seqs=width + 1, num_lease_blocks=100)) as (engine, _):
        for seed in range(num_slots // 4):
            await ask(engine, request(prompt(9, seed=seed), SamplingParams(max_tokens=1), retain=Retain(60)))
        for stops in ((), tuple(range(0, 1000, 3))):
            params = SamplingParams(n=width, max_tokens=8, beams=BeamParams(width, early_stopping="never"))
            params = replace(params, stop_token_ids=stops)
            for i in range(6):
                await asyncio.wait_for(ask(engine, request(prompt(30, seed=70 + i), params)), 10)
    states = StateSizes(num_slots=6 * width, num_lease_slots=3 * width, interval=1000)
    async with running(Setup(states=states)) as (engine, _):
        with pytest.raises(InvalidRequest) as refused:
            await ask(engine, request(prompt(9), SamplingParams(max_tokens=3, beams=BeamParams(width))))
        assert refused.value.details == {"limit": width - 1}


async def test_beams_that_could_not_pass_their_tokens_again_are_refused() -> None:
    """Two could search beside leases, but not walk."""
    states = StateSizes(num_slots=14, num_lease_slots=7, interval=1000)
    async with running(Setup(states=states)) as (engine, _):
        await ask(engine, request(prompt(9), beams := SamplingParams(n=2, max_tokens=3, beams=BeamParams(2))))
        with pytest.raises(InvalidRequest) as refused:
            await ask(engine, request(prompt(9), beams, hidden_states=HiddenStatesParams((1,))))
        assert refused.value.details == {"limit": 1}


async def test_states_that_are_read_for_an_estate_are_counted() -> None:
    """A lease may end while its estate leaves: its states are still there, and others get no lease in their place."""
    states = StateSizes(num_slots=14, num_lease_slots=6, interval=24)
    async with running(Setup(states=states, num_lease_blocks=60, max_num_seqs=2, eos=())) as (engine, _):
        leaving = []
        with pytest.raises(InsufficientRetention):
            for seed in range(9):
                parent = await ask(engine, request(prompt(40, seed=seed), PARAMS, retain=Retain(60)))
                leaving.append(engine._estates.leave(engine.retention.find("t", parent.id)))
                engine.set_ttl("t", parent.id, None)
        crowd = [request(prompt(40, seed=10 + i), PARAMS) for i in range(6)]
        for one, answer in zip(crowd, await ask_all(engine, crowd), strict=True):
            assert answer.token_ids[0] == expected_tokens(one.prompt_token_ids, PARAMS.max_tokens)
        for estate in leaving:
            estate.close()
        parent = await ask(engine, request(prompt(40), PARAMS, retain=Retain(60)))
        engine.forget("t", parent.id)


async def test_an_estate_that_finds_no_room_holds_no_states() -> None:
    """Neither that of its end, nor those on the way."""
    states = StateSizes(num_slots=14, num_lease_slots=4, interval=24)
    async with running(Setup(states=states, num_lease_blocks=60, max_num_seqs=2, eos=())) as (engine, _):
        warm = await ask(engine, request(prompt(40, seed=1), PARAMS))
        leases = engine.retention.leases
        leases.open_import("t", 1, 4)  # one that comes from elsewhere has all that leases may hold
        with pytest.raises(InsufficientRetention):
            engine._estates.leave(engine.retention.find("t", warm.id))
        leases.drop_import("t", 1, 4)
        leaving = engine._estates.leave(engine.retention.find("t", warm.id))
        assert len(leaving.states) > 1
        leaving.close()
