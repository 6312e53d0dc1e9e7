"""Tenants take turns on the event loop and in worker threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

from bequest.server.access.turns import Entrance, FairPool


async def test_a_request_alone_enters_without_waiting() -> None:
    entrance = Entrance()
    for _ in range(100):
        coroutine = entrance.enter("a")
        try:
            coroutine.send(None)
        except StopIteration:
            await asyncio.sleep(0)
            continue
        raise AssertionError("it waited")


async def test_one_behind_a_thousand_of_another_enters_in_the_next_round() -> None:
    entrance = Entrance()
    entered: list[str] = []

    async def enter(tenant: str) -> None:
        await entrance.enter(tenant)
        entered.append(tenant)

    tasks = [asyncio.ensure_future(enter("heavy")) for _ in range(1000)]
    tasks.append(asyncio.ensure_future(enter("light")))
    await asyncio.gather(*tasks)
    assert entered.index("light") <= 16 and entered.count("heavy") == 1000


async def test_what_else_there_is_to_do_is_done_between_them() -> None:
    entrance = Entrance()
    rounds: list[int] = []
    entered = 0

    async def enter() -> None:
        nonlocal entered
        await entrance.enter("heavy")
        entered += 1

    tasks = [asyncio.ensure_future(enter()) for _ in range(100)]
    while entered < 100:
        before = entered
        await asyncio.sleep(0)
        rounds.append(entered - before)
    assert max(rounds) <= 8
    await asyncio.gather(*tasks)


async def test_who_leaves_the_entrance_is_passed_over() -> None:
    entrance = Entrance()
    tasks = [asyncio.ensure_future(entrance.enter(f"t{i % 3}")) for i in range(60)]
    await asyncio.sleep(0)
    for task in tasks[10::2]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in done] == [i >= 10 and i % 2 == 0 for i in range(60)]


class Work:
    """Jobs that end when they are told to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go = threading.Event()

    def job(self, name: str) -> Callable[[], str]:
        def run() -> str:
            assert self.go.wait(10)
            self.done.append(name)
            return name

        return run


async def test_tenants_take_turns_at_the_threads() -> None:
    pool, work = FairPool(1, "test"), Work()
    jobs = [asyncio.ensure_future(pool.run("heavy", work.job(f"heavy{i}"))) for i in range(50)]
    await asyncio.sleep(0)
    jobs += [asyncio.ensure_future(pool.run("light", work.job(f"light{i}"))) for i in range(2)]
    await asyncio.sleep(0)
    work.go.set()
    results = await asyncio.gather(*jobs)
    assert results == [*(f"heavy{i}" for i in range(50)), "light0", "light1"]
    assert work.done[:5] == ["heavy0", "heavy1", "light0", "heavy2", "light1"]
    pool.shutdown()


async def test_a_thread_is_not_lost_with_those_who_leave() -> None:
    pool, work = FairPool(2, "test"), Work()
    jobs = [asyncio.ensure_future(pool.run(f"t{i % 3}", work.job(str(i)))) for i in range(30)]
    await asyncio.sleep(0)
    for job in jobs[::3]:
        job.cancel()  # two that run or are queued in the pool, and others that wait
    work.go.set()
    await asyncio.gather(*jobs, return_exceptions=True)
    for _ in range(500):
        if pool._idle == 2:  # the threads of those who left are back too
            break
        await asyncio.sleep(0.01)
    called = asyncio.ensure_future(pool.run("a", work.job("called")))
    await asyncio.sleep(0)
    assert pool._idle == 1
    assert await called == "called" and pool._idle == 2
    pool.shutdown()


async def test_a_place_is_free_when_its_thread_is_not_when_its_caller_left() -> None:
    pool, work = FairPool(1, "test"), Work()
    left = asyncio.ensure_future(pool.run("heavy", work.job("left")))
    await asyncio.sleep(0)
    heavy = asyncio.ensure_future(pool.run("heavy", work.job("heavy")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    light = asyncio.ensure_future(pool.run("light", work.job("light")))
    await asyncio.sleep(0)
    assert left.cancelled() and pool._idle == 0 and pool._threads.num_queued == 0, "nobody stands behind a busy thread"
    work.go.set()
    assert await asyncio.gather(heavy, light) == ["heavy", "light"] and work.done == ["left", "heavy", "light"]
    pool.shutdown()


async def test_one_that_leaves_as_it_is_called_gives_the_thread_on() -> None:
    pool, work = FairPool(1, "test"), Work()
    first = asyncio.ensure_future(pool.run("a", work.job("first")))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(pool.run("a", work.job("second")))
    await asyncio.sleep(0)
    pool._idle += 1
    pool._running["a"] = 0
    pool._call()  # calls the second,
    second.cancel()  # which leaves before it has heard of it
    await asyncio.gather(second, return_exceptions=True)
    assert second.cancelled() and pool._idle == 1
    pool._begin("a")  # the place that was given away above is the first one's
    work.go.set()
    assert await first == "first" and pool._idle == 1 and not pool._running
    pool.shutdown()


async def test_a_failing_job_is_its_callers_matter() -> None:
    pool = FairPool(1, "test")

    def fail() -> None:
        raise ValueError("no")

    for _ in range(3):
        try:
            await pool.run("a", fail)
        except ValueError:
            continue
        raise AssertionError("it did not fail")
    assert pool._idle == 1
    pool.shutdown()


async def test_a_task_that_takes_long_gives_its_place_to_another_tenant() -> None:
    pool, slow, quick = FairPool(2, "test", patience=0.05), Work(), Work()
    quick.go.set()
    heavy = [asyncio.ensure_future(pool.run("heavy", slow.job(f"heavy{i}"))) for i in range(6)]
    await asyncio.sleep(0)
    for i in range(3):  # one after the other, while both places are the heavy one's
        async with asyncio.timeout(5):
            assert await pool.run("light", quick.job(f"light{i}")) == f"light{i}"
    await asyncio.sleep(0.2)
    assert pool._running == {"heavy": 2} and pool._num_late == 2, "who is late gets no more places"
    slow.go.set()
    assert await asyncio.gather(*heavy) == [f"heavy{i}" for i in range(6)]
    assert pool._idle == 2 and pool._num_late == 0 and not pool._running
    pool.shutdown()


async def test_no_more_than_so_many_are_late() -> None:
    pool, work = FairPool(1, "test", patience=0.01, most_late=2), Work()
    jobs = [asyncio.ensure_future(pool.run(f"t{i}", work.job(str(i)))) for i in range(5)]
    await asyncio.sleep(0.3)
    assert pool._num_late == 2 and pool._idle == 0 and pool._running.total() == 3
    work.go.set()
    assert await asyncio.gather(*jobs) == ["0", "1", "2", "3", "4"] and pool._idle == 1
    pool.shutdown()


def test_worker_threads_end_with_the_process() -> None:
    """A thread that is at something for ever holds nobody up."""
    code = (
        "import time; from bequest.server.access.threads import DaemonThreads\n"
        "threads = DaemonThreads(1, 'test'); done = threads.submit(lambda: 1); assert done.result() == 1\n"
        "threads.submit(time.sleep, 1000); threads.shutdown()"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
