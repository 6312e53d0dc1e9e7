"""Whatever the chunk, the cache, the loop and the crowd: the tokens are those of the oracle, exactly."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bequest.engine.types import OutputMode, SamplingParams
from tests.engine.harness import EOS, Setup, ask, ask_all, request, running
from tests.engine.paged_fake import VOCAB, expected_tokens


def crowd(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of lengths around the block boundaries, many with a shared beginning, with all kinds of parameters."""
    draw = random.Random(seed)
    common = [draw.randrange(10, VOCAB) for _ in range(40)]
    jobs = []
    for i in range(count):
        prompt = common[: draw.choice([0, 3, 4, 5, 16, 17, 40])] + [
            draw.randrange(10, VOCAB) for _ in range(draw.choice([1, 3, 4, 5, 8, 31, 60]))
        ]
        greedy = draw.random() < 0.5
        params = SamplingParams(
            max_tokens=draw.choice([1, 2, 4, 9, 30]),
            n=draw.choice([1, 1, 1, 2, 5]),
            temperature=0 if greedy else 1,
            seed=None if greedy else i,
        )
        jobs.append((prompt, params))
    return jobs


def crowd_size(chunk: int) -> int:
    """Where every token takes a step, a few show what many do."""
    return 8 if chunk == 1 else 24


def check(prompt: list[int], params: SamplingParams, token_ids: dict[int, list[int]]) -> None:
    assert sorted(token_ids) == list(range(params.n))
    for choice, tokens in token_ids.items():
        assert tokens == expected_tokens(
            prompt, params.max_tokens, seed=params.seed or 0, choice=choice, greedy=params.greedy, eos=EOS
        )


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("num_blocks", [400, 42], ids=["ample", "tiny"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100_000])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix", "no-prefix"])
async def test_tokens_equal_the_oracle_alone_and_in_a_crowd(
    prefix_caching: bool, chunk: int, num_blocks: int, pipelined: bool
) -> None:
    setup = Setup(num_blocks, chunk=chunk, prefix_caching=prefix_caching, pipelined=pipelined, max_model_len=160)
    jobs = crowd(seed=chunk, count=crowd_size(chunk))
    async with running(setup) as (engine, runner):
        for prompt, params in jobs[:4]:
            check(prompt, params, (await ask(engine, request(prompt, params))).token_ids)
        answers = await ask_all(engine, [request(*job) for job in jobs])
        for (prompt, params), answer in zip(jobs, answers, strict=True):
            check(prompt, params, answer.token_ids)
        assert runner.num_copies > 0, "choices of one prompt share its last block: somebody must copy"


async def test_a_tiny_cache_preempts_and_nobody_notices() -> None:
    setup = Setup(num_blocks=30, max_model_len=110)
    preempted = 0
    async with running(setup) as (engine, _):
        plan = engine.scheduler.plan

        def counting(now: float, *ahead: int):
            nonlocal preempted
            launch = plan(now, *ahead)
            preempted += launch.num_preempted if launch else 0
            return launch

        engine.scheduler.plan = counting  # type: ignore[method-assign]
        prompts = [[100 + i] * 20 for i in range(12)]
        params = SamplingParams(max_tokens=80, temperature=0)
        answers = await ask_all(engine, [request(p, params) for p in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            check(prompt, params, answer.token_ids)
    assert preempted > 0


async def test_a_prompt_has_larger_steps_until_somebody_streams() -> None:
    steps: list[int] = []
    async with running(Setup(chunk=8, chunk_alone=64)) as (engine, _):
        plan = engine.scheduler.plan

        def recording(now: float, *ahead: int):
            launch = plan(now, *ahead)
            if launch:
                steps.append(launch.plan.num_tokens)
            return launch

        engine.scheduler.plan = recording  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=40, temperature=0)
        prompts = [[7] * 100, [8] * 100]
        answers = await ask_all(engine, [request(p, params) for p in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            check(prompt, params, answer.token_ids)
    # The second prompt begins in what the first leaves of its last step, and goes on beside its tokens.
    assert steps[:2] == [64, 64] and max(steps[2:]) == 8


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix", "no-prefix"])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
async def test_more_choices_than_slots(max_num_seqs: int, prefix_caching: bool, pipelined: bool) -> None:
    setup = Setup(
        42, max_num_seqs=max_num_seqs, chunk=7, prefix_caching=prefix_caching, pipelined=pipelined, max_model_len=160
    )
    jobs = crowd(seed=max_num_seqs, count=10)
    async with running(setup) as (engine, _):
        running_at_once = []
        plan = engine.scheduler.plan

        def watched(now: float, *ahead: int) -> Any:
            launch = plan(now, *ahead)
            running_at_once.append(engine.scheduler.num_running)
            return launch

        engine.scheduler.plan = watched  # type: ignore[method-assign]
        answers = await ask_all(engine, [request(*job) for job in jobs])
        for (prompt, params), answer in zip(jobs, answers, strict=True):
            check(prompt, params, answer.token_ids)
            assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
        assert max(running_at_once) == max_num_seqs
        prompt, nothing = [11, 12, 13], SamplingParams(max_tokens=0, n=5)
        assert len((await ask(engine, request(prompt, nothing))).finish) == 5


async def test_output_modes_tell_the_same() -> None:
    async with running(Setup()) as (engine, _):
        prompt, params = [11, 12, 13], SamplingParams(max_tokens=12, n=3, temperature=1, seed=4)
        answers = [await ask(engine, request(prompt, params, output=mode)) for mode in OutputMode]
        assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
        assert answers[0].finish == answers[1].finish == answers[2].finish
        assert answers[2].num_deltas == 1


async def test_a_prefix_hit_is_counted_and_computes_less() -> None:
    async with running(Setup()) as (engine, runner):
        prompt = list(range(50, 91))  # 41 tokens: ten full blocks of 4 and one token
        first = await ask(engine, request(prompt))
        before = runner.num_tokens
        second = await ask(engine, request(prompt))
        assert first.usage is not None and first.usage.cached_tokens == 0
        assert second.usage is not None and second.usage.cached_tokens == 40
        assert second.token_ids == first.token_ids
        assert runner.num_tokens - before < 41


async def test_tenants_and_salts_do_not_share_blocks() -> None:
    async with running(Setup()) as (engine, _):
        prompt = list(range(50, 91))
        await ask(engine, request(prompt, tenant="a"))
        other = await ask(engine, request(prompt, tenant="b"))
        salted = await ask(engine, request(prompt, tenant="a", cache_salt="x"))
        assert other.usage is not None and other.usage.cached_tokens == 0
        assert salted.usage is not None and salted.usage.cached_tokens == 0
