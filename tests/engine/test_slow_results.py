"""Results that take a while to read, as many hidden states do: the device goes on meanwhile, and no further."""

from __future__ import annotations

import asyncio
import threading

from bequest.engine.scheduling.limits import ExtractionLimits
from bequest.engine.types import SamplingParams, StepPlan, StepResult
from bequest.engine.types.hidden import HiddenStatesParams
from tests.engine.harness import Setup, ask, make_engine, request, until
from tests.engine.paged_fake import NUM_LAYERS, PagedFakeRunner, expected_states

PROMPT = list(range(20, 40))


class Pending:
    slow_to_read = True
    done = False

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self.computed, self.read = threading.Event(), threading.Event()

    def wait_computed(self) -> None:
        self.computed.wait()

    def wait(self) -> StepResult:
        self.read.wait()
        return self.result


class SlowRunner(PagedFakeRunner):
    def __init__(self) -> None:
        super().__init__(200, 4)
        self.pending: list[Pending] = []

    def launch(self, plan: StepPlan) -> Pending:  # type: ignore[override]
        self.pending.append(Pending(super().launch(plan)))
        return self.pending[-1]


async def test_a_step_of_extractions_waits_for_the_device_but_not_for_the_reader() -> None:
    runner = SlowRunner()
    engine, _ = make_engine(Setup(extraction=ExtractionLimits(max_step_tokens=8, queues_steps=False)), runner)
    wanted = HiddenStatesParams((0, NUM_LAYERS), "all")
    answer = asyncio.ensure_future(ask(engine, request(PROMPT, SamplingParams(max_tokens=0), hidden_states=wanted)))
    await until(lambda: len(runner.pending) == 1)
    await asyncio.sleep(0.01)
    assert len(runner.pending) == 1, "nothing is queued behind it"
    runner.pending[0].computed.set()
    await until(lambda: len(runner.pending) == 2)
    runner.pending[1].computed.set()
    await asyncio.sleep(0.01)
    assert len(runner.pending) == 2, "there are two steps whose results are not here"
    runner.pending[0].read.set()
    await until(lambda: len(runner.pending) == 3)
    for pending in (runner.pending[1], runner.pending[2]):
        pending.computed.set()
        pending.read.set()
    states = (await answer).states
    assert states is not None and len(runner.pending) == 3
    assert (states.choices[0].assemble() == expected_states(PROMPT, range(20), (0, NUM_LAYERS))).all()
    states.release()
    assert await engine.drain(10)
    await engine.stop()
    engine.scheduler.check_idle()
