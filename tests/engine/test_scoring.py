"""Scoring of suffixes: each behind the prompt alone, in as few steps as fit, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from bequest.engine.types import Lineage, Retain, SamplingParams
from tests.engine.harness import Setup, ask, ask_all, request, running
from tests.engine.paged_fake import VOCAB, expected_tokens

SCORED = SamplingParams(max_tokens=0, logprobs=0)


def drawn_suffixes(seed: int, count: int) -> tuple[tuple[int, ...], ...]:
    draw = random.Random(seed)
    return tuple(tuple(draw.randrange(10, VOCAB) for _ in range(draw.choice([1, 1, 2, 4, 9]))) for _ in range(count))


def histories(prompt: list[int], suffixes: tuple[tuple[int, ...], ...]) -> set[tuple[tuple[int, ...], int]]:
    """What must be read before each token of each suffix."""
    return {((*prompt, *suffix[:i]), token) for suffix in suffixes for i, token in enumerate(suffix)}


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("num_blocks", [400, 24], ids=["ample", "tiny"])
@pytest.mark.parametrize("chunk", [1, 5, 64, 100_000])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
async def test_each_suffix_is_read_behind_the_prompt(length: int, chunk: int, num_blocks: int, pipelined: bool) -> None:
    prompt, suffixes = list(range(50, 50 + length)), drawn_suffixes(length, 23)
    setup = Setup(num_blocks, chunk=chunk, pipelined=pipelined, max_model_len=60)
    async with running(setup) as (engine, runner):
        beside = [request([90 + i] * 9, SamplingParams(max_tokens=12, temperature=0)) for i in range(3)]
        scored, *others = await ask_all(engine, [request(prompt, SCORED, suffixes=suffixes), *beside])
        assert set(runner.scored) == histories(prompt, suffixes)
        assert scored.token_ids == {i: [*suffix] for i, suffix in enumerate(suffixes)}
        assert all(reason == ("length", None) for reason in scored.finish.values())
        assert scored.usage is not None and scored.usage.completion_tokens == 0
        assert scored.usage.prompt_tokens == length + sum(map(len, suffixes))
        for asked, answer in zip(beside, others, strict=True):
            assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, 12, eos=5)


async def test_suffixes_of_a_resident_parent_take_one_step() -> None:
    async with running(Setup(num_blocks=800, chunk=2000, num_lease_blocks=50)) as (engine, runner):
        prompt = list(range(100, 121))
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        parent = await ask(engine, request(prompt, params, retain=Retain(60.0)))
        tokens = engine.parent("t", parent.id).choices[0].token_ids
        suffixes = drawn_suffixes(1, 64)
        before, computed = runner.num_steps, runner.num_tokens
        asked = request(tokens, SCORED, suffixes=suffixes, lineage=Lineage(parent.id, 0, len(tokens)))
        answer = await ask(engine, asked)
        assert runner.num_steps - before == 1
        assert runner.num_tokens - computed == 1 + sum(map(len, suffixes))
        assert set(runner.scored) == histories([*tokens], suffixes)
        assert answer.inheritance is not None and answer.inheritance.inherited_tokens == len(tokens) - 1
        assert answer.inheritance.computed_tokens == runner.num_tokens - computed
        assert [*engine.parent("t", parent.id).choices[0].token_ids] == [*tokens]
        engine.forget("t", parent.id)


async def test_the_prompt_is_leased_and_not_the_suffixes() -> None:
    async with running(Setup(num_lease_blocks=40)) as (engine, _):
        prompt = list(range(200, 214))
        asked = request(prompt, SCORED, suffixes=drawn_suffixes(2, 9), retain=Retain(60.0))
        answer = await ask(engine, asked)
        assert answer.retained is not None and answer.retained.blocks == 4
        assert answer.retained.tokens == len(prompt)
        [choice] = engine.parent("t", asked.id).choices
        assert [*choice.token_ids] == prompt
        child = request([*prompt, 7], lineage=Lineage(asked.id, 0, len(prompt)))
        after = await ask(engine, child)
        assert after.inheritance is not None and after.inheritance.computed_tokens == 1
        engine.forget("t", asked.id)


async def test_one_who_leaves_loses_no_block() -> None:
    async with running(Setup(num_blocks=300, chunk=16)) as (engine, runner):
        asked = request(list(range(60, 90)), SCORED, suffixes=drawn_suffixes(3, 40))
        engine.submit(asked, lambda _: None)
        plan = engine.scheduler.plan

        def leaving(now: float, *ahead: int):  # type: ignore[no-untyped-def]
            if runner.num_steps == 4:
                engine.abort(asked.id)
            return plan(now, *ahead)

        engine.scheduler.plan = leaving  # type: ignore[method-assign]
        after = await ask(engine, request([1, 2, 3]))
        assert after.token_ids[0] == expected_tokens([1, 2, 3], 8, eos=5)


async def test_candidates_do_not_take_turns_in_the_last_blocks() -> None:
    """Each needs two blocks, and there are fewer than two for each: whoever began comes to its end first."""
    setup = Setup(num_blocks=9, block_size=16, chunk=1, num_host_blocks=1, num_lease_blocks=0)
    async with running(setup) as (engine, runner):
        prompt, suffixes = list(range(10, 26)), tuple(tuple(range(30, 30 + n)) for n in (9, 5, 9, 5, 5, 9, 2) * 3)
        asked = request(prompt, SamplingParams(max_tokens=0, logprobs=0), suffixes=suffixes)
        answer = await asyncio.wait_for(ask(engine, asked), 60)
        assert [tuple(answer.token_ids[number]) for number in range(len(suffixes))] == list(suffixes)
        assert runner.num_tokens == len(prompt) + sum(map(len, suffixes))
