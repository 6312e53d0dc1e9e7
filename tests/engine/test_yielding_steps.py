"""Steps of extractions that others pass: who may, what an engine then delivers, and that the parts go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.scheduling.limits import ExtractionLimits
from bequest.engine.types import Request, SamplingParams, StepPlan, StepResult
from bequest.engine.types.hidden import HiddenStatesParams
from tests.engine.harness import Setup, ask, make_engine, request, until
from tests.engine.paged_fake import NUM_LAYERS, PagedFakeRunner, expected_states, expected_tokens

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = list(range(20, 60))
WANTED = HiddenStatesParams((0, NUM_LAYERS), "all")


class Pending:
    slow_to_read = False

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self.looks = 0
        self.read = threading.Event()
        self.read.set()

    @property
    def done(self) -> bool:
        """Takes a while, in which the next one comes."""
        self.looks += 1
        return self.looks > 20

    def wait_computed(self) -> None:
        pass

    def wait(self) -> StepResult:
        assert self.read.wait(10)
        return self.result


class YieldingRunner(PagedFakeRunner):
    """Computes what yields last of all, when it is let go; others pass as they come."""

    def __init__(self) -> None:
        super().__init__(200, 4)
        self.let_go = threading.Event()
        self.order: list[str] = []  # of what the device does
        self.yielded: list[Pending] = []
        self.num_asked = 0  # whether somebody passes
        self.reads = True  # at once

    def launch(self, plan: StepPlan) -> Pending:  # type: ignore[override]
        self.order.append("passes")
        return Pending(super().launch(plan))

    def launch_yielding(self, plan: StepPlan, between: Callable[[], None]) -> Pending:
        assert plan.yields and plan.taps is not None and not plan.rows.close
        self.order.append("begins")
        while not self.let_go.wait(0.001):
            self.num_asked += 1
            between()
        self.order.append("ends")
        pending = Pending(super().launch(plan))
        if not self.reads:
            pending.read.clear()
        self.yielded.append(pending)
        return pending


@asynccontextmanager
async def engine_over(runner: YieldingRunner, yields_from: int = 1) -> AsyncIterator[AsyncEngine]:
    extraction = ExtractionLimits(max_step_tokens=32, yields_from=yields_from)
    engine, _ = make_engine(Setup(max_num_seqs=4, eos=(), extraction=extraction), runner)
    try:
        yield engine
        assert await engine.drain(10)
    finally:
        runner.let_go.set()
        await engine.stop()
    engine.scheduler.check_idle()


def extraction(prompt: list[int]) -> Request:
    return request(prompt, SamplingParams(max_tokens=0), hidden_states=WANTED)


async def check_states(answer: asyncio.Task[object], prompt: list[int]) -> None:
    states = (await answer).states  # type: ignore[attr-defined]
    assert (states.choices[0].assemble() == expected_states(prompt, range(len(prompt)), WANTED.layers)).all()
    states.release()


async def test_a_generation_passes_what_runs_and_what_is_queued_behind_it() -> None:
    runner = YieldingRunner()
    async with engine_over(runner) as engine:
        extracted = asyncio.ensure_future(ask(engine, extraction(PROMPT)))  # two steps
        await until(lambda: runner.num_asked > 0)
        prompt = [7, 8, 9]
        answer = await ask(engine, request(prompt, GREEDY))
        assert answer.token_ids[0] == expected_tokens(prompt, 12)
        assert runner.order[0] == "begins" and runner.order[1:] == ["passes"] * (len(runner.order) - 1)
        runner.let_go.set()
        await check_states(extracted, PROMPT)
    assert runner.order.count("ends") == 2


async def test_streams_have_the_device_but_for_one_part_after_some_steps() -> None:
    runner = YieldingRunner()
    async with engine_over(runner) as engine:
        extracted = asyncio.ensure_future(ask(engine, extraction(PROMPT)))
        await until(lambda: runner.num_asked > 0)
        asked = runner.num_asked
        many = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
        answer = await ask(engine, request([7, 8, 9], many))
        assert answer.token_ids[0] == expected_tokens([7, 8, 9], 120)
        # At least after every eighth step; seldom much more often, since the next one comes while a step runs.
        assert 120 // 8 <= runner.num_asked - asked < 50
        runner.let_go.set()
        await check_states(extracted, PROMPT)


async def test_who_finds_the_prefix_of_an_extraction_waits_for_it() -> None:
    runner = YieldingRunner()
    async with engine_over(runner) as engine:
        extracted = asyncio.ensure_future(ask(engine, extraction(PROMPT[:30])))
        await until(lambda: runner.num_asked > 0)
        prompt = [*PROMPT[:24], 3]
        answer = asyncio.ensure_future(ask(engine, request(prompt, GREEDY)))
        other = asyncio.ensure_future(ask(engine, request([5, 6], GREEDY)))
        await until(lambda: engine.scheduler.num_waiting == 0)
        asked = runner.num_asked
        await until(lambda: runner.num_asked > asked + 3)
        assert runner.order == ["begins"], "nor does anybody behind it pass"
        runner.let_go.set()
        assert (await answer).token_ids[0] == expected_tokens(prompt, 12)
        assert (await other).token_ids[0] == expected_tokens([5, 6], 12)
        await check_states(extracted, PROMPT[:30])


async def test_blocks_that_an_extraction_gave_back_are_not_written_before_it_ends() -> None:
    runner = YieldingRunner()
    async with engine_over(runner) as engine:
        asked = extraction(PROMPT[:30])
        gone = asyncio.ensure_future(ask(engine, asked))
        await until(lambda: runner.num_asked > 0)
        engine.abort(asked.id)
        gone.cancel()
        # The oldest free blocks go first, so that it takes some to get there.
        prompts = [[100 + i] * 180 for i in range(4)]
        answers = [asyncio.ensure_future(ask(engine, request(prompt, GREEDY))) for prompt in prompts]
        await until(lambda: runner.order.count("passes") > 4)
        await asyncio.sleep(0.02)
        runner.let_go.set()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert (await answer).token_ids[0] == expected_tokens(prompt, 12)


async def test_a_short_step_is_passed_by_nobody() -> None:
    runner = YieldingRunner()
    async with engine_over(runner, yields_from=16) as engine:
        runner.let_go.set()
        extracted = [list(range(20, 20 + length)) for length in (3, 16)]
        for prompt in extracted:
            await check_states(asyncio.ensure_future(ask(engine, extraction(prompt))), prompt)
    assert runner.order == ["passes", "begins", "ends"]


async def test_streams_do_not_wait_until_states_are_read() -> None:
    runner = YieldingRunner()
    runner.reads = False
    async with engine_over(runner) as engine:
        extracted = asyncio.ensure_future(ask(engine, extraction(PROMPT[:20])))
        runner.let_go.set()
        await until(lambda: len(runner.yielded) == 1)
        answer = await ask(engine, request([7, 8, 9], GREEDY))
        assert answer.token_ids[0] == expected_tokens([7, 8, 9], 12) and not extracted.done()
        runner.yielded[0].read.set()
        await check_states(extracted, PROMPT[:20])


async def test_two_are_launched_and_the_third_when_the_first_has_come_back() -> None:
    runner = YieldingRunner()
    runner.reads = False
    async with engine_over(runner) as engine:
        prompt = list(range(100, 196))  # three steps
        extracted = asyncio.ensure_future(ask(engine, extraction(prompt)))
        runner.let_go.set()
        await until(lambda: len(runner.yielded) == 2)
        await asyncio.sleep(0.02)
        assert len(runner.yielded) == 2, "there are two places for their states"
        runner.reads = True
        runner.yielded[0].read.set()
        await until(lambda: len(runner.yielded) == 3)
        runner.yielded[1].read.set()
        await check_states(extracted, prompt)


async def test_a_runner_that_fails_between_parts_ends_the_engine() -> None:
    class Failing(YieldingRunner):
        def launch_yielding(self, plan: StepPlan, between: Callable[[], None]) -> Pending:
            raise RuntimeError("no more")

    runner = Failing()
    engine, _ = make_engine(Setup(extraction=ExtractionLimits(yields_from=1)), runner)
    with pytest.raises(Exception, match="failed"):
        await ask(engine, extraction(PROMPT))
    assert str(await engine.wait_dead()) == "no more"
    await engine.stop()
