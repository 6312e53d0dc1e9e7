"""A device that raises, hangs or runs out of memory: every open request is answered, and the engine is dead."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import EngineDead
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.types import ModelInfo, PendingStep, SamplingParams, StepPlan, StepResult
from bequest.engine.watching.watchdog import StepWatchdog
from tests.engine.harness import ask, request, until
from tests.engine.paged_fake import VOCAB, PagedFakeRunner

LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


class Faulty(PagedFakeRunner):
    """Goes wrong at step `at`, when it is launched or, as a GPU does, when it is waited for."""

    def __init__(self, at: int, fault: Callable[[], None], late: bool) -> None:
        super().__init__(200, 4)
        self.at, self.fault, self.late = at, fault, late

    def launch(self, plan: StepPlan) -> StepResult | PendingStep:  # type: ignore[override]
        faulty = self.num_steps + 1 == self.at
        if faulty and not self.late:
            self.fault()
        return _Pending(super().launch(plan), self.fault if faulty else None)


class _Pending:
    slow_to_read = False
    done = True

    def __init__(self, result: StepResult, fault: Callable[[], None] | None) -> None:
        self.result, self.fault = result, fault

    def wait_computed(self) -> None:
        raise AssertionError("nobody has to ask")

    def wait(self) -> StepResult:
        if self.fault is not None:
            self.fault()
        return self.result


@asynccontextmanager
async def engine_over(runner: PagedFakeRunner, step_timeout: float = 0.0) -> AsyncIterator[AsyncEngine]:
    scheduler = make_scheduler(
        SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, prefix_caching=True), CacheSizes(4, 200), ()
    )
    info = ModelInfo("fake", "fake", 400, VOCAB, (), "float32", 0)
    engine = AsyncEngine(info, scheduler, runner, None, step_timeout=step_timeout)
    try:
        yield engine
    finally:
        await engine.stop(grace=0.5)


def raise_error() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def hang(until_released: threading.Event) -> None:
    until_released.wait(20)


def run_out_of_memory() -> None:
    raise MemoryError("CUDA out of memory")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("fault", [raise_error, run_out_of_memory])
async def test_every_request_is_answered_when_a_step_fails(fault: Callable[[], None], at: int, late: bool) -> None:
    async with engine_over(Faulty(at, fault, late)) as engine:
        answers = await asyncio.gather(
            *(ask(engine, request([20 + i], LONG)) for i in range(9)), return_exceptions=True
        )
        assert all(isinstance(answer, EngineDead) for answer in answers), "four that ran, five that waited"
        assert engine.state == "dead" and engine.num_open == 0
        assert "memory" in str(await engine.wait_dead())
        with pytest.raises(EngineDead):
            engine.submit(request([20]), lambda _: None)
        engine.scheduler.check_idle()


@pytest.mark.parametrize("late", [False, True])
async def test_a_step_that_hangs_is_noticed(late: bool) -> None:
    released = threading.Event()
    async with engine_over(Faulty(5, lambda: hang(released), late), step_timeout=0.05) as engine:
        answers = await asyncio.gather(
            *(ask(engine, request([20 + i], LONG)) for i in range(6)), return_exceptions=True
        )
        assert all(isinstance(answer, EngineDead) for answer in answers)
        assert isinstance(await engine.wait_dead(), TimeoutError)
        engine.scheduler.check_idle()
        released.set()


async def test_an_engine_that_waits_for_work_does_not_hang() -> None:
    # So long that a busy machine does not look hung.
    async with engine_over(PagedFakeRunner(200, 4), step_timeout=0.4) as engine:
        await asyncio.sleep(0.5)
        await ask(engine, request([20], LONG))
        await asyncio.sleep(0.06)
        assert engine.state == "ready" and engine.num_steps >= 200


async def test_the_watchdog_counts_looks() -> None:
    hung: list[BaseException] = []
    watchdog = StepWatchdog(asyncio.get_running_loop(), 10.0, hung.append)

    def look(times: int) -> None:
        for _ in range(times):
            watchdog._look()

    look(20)  # at nothing
    watchdog.launched()
    look(7)
    watchdog.launched()  # a second one in flight does not give the first more time
    look(1)
    watchdog.returned(1)  # the second is the oldest now
    look(8)
    assert not hung
    look(1)
    watchdog.stop()
    assert len(hung) == 1 and "10 s" in str(hung[0])


@pytest.mark.parametrize("late", [False, True])
async def test_a_loop_that_stands_still_is_no_hang_of_the_device(late: bool) -> None:
    async with engine_over(Faulty(10**9, lambda: None, late), step_timeout=0.2) as engine:
        running = asyncio.ensure_future(ask(engine, request([20], LONG)))
        for _ in range(3):
            await asyncio.sleep(0.01)
            time.sleep(0.25)  # noqa: ASYNC251 - the loop is held, and the device is done long before the end
            engine._watchdog._look()  # a loop may run its timers before what threads have queued
        await running
        assert engine.state == "ready"


async def test_a_probe_passes_behind_the_steps() -> None:
    runner = PagedFakeRunner(200, 4)
    runner.gate = threading.Event()
    async with engine_over(runner) as engine:
        await engine.probe()
        asking = asyncio.ensure_future(ask(engine, request([20])))
        await until(lambda: engine.scheduler.num_running == 1)
        probe = asyncio.ensure_future(engine.probe())
        await asyncio.sleep(0.02)
        assert not probe.done()
        runner.gate.set()
        await probe
        assert engine.num_steps >= 1
        await asking
