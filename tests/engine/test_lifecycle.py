"""Requests that leave, run late, fail, or find the engine dead; the queue, priorities, draining."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from bequest.engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    EngineDraining,
    InternalError,
    QueueFull,
)
from bequest.engine.state.sequence import Group, Sequence
from bequest.engine.types import BeamParams, Delta, SamplingParams
from tests.engine.harness import EOS, Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import expected_tokens

LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("leave_after", range(6))
async def test_leaving_after_any_delta_frees_everything(leave_after: int, pipelined: bool) -> None:
    async with running(Setup(pipelined=pipelined)) as (engine, _):
        deltas: list[Delta] = []
        asked = request([20, 21, 22], LONG)

        def sink(delta: Delta) -> None:
            deltas.append(delta)
            if len(deltas) == leave_after:
                engine.abort(asked.id)

        engine.submit(asked, sink)
        if leave_after == 0:
            engine.abort(asked.id)
        await until(lambda: engine.num_open == 0)
        assert len(deltas) == leave_after
        assert not any(d.finished for d in deltas)


async def test_what_has_ended_is_in_no_cycle() -> None:
    """It goes without a collection: the suite has none, and a server's would look at the prompts of all others."""

    def left() -> list[object]:
        return [thing for thing in gc.get_objects() if isinstance(thing, Group | Sequence)]

    before = len(left())
    async with running(Setup()) as (engine, _):
        choices = SamplingParams(max_tokens=5, temperature=0, n=3)
        beams = SamplingParams(max_tokens=3, n=4, beams=BeamParams(4), ignore_eos=True)
        await ask_all(engine, [request([20, 21, 22], params) for params in (None, choices, beams)])
        await until(lambda: len(left()) <= before)


async def test_abort_is_idempotent_and_knows_no_strangers() -> None:
    async with running(Setup()) as (engine, _):
        asked = request([20])
        engine.submit(asked, lambda _: None)
        for _ in range(3):
            engine.abort(asked.id)
        engine.abort("never seen")


async def test_end_token_stops_and_the_pipelined_overshoot_is_invisible() -> None:
    prompt = next(p for p in ([i] for i in range(10, 900)) if EOS in expected_tokens(p, 60))
    for pipelined in (True, False):
        async with running(Setup(pipelined=pipelined)) as (engine, _):
            answer = await ask(engine, request(prompt, SamplingParams(max_tokens=60, temperature=0)))
            assert answer.token_ids[0] == expected_tokens(prompt, 60, eos=EOS)
            assert answer.finish[0] == ("stop", None)
            again = await ask(engine, request(prompt, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)))
            assert again.token_ids[0] == expected_tokens(prompt, 60)
            assert again.finish[0] == ("length", None)


async def test_stop_token_ids_and_min_tokens() -> None:
    prompt = [77, 78]
    tokens = expected_tokens(prompt, 20)
    async with running(Setup()) as (engine, _):
        params = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=frozenset({tokens[6]}), ignore_eos=True)
        answer = await ask(engine, request(prompt, params))
        end = tokens.index(tokens[6])
        assert answer.token_ids[0] == tokens[: end + 1]
        assert answer.finish[0] == ("stop", tokens[6])


async def test_max_tokens_0_computes_the_prompt_and_samples_nothing() -> None:
    async with running(Setup()) as (engine, runner):
        answer = await ask(engine, request(list(range(30, 60)), SamplingParams(max_tokens=0, n=2)))
        assert answer.token_ids == {0: [], 1: []}
        assert answer.finish == {0: ("length", None), 1: ("length", None)}
        assert answer.usage is not None and answer.usage.completion_tokens == 0
        assert runner.num_tokens == 30


async def test_deadline_in_the_queue_is_an_error_and_while_generating_an_end() -> None:
    async with running(Setup(max_num_seqs=1)) as (engine, runner):
        runner.gate = threading.Event()
        first = asyncio.ensure_future(ask(engine, request([20], SamplingParams(max_tokens=3, temperature=0))))
        await until(lambda: engine.scheduler.num_running == 1)
        with pytest.raises(DeadlineExceeded) as caught:
            await ask(engine, request([21], deadline=time.monotonic() + 0.02))
        assert caught.value.field == "deadline"
        runner.gate.set()
        await first
        runner.gate, runner.hold_from = threading.Event(), runner.num_steps + 6
        answer = await ask(engine, request([22], LONG, deadline=time.monotonic() + 0.2))
        runner.gate.set()
        assert answer.finish[0] == ("length", "deadline")
        assert answer.token_ids[0] == expected_tokens([22], len(answer.token_ids[0]))
        assert 0 < len(answer.token_ids[0]) < 300


async def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    async with running(Setup(max_model_len=40)) as (engine, _):
        with pytest.raises(ContextLengthExceeded) as caught:
            engine.submit(request(range(30, 65), SamplingParams(max_tokens=6)), lambda _: None)
        assert str(caught.value) == "35 tokens and 6 behind them are more than the model's 40."
        assert caught.value.details == {"max_model_len": 40, "prompt_tokens": 35, "max_tokens": 6}
        answer = await ask(engine, request(range(30, 65), SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)))
        assert len(answer.token_ids[0]) == 5


async def test_a_full_queue_refuses() -> None:
    async with running(Setup(max_queued=2)) as (engine, _):
        for _ in range(2):
            engine.submit(request([20]), lambda _: None)
        with pytest.raises(QueueFull):
            engine.submit(request([20]), lambda _: None)


async def test_lower_priority_numbers_run_first() -> None:
    async with running(Setup(max_num_seqs=1)) as (engine, _):
        order: list[str] = []

        def sink(delta: Delta) -> None:
            if delta.finished:
                order.append(delta.request_id)

        asked = [request([20 + p], priority=p) for p in (3, 1, 2, 0)]
        for one in asked:
            engine.submit(one, sink)
        await engine.drain(10)
        assert order == [asked[i].id for i in (3, 1, 2, 0)]


async def test_nan_fails_its_request_alone_and_its_blocks_are_not_shared() -> None:
    async with running(Setup()) as (engine, runner):
        runner.bad_prompt_token = 666
        bad, good = await asyncio.gather(
            ask(engine, request([666] * 12)), ask(engine, request([30] * 12)), return_exceptions=True
        )
        assert isinstance(bad, InternalError)
        assert not isinstance(good, BaseException) and good.token_ids[0] == expected_tokens([30] * 12, 8)
        runner.bad_prompt_token = None
        again = await ask(engine, request([666] * 12))
        assert again.usage is not None and again.usage.cached_tokens == 0


@pytest.mark.parametrize("fail_at", [1, 2, 5])
async def test_a_dead_device_fails_every_open_request_and_refuses_new_ones(fail_at: int) -> None:
    async with running(Setup()) as (engine, runner):
        runner.fail_at = fail_at
        answers = await asyncio.gather(
            *(ask(engine, request([20 + i], LONG)) for i in range(5)), return_exceptions=True
        )
        assert all(isinstance(a, EngineDead) for a in answers)
        assert engine.state == "dead"
        assert isinstance(await engine.wait_dead(), RuntimeError)
        with pytest.raises(EngineDead):
            engine.submit(request([20]), lambda _: None)


async def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    async with running(Setup()) as (engine, _):
        open_requests = asyncio.gather(*(ask(engine, request([20 + i], LONG)) for i in range(3)))
        await asyncio.sleep(0)
        await until(lambda: engine.num_open == 3)
        draining = asyncio.ensure_future(engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineDraining):
            engine.submit(request([20]), lambda _: None)
        assert await draining
        assert all(len(a.token_ids[0]) == 300 for a in await open_requests)


async def test_drain_waits_for_an_answer_of_several_requests() -> None:
    async with running(Setup()) as (engine, _):
        done: asyncio.Future[Delta] = asyncio.get_running_loop().create_future()
        async with engine.long_answer():
            await ask(engine, request([20], LONG))
            draining = asyncio.ensure_future(engine.drain(10))
            await asyncio.sleep(0.01)
            for refused in (engine.long_answer().__aenter__, lambda: ask(engine, request([21], LONG))):
                with pytest.raises(EngineDraining):
                    await refused()
            asked = request([22], LONG)
            engine.submit(asked, lambda delta: done.set_result(delta) if delta.finished else None, goes_on=True)
            assert (await done).error is None and not draining.done()
        assert await draining
        await engine.stop()
        with pytest.raises(EngineDraining):
            engine.submit(request([23], LONG), lambda _: None, goes_on=True)


async def test_stop_in_the_middle_answers_everybody() -> None:
    async with running(Setup()) as (engine, runner):
        runner.gate = threading.Event()
        asking = asyncio.gather(*(ask(engine, request([20 + i], LONG)) for i in range(3)), return_exceptions=True)
        await until(lambda: engine.num_open == 3)
        stopping = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0)
        runner.gate.set()
        await stopping
        assert all(isinstance(a, EngineDraining) for a in await asking)


async def test_a_sink_that_raises_loses_its_own_request_only() -> None:
    async with running(Setup()) as (engine, _):

        def broken(_: Delta) -> None:
            raise ValueError("broken sink")

        engine.submit(request([20], LONG), broken)
        (answer,) = await ask_all(engine, [request([30])])
        assert answer.token_ids[0] == expected_tokens([30], 8)
        assert engine.state == "ready"


async def test_logprobs_come_one_per_token() -> None:
    async with running(Setup(chunk=7)) as (engine, _):
        params = SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        prompt = list(range(40, 63))
        deltas = [d async for d in engine.generate(request(prompt, params))]
        tokens = [t for d in deltas for c in d.choices for t in c.token_ids]
        logprobs = [p for d in deltas for c in d.choices for p in c.logprobs or ()]
        assert [p.token_id for p in logprobs] == tokens
        assert all(len(p.top) == 2 for p in logprobs)
        told = deltas[0].prompt_logprobs
        assert told is not None and told[0] is None
        assert [p.token_id for p in told[1:] if p is not None] == prompt[1:]
        assert deltas[-1].choices[0].cumulative_logprob == pytest.approx(sum(p.logprob for p in logprobs))
