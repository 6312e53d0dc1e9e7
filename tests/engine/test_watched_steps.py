"""Quick steps of an idle device, which the event loop launches and looks for itself: the same answers, in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bequest.engine import device
from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import EngineDead
from bequest.engine.scheduling import limits
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.state import draft
from bequest.engine.types import BeamParams, ModelInfo, SamplingParams, StepPlan, StepResult
from bequest.engine.types.blocks import BlockBytes, BlockRead
from tests.engine.harness import Answer, ask, request, until
from tests.engine.paged_fake import VOCAB, PagedFakeRunner

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
BEAMS = SamplingParams(n=3, max_tokens=5, ignore_eos=True, beams=BeamParams(4, 1.0, False))
PROMPT = list(range(20, 31))


class Pending:
    """Is done when it is let go, or after it was looked at so many times."""

    slow_to_read = False

    def __init__(self, result: StepResult, looks: int | None) -> None:
        self.result, self.looks, self.num_looks = result, looks, 0
        self.let_go = threading.Event()

    @property
    def done(self) -> bool:
        self.num_looks += 1
        if self.looks is not None and self.num_looks > self.looks:
            self.let_go.set()
        return self.let_go.is_set()

    def wait_computed(self) -> None:
        raise AssertionError("nobody has to ask")

    def wait(self) -> StepResult:
        if self.looks is not None:
            self.let_go.set()
        self.let_go.wait()
        return self.result


class QuickRunner(PagedFakeRunner):
    """Says of steps of at most `most` tokens that they are quick."""

    def __init__(self, most: int, looks: int | None = 2) -> None:
        super().__init__(200, 4)
        self.most, self.looks = most, looks
        self.pending: list[Pending] = []
        self.threads: list[int] = []
        self.fail_with: Exception | None = None

    def is_quick(self, plan: StepPlan) -> bool:
        return plan.num_tokens <= self.most

    def launch(self, plan: StepPlan) -> Pending:  # type: ignore[override]
        if self.fail_with is not None:
            raise self.fail_with
        self.threads.append(threading.get_ident())
        self.pending.append(Pending(super().launch(plan), self.looks))
        return self.pending[-1]


@asynccontextmanager
async def engine_over(runner: PagedFakeRunner, *, follows_beams: bool = False) -> AsyncIterator[AsyncEngine]:
    limits_of = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=64, prefix_caching=True, follows_beams=follows_beams
    )
    scheduler = make_scheduler(limits_of, CacheSizes(4, 200), ())
    engine = AsyncEngine(ModelInfo("fake", "fake", 400, VOCAB, (), "float32", 0), scheduler, runner, None)
    try:
        yield engine
    finally:
        await engine.stop(grace=0.5)


async def answers_of(runner: PagedFakeRunner) -> list[Answer]:
    """One after the other, then all at once."""
    async with engine_over(runner) as engine:
        params = [GREEDY, BEAMS, GREEDY, BEAMS]
        answers = [await ask(engine, request([*PROMPT, i], p)) for i, p in enumerate(params)]
        asked = [request([*PROMPT, 40 + i], p) for i, p in enumerate(params)]
        answers += await asyncio.gather(*(ask(engine, one) for one in asked))
        assert await engine.drain(10)
        engine.scheduler.check_idle()
    return answers


@pytest.mark.parametrize("most", [1, 4, 64])
async def test_answers_do_not_depend_on_who_launches(most: int) -> None:
    expected = await answers_of(PagedFakeRunner(200, 4))
    runner = QuickRunner(most)
    for ours, theirs in zip(await answers_of(runner), expected, strict=True):
        assert (ours.token_ids, ours.beam_scores) == (theirs.token_ids, theirs.beam_scores)
    assert most < 4 or threading.get_ident() in runner.threads


async def test_beams_never_leave_the_event_loop() -> None:
    runner = QuickRunner(64)
    async with engine_over(runner) as engine:
        await ask(engine, request(PROMPT, BEAMS))
    assert set(runner.threads) == {threading.get_ident()} and len(runner.pending) == BEAMS.max_tokens
    assert all(pending.num_looks > 1 for pending in runner.pending)


@pytest.mark.parametrize("quiet", [True, False])
async def test_a_quiet_loop_launches_the_next_step_of_a_search(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_QUIET", 1e9 if quiet else 0.0)
    monkeypatch.setattr(device, "_PATIENCE", 1e9)
    runner = QuickRunner(64, looks=None)
    async with engine_over(runner, follows_beams=True) as engine:
        asking = asyncio.ensure_future(ask(engine, request(PROMPT[:9], BEAMS)))
        await until(lambda: runner.pending and runner.pending[0].num_looks > 9)
        assert len(runner.pending) == 1 + quiet == 1 + runner.num_followed
        runner.looks = 5
        for pending in runner.pending:
            pending.let_go.set()
        answer = await asking
    assert (runner.num_followed > 0) == quiet
    waiting = QuickRunner(64)
    async with engine_over(waiting) as engine:
        expected = await ask(engine, request(PROMPT[:9], BEAMS))
    assert (answer.token_ids, answer.beam_scores) == (expected.token_ids, expected.beam_scores)
    assert set(runner.threads) == {threading.get_ident()}


async def test_whoever_comes_meanwhile_is_launched_behind_it() -> None:
    runner = QuickRunner(64, looks=None)
    async with engine_over(runner) as engine:
        first = asyncio.ensure_future(ask(engine, request(PROMPT, BEAMS)))
        await until(lambda: runner.pending)
        second = asyncio.ensure_future(ask(engine, request([*PROMPT, 99], GREEDY)))
        await until(lambda: len(runner.pending) == 2)
        assert runner.threads[0] == threading.get_ident() != runner.threads[1]
        runner.pending[1].let_go.set()
        await asyncio.sleep(0.01)
        assert engine.num_steps == 0, "results come in order"
        runner.looks = 0
        runner.pending[0].let_go.set()
        await asyncio.gather(first, second)


async def test_searches_that_come_meanwhile_are_in_the_next_step_together() -> None:
    runner = QuickRunner(64, looks=None)
    async with engine_over(runner) as engine:
        answers = [asyncio.ensure_future(ask(engine, request(PROMPT, BEAMS)))]
        await until(lambda: runner.pending)
        answers += [asyncio.ensure_future(ask(engine, request([*PROMPT, i], BEAMS))) for i in (97, 98)]
        await until(lambda: engine.num_open == 3)
        await asyncio.sleep(0.01)
        assert len(runner.pending) == 1, "they wait for the first"
        runner.looks = 0
        runner.pending[0].let_go.set()
        await asyncio.gather(*answers)
    # The first is a step ahead of the others, which end together.
    assert [len(pending.result.beams) for pending in runner.pending] == [1, 3, 3, 3, 3, 2]


async def test_what_does_not_fit_into_one_step_is_launched_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (limits, draft):
        monkeypatch.setattr(module, "MAX_BEAM_WIDTH", 8)
    runner = QuickRunner(64, looks=None)
    wide = SamplingParams(n=1, max_tokens=4, ignore_eos=True, beams=BeamParams(6, 1.0, False))
    async with engine_over(runner) as engine:
        first = asyncio.ensure_future(ask(engine, request(PROMPT, wide)))
        await until(lambda: runner.pending)
        second = asyncio.ensure_future(ask(engine, request([*PROMPT, 99], wide)))
        await until(lambda: len(runner.pending) == 2)
        runner.pending[1].let_go.set()
        await asyncio.sleep(0.01)
        assert engine.num_steps == 0, "results come in order"
        runner.looks = 0
        runner.pending[0].let_go.set()
        answers = await asyncio.gather(first, second)
    assert set(runner.threads) == {threading.get_ident()}, "the loop looks for both"
    expected = PagedFakeRunner(200, 4)
    async with engine_over(expected) as engine:
        for answer, last in zip(answers, ([], [99]), strict=True):
            assert answer.token_ids == (await ask(engine, request([*PROMPT, *last], wide))).token_ids


async def test_a_slow_one_is_left_to_the_thread_that_waits() -> None:
    runner = QuickRunner(64, looks=None)
    async with engine_over(runner) as engine:
        answer = asyncio.ensure_future(ask(engine, request(PROMPT, BEAMS)))
        await until(lambda: runner.pending)
        await asyncio.sleep(0.1)
        looks = runner.pending[0].num_looks
        await asyncio.sleep(0.02)
        assert runner.pending[0].num_looks == looks > 0
        runner.looks = 0
        runner.pending[0].let_go.set()
        await answer


async def test_a_probe_waits_for_it() -> None:
    runner = QuickRunner(64, looks=None)
    async with engine_over(runner) as engine:
        answer = asyncio.ensure_future(ask(engine, request(PROMPT, BEAMS)))
        await until(lambda: runner.pending)
        probe = asyncio.ensure_future(engine.probe())
        await asyncio.sleep(0.01)
        assert not probe.done()
        runner.looks = 0
        runner.pending[0].let_go.set()
        await asyncio.gather(probe, answer)


@pytest.mark.parametrize("at", [0, 1])
async def test_what_fails_kills_the_engine(at: int) -> None:
    runner = QuickRunner(64, looks=None)
    async with engine_over(runner) as engine:
        if at == 0:
            runner.fail_with = RuntimeError("no launch")
        answer = asyncio.ensure_future(ask(engine, request(PROMPT, BEAMS)))
        if at == 1:
            await until(lambda: runner.pending)
            runner.fail_with = RuntimeError("no second launch")
            runner.pending[0].let_go.set()
        with pytest.raises(EngineDead):
            await answer
        assert engine.state == "dead"
        engine.scheduler.check_idle()


async def test_an_engine_stops_while_one_is_watched() -> None:
    runner = QuickRunner(64, looks=None)
    async with engine_over(runner) as engine:
        answer = asyncio.ensure_future(ask(engine, request(PROMPT, BEAMS)))
        await until(lambda: runner.pending)
        threading.Timer(0.05, runner.pending[0].let_go.set).start()
        await engine.stop()
        assert runner.closed
        with pytest.raises(Exception, match="The engine stopped"):
            await answer


class PendingBytes:
    def __init__(self, content: BlockBytes, let_go: threading.Event) -> None:
        self._content, self._let_go = content, let_go

    def wait(self) -> BlockBytes:
        self._let_go.wait()
        return self._content


class QueueingBlocks(QuickRunner):
    """Queues bytes as a GPU does, and says who touched the runner at the same time as another."""

    def __init__(self) -> None:
        super().__init__(64)
        self.begun, self.go_on, self.arrived = threading.Event(), threading.Event(), threading.Event()

    def read_blocks(self, read: BlockRead) -> PendingBytes:  # type: ignore[override]
        self.begun.set()
        self.go_on.wait()
        return PendingBytes(super().read_blocks(read), self.arrived)


async def test_a_runner_that_moves_bytes_is_not_lent() -> None:
    runner = QueueingBlocks()
    async with engine_over(runner) as engine:
        await ask(engine, parent := request(PROMPT, GREEDY))
        estate = asyncio.ensure_future(engine.export_estate("t", parent.id))
        await asyncio.to_thread(runner.begun.wait)
        runner.threads.clear()
        answer = asyncio.ensure_future(ask(engine, request([*PROMPT, 99], GREEDY)))
        await asyncio.sleep(0.02)
        assert not runner.threads, "the device thread has the runner"
        runner.go_on.set()
        await until(lambda: runner.threads)
        assert runner.threads[0] != threading.get_ident() and not estate.done()
        runner.arrived.set()
        assert len((await estate).content) == 6
        assert (await answer).token_ids[0]
        assert await engine.drain(10)
        engine.scheduler.check_idle()
