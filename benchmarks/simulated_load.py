"""The scheduler under load, on a clock that is only counted: what its decisions alone do to waiting times.

    python -m benchmarks.simulated_load [--seconds 120]

Two devices: one with 32 slots that takes 8 ms for a step and 40 µs per token, and one with 8 slots that takes 7 ms and
0.85 ms per token, what two cores need for the embedded model. Two steps are in flight, as in the engine. The same
figures as benchmarks/overload.py gives of a whole server, but the same on every machine.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning
from bequest.engine.scheduling.results import Samples
from bequest.engine.state.launch import Launch
from bequest.engine.types import Request, SamplingParams, StepPlan, StepResult, Terms

DEPTH = 2
AT_ONCE = 8  # requests that are read each time the event loop goes around
PROMPT, OUTPUT = (16, 120), (16, 80)  # tokens; from, to


@dataclass(frozen=True)
class Device:
    slots: int
    queue: int  # most that wait
    budget: int  # tokens of a step
    step_seconds: float
    token_seconds: float
    prompt_pace: float  # as in SchedulerLimits
    blocks: int = 4000  # of 16 tokens
    tuning: Tuning = DEFAULT

    def seconds(self, plan: StepPlan) -> float:
        return self.step_seconds + self.token_seconds * plan.num_tokens


@dataclass(frozen=True)
class Host:
    """Seconds of the event loop."""

    step: float = 0.0
    token: float = 0.0  # that is streamed
    request: float = 0.0


FREE = Host()
WIDE = Device(slots=32, queue=128, budget=256, step_seconds=0.008, token_seconds=40e-6, prompt_pace=2.0)
NARROW = Device(slots=8, queue=32, budget=128, step_seconds=0.007, token_seconds=0.85e-3, prompt_pace=0.625)


@dataclass
class Figures:
    """Of one tenant."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    answered: int = 0
    refused: int = 0

    def p99(self, values: list[float]) -> float:
        return float(np.percentile(values, 99))


class Simulation:
    def __init__(self, device: Device, seed: int, host: Host = FREE) -> None:
        self.now = 0.0
        self._device, self._host = device, host
        self._sent: dict[int, float] = {}  # by the numbers of requests
        self.figures: dict[str, Figures] = {}
        self._seed = seed
        self._scheduler = make_scheduler(
            SchedulerLimits(
                max_num_seqs=device.slots,
                max_num_batched_tokens=device.budget,
                prefix_caching=True,
                prompt_pace=device.prompt_pace,
                tuning=device.tuning,
            ),
            CacheSizes(16, device.blocks),
            (),
            wall=lambda: self.now,
        )
        self._launched: deque[tuple[Launch, float, float]] = deque()  # when the device is done, and what it takes
        self._arrivals: list[tuple[float, int, str, tuple[int, ...], int]] = []  # heap; number, tenant, prompt, answer
        self._numbers = itertools.count(1)
        self._free_at = 0.0  # when the device has done what is launched

    def expect_tenants(self, count: int) -> None:
        self._scheduler.waiting.expected_tenants = count

    def arrive(self, tenant: str, rate: float, seconds: float) -> None:
        """Requests of a tenant at random times from now on: the same, whoever else sends some."""
        draw = random.Random(f"{self._seed} {tenant}")
        at, end = self.now, self.now + seconds
        while (at := at + draw.expovariate(rate)) < end:
            prompt = tuple(draw.randrange(30000) for _ in range(draw.randint(*PROMPT)))
            heapq.heappush(self._arrivals, (at, next(self._numbers), tenant, prompt, draw.randint(*OUTPUT)))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self._admit()
            due = self._launch_steps()
            coming = self._arrivals[0][0] if self._arrivals else end
            done = self._launched[0][1] if self._launched else end
            self.now = max(self.now, min(coming, done, due, end))  # the host may have taken until later
            if self._launched and done <= self.now:
                self._scheduler.clock.computed(self.now)
                launch, _, seconds = self._launched.popleft()
                self._apply(launch, seconds)

    def _launch_steps(self) -> float:
        """Returns when the next one is to be planned, if nothing happens before."""
        while len(self._launched) < DEPTH:
            if (seconds := self._scheduler.clock.seconds_until_due(self.now)) > 0:
                return self.now + seconds
            if (launch := self._scheduler.plan(self.now)) is None:
                break
            self._scheduler.clock.launched(launch.plan, self.now)
            seconds = self._device.seconds(launch.plan)
            self._free_at = max(self._free_at, self.now) + seconds
            self._launched.append((launch, self._free_at, seconds))
        return math.inf

    def _admit(self) -> None:
        for _ in range(AT_ONCE):
            if not self._arrivals or self._arrivals[0][0] > self.now:
                return
            self.now += self._host.request
            sent, number, tenant, prompt, answer = heapq.heappop(self._arrivals)
            self._sent[number] = sent
            figures = self.figures.setdefault(tenant, Figures())
            if not self._scheduler.waiting.has_room(tenant, self._device.queue):
                figures.refused += 1
                continue
            params = SamplingParams(max_tokens=answer, temperature=0)
            request = Request(f"r{number}", tenant, prompt, params, terms=Terms(keep_record=False))
            group = self._scheduler.new_group(request, lambda _: None, seed=0, arrival_number=number, now=self.now)
            self._scheduler.retention.open(group)
            self._scheduler.add(group, ChoiceOutput(request, 0, None))

    def _apply(self, launch: Launch, seconds: float) -> None:
        [samples] = [part for part in launch.expected if isinstance(part, Samples)]
        before = {s: s.last_token_at for s in samples.sequences}
        applied, now = self._scheduler.apply(launch, zeros(launch.plan, seconds), self.now), self.now
        self.now += self._host.step + self._host.token * len(before)
        for sequence, last in before.items():
            figures = self.figures[sequence.group.request.tenant]
            if sequence.last_token_at == now:
                if last:
                    figures.between.append(now - last)
                else:
                    figures.first.append(self.now - self._sent[sequence.group.arrival_number])
        for group in applied.moved:
            if group.finished and not group.closed:
                self._scheduler.close(group)
                self._scheduler.retention.close(group, True, self.now)
                self.figures[group.request.tenant].answered += 1
                self._answered()

    def _answered(self) -> None:
        """A client has its whole answer."""


def zeros(plan: StepPlan, seconds: float) -> StepResult:
    rows = len(plan.samples)
    tokens, bad = np.zeros(rows, np.int32), np.zeros(rows, np.bool_)
    return StepResult(step=plan.step, tokens=tokens, bad_rows=bad, device_seconds=seconds)


def capacity(device: Device, seconds: float) -> float:
    """Requests per second that can be answered."""
    world = Simulation(device, 0)
    world.arrive("all", 1000.0, seconds)
    world.run(seconds)
    return world.figures["all"].answered / seconds


def loaded(device: Device, seconds: float, **rates: float) -> dict[str, Figures]:
    """Tenants that send at these rates."""
    world = Simulation(device, 1)
    world.expect_tenants(len(rates))
    for tenant, rate in rates.items():
        world.arrive(tenant, rate, seconds)
    world.run(seconds)
    return world.figures


@dataclass(frozen=True)
class Ratios:
    inter_token: float  # p99 at twice the capacity, by that at half of it
    light_first: float  # a light tenant's p99 beside one that sends twice the capacity, by that alone
    refused: int  # at twice the capacity
    light_refused: int


def loads(most: float) -> dict[str, dict[str, float]]:
    """What is sent, by a device that can answer `most` requests per second."""
    return {
        "half of capacity": {"one": most * 0.5},
        "twice the capacity": {"one": most * 2},
        "light alone": {"light": most * 0.1},
        "light, half loaded": {"light": most * 0.1, "heavy": most * 0.4},
        "light, overloaded": {"light": most * 0.1, "heavy": most * 2},
    }


def ratios(seen: dict[str, dict[str, Figures]]) -> Ratios:
    half, twice = seen["half of capacity"]["one"], seen["twice the capacity"]["one"]
    alone, crowded = seen["light alone"]["light"], seen["light, overloaded"]["light"]
    return Ratios(
        inter_token=twice.p99(twice.between) / half.p99(half.between),
        light_first=crowded.p99(crowded.first) / alone.p99(alone.first),
        refused=twice.refused,
        light_refused=crowded.refused,
    )


def measure(device: Device, seconds: float) -> dict[str, dict[str, Figures]]:
    """The figures of every load, by tenant."""
    most = capacity(device, seconds / 4)
    return {name: loaded(device, seconds, **rates) for name, rates in loads(most).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="of each load, on the counted clock")
    whole = parser.parse_args().seconds
    for device, seconds in ((WIDE, whole), (NARROW, whole * 10)):  # the narrow one answers fewer
        print(f"{device}: capacity {capacity(device, seconds / 4):.1f} requests/s")
        print(f"{'load':>34}{'answered':>10}{'429':>8}{'itl p50':>9}{'itl p99':>9}{'ttft p50':>10}{'ttft p99':>10}  ms")
        seen = measure(device, seconds)
        for name, tenants in seen.items():
            for tenant, figures in tenants.items():
                times = (np.percentile(v, q) * 1e3 for v in (figures.between, figures.first) for q in (50, 99))
                shown = "".join(f"{time:{width}.1f}" for time, width in zip(times, (9, 9, 10, 10), strict=True))
                print(f"{name + ': ' + tenant:>34}{figures.answered:>10}{figures.refused:>8}{shown}")
        print(ratios(seen))


if __name__ == "__main__":
    main()
