"""Slots and steps between tenants: who has fewer takes from who has more, and finds short steps."""

from __future__ import annotations

import asyncio

import pytest

from bequest.engine.types import SamplingParams
from tests.engine.harness import Setup, ask_all, request, running, until
from tests.engine.paged_fake import expected_tokens
from tests.engine.plans import Plans


def test_who_has_more_gives_slots_to_who_has_fewer() -> None:
    plans = Plans(slots=8)
    plans.send("heavy", 20)
    plans.steps(3)
    assert plans.running == {"heavy": 8}
    plans.send("light")
    assert plans.steps(1) == 1 and plans.running == {"heavy": 7, "light": 1}
    plans.send("light", 5)
    assert plans.steps(10) == 3 and plans.running == {"heavy": 4, "light": 4}, "an equal share, and no more"
    plans.send("third", 3)
    assert plans.steps(10) == 2 and sorted(plans.running.values()) == [2, 3, 3], "from whoever has the most"
    assert plans.steps(50) == 0, "nobody takes anything back"


def test_it_is_the_least_urgent_that_gives_way_and_the_first_that_comes_back() -> None:
    plans = Plans(slots=4)
    plans.send("heavy", 6)
    plans.steps(3)
    plans.send("light", answer=3)
    plans.step()
    assert [s.group.request.id for s in plans.scheduler._running] == ["r1", "r2", "r3", "r7"]
    plans.send("heavy")
    plans.steps(1)
    [gone] = [s for s in plans.scheduler._running if s.group.request.tenant == "light"]
    plans.scheduler.close(gone.group)
    plans.scheduler.close(next(iter(plans.scheduler._running)).group)  # else the free slot is one that is kept
    launch = plans.step()
    assert [s.group.request.id for s in plans.scheduler._running] == ["r2", "r3", "r4"]
    assert launch.num_prompt_tokens == 0 and launch.plan.num_tokens < 4 + 4, "what it had computed is found"


def test_a_request_of_several_choices_takes_all_its_slots_at_once_or_none() -> None:
    plans = Plans(slots=8)
    plans.send("heavy", 20)
    plans.steps(3)
    plans.send("light", n=5)
    assert plans.steps(5) == 0 and plans.running == {"heavy": 8}, "five would be more than heavy had left"
    plans = Plans(slots=8)
    plans.send("heavy", 20)
    plans.steps(3)
    plans.send("light", n=4)
    assert plans.steps(1) == 4 and plans.running == {"heavy": 4, "light": 4}


def test_a_more_urgent_priority_gives_way_to_nobody() -> None:
    plans = Plans(slots=4)
    plans.send("heavy", 4, priority=-1)
    plans.steps(3)
    plans.send("light")
    assert plans.steps(5) == 0 and plans.running == {"heavy": 4}


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_of_few_slots_nobody_gives_any_up(slots: int) -> None:
    plans = Plans(slots)
    plans.send("heavy", 5)
    plans.steps(3)
    plans.send("light")
    assert plans.steps(5) == 0 and plans.running == {"heavy": slots}


def test_a_slot_that_is_kept_for_others_is_theirs_whoever_has_the_turn() -> None:
    plans = Plans(slots=8)
    plans.send("light", prompt_len=200)  # more tokens than the others get for long
    plans.step()
    plans.send("heavy", 20)
    plans.steps(3)
    assert plans.running == {"light": 1, "heavy": 6}
    plans.send("light")
    head = plans.scheduler.waiting.head()
    assert head is not None and head.group.request.tenant == "heavy"
    assert plans.steps(1) == 0 and plans.running == {"light": 2, "heavy": 6}


def test_prompts_of_who_has_its_share_take_a_part_of_a_step() -> None:
    plans = Plans(slots=8, budget=64)
    plans.send("light")
    plans.step()
    plans.send("heavy", 30, prompt_len=50, answer=2)
    for _ in range(40):
        before = plans.running.get("heavy", 0)
        tokens = plans.step().plan.num_tokens
        assert before < 4 or tokens <= 8 + 16, "four of eight are a share"
    plans.send("light", prompt_len=60)
    assert plans.step().plan.num_tokens >= 50, "another's prompt takes what there is"


def test_a_tenant_alone_has_the_whole_step() -> None:
    plans = Plans(slots=8, budget=64)
    plans.send("only", 12, prompt_len=60)
    assert [plans.step().plan.num_tokens for _ in range(3)] == [64] * 3


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("num_host_blocks", [1, 60])
async def test_answers_are_the_same_whoever_gave_way(
    prefix_caching: bool, pipelined: bool, num_host_blocks: int
) -> None:
    params = [SamplingParams(max_tokens=10 + 7 * (i % 5), temperature=1.0, seed=i, ignore_eos=True) for i in range(40)]
    prompts = [range(20 + i, 20 + i + 3 + 5 * (i % 4)) for i in range(40)]

    setup = Setup(
        max_num_seqs=4, prefix_caching=prefix_caching, pipelined=pipelined, num_host_blocks=num_host_blocks, chunk=32
    )
    async with running(setup) as (engine, _):
        names = ["heavy"] * 28 + [f"light{i % 3}" for i in range(12)]
        asked = [request(p, s, tenant=t) for p, s, t in zip(prompts, params, names, strict=True)]
        first = asyncio.ensure_future(ask_all(engine, asked[:28]))
        await until(lambda: engine.num_steps >= 8)
        light = await ask_all(engine, asked[28:])
        assert not first.done(), "the others waited for them"
        for one, answer in zip(asked, [*await first, *light], strict=True):
            count, seed = one.params.max_tokens, one.params.seed or 0
            assert answer.token_ids[0] == expected_tokens(one.prompt_token_ids, count, seed=seed, greedy=False)
