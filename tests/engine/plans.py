"""A scheduler that is looked at step by step, without a device."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.state.launch import Launch
from bequest.engine.types import Request, SamplingParams, StepResult


class Plans:
    """A scheduler whose steps are looked at; samples are zeros."""

    def __init__(self, slots: int, budget: int = 256) -> None:
        limits = SchedulerLimits(max_num_seqs=slots, max_num_batched_tokens=budget, prefix_caching=True)
        self.scheduler = make_scheduler(limits, CacheSizes(4, 2000), ())
        self._numbers = itertools.count(1)

    def send(
        self, tenant: str, count: int = 1, prompt_len: int = 4, answer: int = 500, n: int = 1, priority: int = 0
    ) -> None:
        for number in itertools.islice(self._numbers, count):
            prompt = tuple(range(number * 1000, number * 1000 + prompt_len))
            params = SamplingParams(max_tokens=answer, temperature=0, n=n)
            asked = Request(f"r{number}", tenant, prompt, params, priority=priority)
            group = self.scheduler.new_group(asked, lambda _: None, seed=0, arrival_number=number, now=0.0)
            self.scheduler.retention.open(group)
            self.scheduler.add(group, ChoiceOutput(asked, 0, None))

    def step(self) -> Launch:
        launch = self.scheduler.plan(0.0)
        assert launch is not None
        rows = len(launch.plan.samples)
        result = StepResult(step=launch.plan.step, tokens=np.zeros(rows, np.int32), bad_rows=np.zeros(rows, np.bool_))
        self.scheduler.apply(launch, result, 0.0)
        return launch

    def steps(self, count: int) -> int:
        """Runs some; how often one had to give way."""
        return sum(self.step().num_preempted for _ in range(count))

    @property
    def running(self) -> dict[str, int]:
        return dict(Counter(s.group.request.tenant for s in self.scheduler._running))
