"""When the step behind a running one is planned: towards its end, so that whoever comes meanwhile is in it."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.engine import AsyncEngine
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.scheduling.policy.clock import StepClock
from bequest.engine.types import (
    ModelInfo,
    SamplingParams,
    StepBatch,
    StepMoves,
    StepPlan,
    StepResult,
    StepRows,
    StepSamples,
)
from tests.engine.harness import ask, request, until
from tests.engine.paged_fake import VOCAB, PagedFakeRunner

STEP = 0.05  # seconds


def plan_of(num_tokens: int) -> StepPlan:
    empty = np.zeros(0, np.int32)
    pairs = np.zeros((0, 2), np.int32)
    tokens = np.zeros(num_tokens, np.int32)
    slots = np.zeros(num_tokens, np.int64)
    batch = StepBatch(
        input_ids=tokens,
        input_rows=tokens,
        positions=tokens,
        slot_mapping=slots[None],
        query_start=empty,
        seq_lens=empty,
        block_tables=pairs[None],
    )
    moves = StepMoves(swaps_out=pairs, swaps_in=pairs, copies=pairs)
    samples = StepSamples(tokens=empty, rows=empty, positions=empty)
    return StepPlan(step=0, batch=batch, moves=moves, rows=StepRows(), samples=samples)


def after(*steps: tuple[int, float], num_tokens: int) -> float:
    """Seconds that the next step may wait behind one of `num_tokens` that has just begun, after others have run."""
    clock, now = StepClock(), 7.0
    for count, seconds in steps:
        clock.launched(plan_of(count), now)
        now += seconds
        clock.computed(now)
    clock.launched(plan_of(num_tokens), now)
    return clock.seconds_until_due(now)


def test_it_is_due_just_before_the_end_of_a_step_like_many_before() -> None:
    assert after(*[(40, STEP)] * 60, num_tokens=40) == pytest.approx(STEP - 0.003, abs=1e-3)
    assert after(*[(40, STEP)] * 60, num_tokens=41) == pytest.approx(STEP - 0.003, abs=1e-3)


def test_it_is_due_at_once_behind_a_step_that_may_end_at_any_time() -> None:
    assert after(num_tokens=40) == 0
    assert after(*[(40, STEP)] * 60, num_tokens=80) == 0, "of this size there was none"
    assert after(*[(40, STEP)] * 2, num_tokens=40) == 0, "two are few"
    assert after(*[(40, 0.004)] * 60, num_tokens=40) == 0, "it is too short to wait for"
    assert after(*[(40, STEP), (40, STEP / 10)] * 30, num_tokens=40) == 0, "as many took a tenth"


def test_it_is_due_the_earlier_the_more_such_steps_differ() -> None:
    steady = after(*[(40, STEP)] * 60, num_tokens=40)
    unsteady = after(*[(40, STEP * 0.9), (40, STEP * 1.1)] * 30, num_tokens=40)
    assert 0 < unsteady < STEP * 0.9 < steady


def test_steps_in_a_row_are_each_measured_from_the_end_of_the_one_before() -> None:
    clock = StepClock()
    for i in range(60):
        clock.launched(plan_of(8), i * STEP)
        clock.launched(plan_of(8), i * STEP + STEP / 2) if i == 0 else None
        clock.computed((i + 1) * STEP)
    assert clock.seconds_until_due(60 * STEP) == pytest.approx(STEP - 0.003, abs=1e-3)
    assert clock.seconds_until_due(60 * STEP + 0.04) == pytest.approx(STEP - 0.043, abs=1e-3)
    assert clock.seconds_until_due(61 * STEP) == 0


def test_who_comes_late_is_woken_earlier_for_a_while() -> None:
    clock = StepClock()
    for i in range(60):
        clock.launched(plan_of(8), i * STEP)
        clock.computed((i + 1) * STEP)
    clock.launched(plan_of(8), 3.0)
    usual = clock.seconds_until_due(3.0)
    clock.woken(0.02)
    assert clock.seconds_until_due(3.0) == pytest.approx(usual - 0.02)
    for _ in range(50):
        clock.woken(0.0)
    assert clock.seconds_until_due(3.0) == pytest.approx(usual, abs=1e-3)


class Gated(PagedFakeRunner):
    """Each step waits until it may run, and takes the same time on a clock that nothing else moves."""

    def __init__(self) -> None:
        super().__init__(200, 4)
        self.may_run = threading.Semaphore(0)
        self.now = 0.0
        self.sizes: list[int] = []  # sequences of each step

    def launch(self, plan: StepPlan) -> StepResult:
        self.may_run.acquire()
        self.now += STEP
        self.sizes.append(len(plan.batch.seq_lens))
        return super().launch(plan)


@pytest.mark.parametrize("steady", [True, False])
async def test_who_comes_while_a_long_step_runs_is_in_the_next(steady: bool) -> None:
    """But in the one behind it where nobody knows how long the running one takes."""
    runner = Gated()
    info = ModelInfo("fake", "fake", 400, VOCAB, (), "float32", 0)
    scheduler = make_scheduler(
        SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, prefix_caching=True), CacheSizes(4, 200), ()
    )
    engine = AsyncEngine(info, scheduler, runner, None, clock=lambda: runner.now)
    params = SamplingParams(max_tokens=100, temperature=0)
    first = asyncio.ensure_future(ask(engine, request([20, 21], params)))
    num_steps = 40 if steady else 2
    for step in range(num_steps):
        runner.may_run.release()
        await until(lambda seen=step + 1: engine.num_steps == seen)  # type: ignore[misc]
    second = asyncio.ensure_future(ask(engine, request([30, 31], params)))
    await asyncio.sleep(0.01)
    for _ in range(200):
        runner.may_run.release()
    await asyncio.gather(first, second)
    assert runner.sizes[: num_steps + 3] == [1] * (num_steps + 1) + ([2, 2] if steady else [1, 2])
    assert await engine.drain(10)
    await engine.stop()
    scheduler.check_idle()
