"""Extractions whose blocks others need, looked at step by step."""

from __future__ import annotations

import itertools

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.limits import ExtractionLimits, SchedulerLimits
from bequest.engine.state.launch import Launch
from bequest.engine.state.sequence import Group, Status
from bequest.engine.types import Request, SamplingParams
from bequest.engine.types.hidden import HiddenStatesParams


class Steps:
    """Steps are planned, and none has its result."""

    def __init__(self, num_blocks: int, num_tokens: int = 64) -> None:
        """`num_tokens`: of a step"""
        limits = SchedulerLimits(
            max_num_seqs=4,
            max_num_batched_tokens=num_tokens,
            prefix_caching=False,
            extraction=ExtractionLimits(share=0.6),
        )
        self.scheduler = make_scheduler(limits, CacheSizes(4, 1 + num_blocks, num_host_blocks=20), ())
        self._numbers = itertools.count(1)

    def send(self, num_blocks: int, *, extracts: bool = False) -> Group:
        number = next(self._numbers)
        params = SamplingParams(max_tokens=0 if extracts else 1, temperature=0)
        states = HiddenStatesParams(layers=(1,), positions="all") if extracts else None
        prompt = tuple(range(100 * number, 100 * number + 4 * num_blocks))
        asked = Request(f"r{number}", "a", prompt, params, hidden_states=states)
        group = self.scheduler.new_group(asked, lambda _: None, seed=0, arrival_number=number, now=0.0)
        self.scheduler.retention.open(group)
        self.scheduler.add(group, ChoiceOutput(asked, 0, None))
        return group

    def plan(self) -> Launch | None:
        return self.scheduler.plan(0.0, behind=True)


def test_one_that_waits_for_its_results_does_not_come_back_for_nothing() -> None:
    """It gave its blocks up when all its steps were launched. There is nothing left to compute, so that in the plan
    that let it in again a generation took its blocks, which were still to be brought: the engine ended."""
    steps = Steps(num_blocks=6)
    [extraction] = steps.send(2, extracts=True).sequences
    steps.plan()
    assert extraction.status is Status.RUNNING and not extraction.work.num_ready(extraction)
    first = steps.send(5)
    launch = steps.plan()
    assert launch is not None and launch.num_preempted == 1 and extraction.status is Status.WAITING
    steps.scheduler.close(first)  # its client left: there is room for the extraction, but not for both
    second = steps.send(5)
    launch = steps.plan()
    assert launch is not None and launch.plan.num_tokens == 20
    assert second.sequences[0].status is Status.RUNNING and extraction.status is Status.WAITING


def test_a_prompt_that_is_read_keeps_its_room() -> None:
    """An extraction has its share of a step first. Both would find too few blocks for all they have to compute, the
    prompt would give way to the extraction in one step, and the other way round in the next, for ever."""
    steps = Steps(num_blocks=14, num_tokens=8)
    [prompt] = steps.send(8).sequences
    steps.plan()
    [extraction] = steps.send(8, extracts=True).sequences
    while prompt.num_pending > 1:
        assert extraction.status is Status.WAITING
        launch = steps.plan()
        assert launch is not None and launch.num_preempted == 0
    assert len(prompt.table) == 8
