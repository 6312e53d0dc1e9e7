"""Tenants share the engine fairly: in the queue, in steps, in slots, and when the queue is full."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import QueueFull
from bequest.engine.types import Delta, SamplingParams
from tests.engine.harness import Setup, request, running, until
from tests.engine.paged_fake import VOCAB

TOKENS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class Ends:
    """The tenants of requests in the order in which they ended."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.order: list[str] = []
        self.priority = 0
        self.then: tuple[int, Callable[[], None]] | None = None  # to be done after so many ends

    def send(self, tenant: str, count: int = 1, prompt_len: int = 3, params: SamplingParams = TOKENS) -> None:
        for number in range(count):
            prompt = [(10 + number + i) % VOCAB for i in range(prompt_len)]
            asked = request(prompt, params, tenant=tenant, priority=self.priority)
            self.engine.submit(asked, lambda delta: self._note(tenant, delta))

    def _note(self, tenant: str, delta: Delta) -> None:
        if delta.finished:
            assert delta.error is None
            self.order.append(tenant)
            if self.then is not None and len(self.order) == self.then[0]:
                self.then[1]()


def abort_all(engine: AsyncEngine) -> None:
    for request_id in list(engine._groups):
        engine.abort(request_id)


async def test_a_thousand_waiting_requests_do_not_delay_anothers_first() -> None:
    async with running(Setup(max_num_seqs=2)) as (engine, _):
        ends = Ends(engine)
        ends.send("heavy", 1000)
        await until(lambda: len(ends.order) >= 20)
        before = len(ends.order)
        ends.send("light")
        await until(lambda: "light" in ends.order)
        assert ends.order.index("light") - before <= 4, "only those that ran or were launched already"
        abort_all(engine)


async def test_tokens_are_shared_whatever_the_sizes_of_requests() -> None:
    async with running(Setup(max_num_seqs=2, prefix_caching=False)) as (engine, _):
        ends = Ends(engine)
        ends.send("long", 40, prompt_len=60)
        ends.send("short", 400, prompt_len=4)
        await until(lambda: ends.order.count("long") >= 20)
        # 64 tokens for one request of the first, 8 for one of the second, less what a step in flight may shift.
        assert 20 * 8 - 24 <= ends.order.count("short") <= 21 * 8 + 24


async def test_who_was_idle_has_saved_nothing() -> None:
    async with running(Setup(max_num_seqs=1)) as (engine, _):
        ends = Ends(engine)
        ends.send("late")
        await until(lambda: len(ends.order) == 1)
        ends.then = (51, lambda: ends.send("late", 50))
        ends.send("busy", 100)
        await until(lambda: not engine.num_open)
        assert "late" not in ends.order[1:51]
        assert abs(ends.order[51:91].count("late") - ends.order[51:91].count("busy")) <= 4


async def test_a_priority_comes_before_fairness() -> None:
    async with running(Setup(max_num_seqs=1)) as (engine, _):
        ends = Ends(engine)
        ends.priority = 1
        ends.send("light", 3)
        ends.priority = 0
        ends.send("heavy", 50)
        await engine.drain(20)
        assert ends.order == ["heavy"] * 50 + ["light"] * 3


async def test_a_full_queue_refuses_those_who_fill_it() -> None:
    async with running(Setup(max_num_seqs=1, max_queued=8)) as (engine, _):
        ends = Ends(engine)
        ends.send("heavy", 8)
        with pytest.raises(QueueFull):
            ends.send("heavy")
        ends.send("light", 4)
        with pytest.raises(QueueFull):
            ends.send("light")
        ends.send("third", 2)
        with pytest.raises(QueueFull):
            ends.send("third")
        assert [engine.num_waiting(tenant) for tenant in ("heavy", "light", "third", "nobody")] == [8, 4, 2, 0]
        for tenant in ("heavy", "light", "third"):
            with pytest.raises(QueueFull):
                engine.check_room(tenant)
        engine.check_room("nobody")


async def test_slots_are_kept_for_tenants_that_have_fewer() -> None:
    long = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    async with running(Setup(max_num_seqs=32, num_blocks=4000, chunk=256)) as (engine, _):
        ends = Ends(engine)
        ends.send("heavy", 40, params=long)
        await until(lambda: engine.scheduler.num_running == 32)  # who is alone may have them all
        abort_all(engine)
        ends.send("other")
        ends.send("heavy", 60, params=long)
        await until(lambda: engine.scheduler.num_running == 28 and "other" in ends.order)
        ends.send("other", params=long)
        await until(lambda: engine.scheduler.num_running == 29)
        assert engine.num_waiting("heavy") == 32 and engine.num_waiting("other") == 0
        abort_all(engine)


@pytest.mark.parametrize(("slots", "kept"), [(16, 2), (8, 1), (4, 1)])
async def test_slots_are_kept_for_tenants_that_have_not_come_yet(slots: int, kept: int) -> None:
    long = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    async with running(Setup(max_num_seqs=slots, num_blocks=4000, chunk=256)) as (engine, _):
        engine.expect_tenants(2)
        ends = Ends(engine)
        ends.send("heavy", 30, params=long)
        await until(lambda: engine.scheduler.num_running == slots - kept)
        ends.send("other", params=long)
        await until(lambda: engine.scheduler.num_running == slots - kept + 1)
        assert engine.num_waiting("heavy") == 30 - slots + kept and engine.num_waiting("other") == 0
        abort_all(engine)


async def test_an_ended_waiting_request_leaves_no_trace() -> None:
    async with running(Setup(max_num_seqs=1)) as (engine, _):
        asked = [request([20 + i], tenant=f"t{i % 3}") for i in range(30)]
        for one in asked:
            engine.submit(one, lambda _: None)
        for one in asked[1:]:
            engine.abort(one.id)
        assert [engine.num_waiting(f"t{i}") for i in range(3)] == [1, 0, 0]
        await until(lambda: not engine.num_open)
        assert len(engine.scheduler.waiting) == 0 and engine.scheduler.waiting.head() is None
