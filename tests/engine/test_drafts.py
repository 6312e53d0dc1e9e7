"""Several samples of a sequence in one step: drafts, right and wrong, change no token and lose no block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from bequest.engine.errors import InternalError
from bequest.engine.scheduling.results import Samples
from bequest.engine.state.launch import Launch
from bequest.engine.state.sequence import Applied
from bequest.engine.state.sequence import Sequence as Choice
from bequest.engine.types import Lineage, OutputMode, Retain, SamplingParams, StepResult
from tests.engine.drafters import OracleDrafter
from tests.engine.harness import Setup, ask, ask_all, request, running
from tests.engine.paged_fake import expected_tokens
from tests.engine.test_differential import check, crowd


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("num_blocks", [400, 42], ids=["ample", "tiny"])
# Where a step has one token there is no room for a draft, true or not.
@pytest.mark.parametrize("truth, chunk", [(0.6, 1), *itertools.product([0.0, 0.6, 1.0], [7, 64])])
async def test_tokens_equal_the_oracle(truth: float, chunk: int, num_blocks: int, pipelined: bool) -> None:
    drafter = OracleDrafter(chunk, truth)
    setup = Setup(num_blocks, chunk=chunk, pipelined=pipelined, max_model_len=160, drafter=drafter)
    jobs = crowd(seed=chunk, count=24)
    async with running(setup) as (engine, _):
        for prompt, params in jobs[:4]:
            check(prompt, params, (await ask(engine, request(prompt, params))).token_ids)
        answers = await ask_all(engine, [request(*job) for job in jobs])
        for (prompt, params), answer in zip(jobs, answers, strict=True):
            check(prompt, params, answer.token_ids)
    if chunk > 1:
        assert drafter.num_right + drafter.num_wrong > 50


async def test_right_drafts_take_fewer_steps() -> None:
    prompt, params = [11, 12, 13], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    steps = {}
    for truth in (0.0, 1.0):
        async with running(Setup(drafter=OracleDrafter(2, truth))) as (engine, runner):
            answer = await ask(engine, request(prompt, params))
            assert answer.token_ids[0] == expected_tokens(prompt, 60)
            steps[truth] = runner.num_steps
    assert steps[1.0] * 2 < steps[0.0] <= 61


async def test_answers_tell_the_same_with_drafts() -> None:
    """Log-probabilities, several tokens in a delta, a stop token in the middle of what was accepted."""
    prompt = [21, 22, 23]
    whole = expected_tokens(prompt, 30)
    stop = whole[17]
    params = SamplingParams(max_tokens=30, temperature=0, logprobs=2, stop_token_ids=frozenset({stop}), ignore_eos=True)
    answers = []
    for drafter in (None, OracleDrafter(3, 1.0)):
        async with running(Setup(drafter=drafter)) as (engine, _):
            answers += [await ask(engine, request(prompt, params, output=mode)) for mode in OutputMode]
    for answer in answers:
        assert answer.token_ids[0] == whole[: whole.index(stop) + 1] and answer.finish[0] == ("stop", stop)
        assert answer.usage is not None and answer.usage.completion_tokens == whole.index(stop) + 1
    assert answers[0].logprobs == answers[3].logprobs and answers[2].logprobs == answers[5].logprobs
    assert answers[3].num_deltas < answers[0].num_deltas


async def test_a_lease_has_no_block_of_a_wrong_draft() -> None:
    """What was drafted and not accepted is never found: a child reads the parent's tokens alone."""
    setup = Setup(num_lease_blocks=100, drafter=OracleDrafter(5, 0.5))
    async with running(setup) as (engine, _):
        prompt = [31, 32, 33, 34, 35]
        params = SamplingParams(max_tokens=22, temperature=0, ignore_eos=True)
        parent = await ask(engine, request(prompt, params, retain=Retain(60.0)))
        assert parent.retained is not None and parent.retained.blocks == -(-(5 + 22 - 1) // 4)
        tokens = engine.parent("t", parent.id).choices[0].token_ids
        assert [*tokens] == prompt + expected_tokens(prompt, 22)
        for at in (len(tokens), 12, 7):
            child = request([*tokens[:at], 77], params, lineage=Lineage(parent.id, 0, at))
            answer = await ask(engine, child)
            assert answer.token_ids[0] == expected_tokens([*tokens[:at], 77], 22)
            assert answer.inheritance is not None
            assert answer.inheritance.computed_tokens == 1 + (at == len(tokens))
        engine.forget("t", parent.id)


async def test_a_choice_that_fails_beside_drafts_takes_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several drafts of the other choice were right in the same result, and nobody takes its tokens: no plan may count
    on them."""
    async with running(Setup(pipelined=False, drafter=OracleDrafter(1, 1.0))) as (engine, _):
        apply, failed = engine.scheduler.apply, list[Choice]()

        def fail(launch: Launch, result: StepResult, now: float) -> Applied:
            first, *others = launch.expected[0].sequences if isinstance(launch.expected[0], Samples) else (None,)
            if first is not None and not failed and len([s for s in others if s is not first]) > 2:
                failed.append(first)
                result = replace(result, bad_rows=np.arange(len(result.bad_rows)) == 0)
            return apply(launch, result, now)

        monkeypatch.setattr(engine.scheduler, "apply", fail)
        params = SamplingParams(max_tokens=60, n=2, temperature=1.0, ignore_eos=True)
        with pytest.raises(InternalError):
            await ask(engine, request([41, 42, 43], params))
        assert failed and engine.state == "ready"
        answer = await ask(engine, request([41, 42], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)))
        assert answer.token_ids[0] == expected_tokens([41, 42], 9)
