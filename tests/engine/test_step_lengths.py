"""How long steps of nothing but extractions are, beside generations that come and go, on a counted clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.limits import ExtractionLimits, SchedulerLimits
from bequest.engine.scheduling.policy.clock import StepClock
from bequest.engine.scheduling.policy.quota import StepQuota
from bequest.engine.scheduling.ready import Ready, ready_of
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.state.draft import Draft
from bequest.engine.state.launch import Launch
from bequest.engine.state.sequence import Group
from bequest.engine.types import Request, SamplingParams
from bequest.engine.types.hidden import HiddenStatesParams
from tests.engine.harness import request
from tests.engine.paged_fake import NUM_LAYERS, PagedFakeRunner

SIZES = (16, 64, 256, 1024)


def device(fixed: float, per_token: float, num_tokens: int) -> float:
    """Seconds of a step: memory's time, or the arithmetic's."""
    return max(fixed, per_token * num_tokens)


def settle(clock: StepClock, fixed: float, per_token: float, now: float, steps: int = 50) -> list[int]:
    """The sizes of the next steps on such a device, with generations that have just been there."""
    clock.generates(now)
    taken = []
    for _ in range(steps):
        clock.ran("decode", 1, fixed)
        taken.append(clock.most_extracting(now))
        clock.ran("extraction", taken[-1], device(fixed, per_token, taken[-1]))
    return taken


@pytest.mark.parametrize(
    ("fixed", "per_token", "expected"),
    [
        (0.004, 25e-6, 256),  # two steps of generations are 8 ms: 320 tokens
        (0.004, 1e-6, 1024),  # nothing is too long
        (0.009, 1.2e-3, 16),  # 15 tokens, and there is no smaller size
        (0.0004, 4e-6, 256),  # a millisecond is nothing
    ],
)
def test_steps_become_as_long_as_two_of_generations(fixed: float, per_token: float, expected: int) -> None:
    taken = settle(StepClock(SIZES), fixed, per_token, 0.0)
    assert taken[0] == SIZES[-1] and set(taken[3:]) == {expected}


def test_where_nobody_generates_they_are_as_long_as_ever() -> None:
    clock = StepClock(SIZES)
    assert clock.most_extracting(0.0) == 1024, "nobody was there"
    assert settle(clock, 0.004, 25e-6, 10.0)[-1] == 256
    assert clock.most_extracting(12.0) == 256 and clock.most_extracting(16.0) == 1024
    clock.generates(16.0)
    assert clock.most_extracting(16.1) == 256, "what was learnt is known still"


def test_before_a_step_of_generations_is_known_nothing_is_too_long() -> None:
    clock = StepClock(SIZES)
    clock.generates(0.0)
    clock.ran("extraction", 1024, 1.0)
    assert clock.most_extracting(0.0) == 1024


def test_a_size_that_was_slow_once_gets_another_chance() -> None:
    clock = StepClock(SIZES)
    clock.ran("extraction", 256, 0.2)  # somebody else had the machine
    taken = settle(clock, 0.004, 25e-6, 0.0, steps=2000)
    assert taken[10] == 16 and taken.count(256) > 1000


def test_steps_that_say_nothing_of_a_size() -> None:
    clock = StepClock(SIZES)
    clock.generates(0.0)
    clock.ran("decode", 1, 0.004)
    clock.ran("extraction", 1024, 0.025)
    clock.ran("extraction", 100, 0.002)  # not the most that 256 take
    clock.ran("extraction", 4000, 9.0)
    assert clock.most_extracting(0.0) == 256


class Clocked:
    """A scheduler over a device of the first kind above, or another one."""

    def __init__(self, extraction: ExtractionLimits, seconds: Callable[[int], float] | None = None) -> None:
        self.seconds = seconds or partial(device, 0.004, 25e-6)
        self.scheduler: Scheduler = make_scheduler(
            SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=512, prefix_caching=True, extraction=extraction),
            CacheSizes(16, 1000),
            (),
        )
        self.runner = PagedFakeRunner(1000, 16)
        self.now = 100.0
        self.arrivals = 0

    def add(self, asked: Request) -> Group:
        self.arrivals += 1
        group = self.scheduler.new_group(asked, lambda _: None, seed=0, arrival_number=self.arrivals, now=self.now)
        self.scheduler.retention.open(group)
        self.scheduler.add(group, ChoiceOutput(asked, 0, None))
        return group

    def step(self) -> Launch | None:
        launch = self.scheduler.plan(self.now)
        if launch is not None:
            seconds = self.seconds(launch.plan.num_tokens)
            result = msgspec.structs.replace(self.runner.launch(launch.plan), device_seconds=seconds)
            self.now += seconds
            self.scheduler.apply(launch, result, self.now)
        return launch


def test_the_steps_of_an_engine() -> None:
    """Long before the first generation, beside it what it does not notice, short after it, and long again."""
    clocked = Clocked(ExtractionLimits(share=0.1, max_step_tokens=512, short_steps=(64, 256)))
    wanted = HiddenStatesParams((NUM_LAYERS,), "all")
    for i in range(20):
        prompt = [20 + i] * 400
        clocked.add(request(prompt, SamplingParams(max_tokens=0), hidden_states=wanted))

    def extracted() -> int:
        launch = clocked.step()
        assert launch is not None and launch.nature == "extraction"
        return launch.plan.num_tokens

    assert extracted() == 512
    generation = clocked.add(request([7] * 30, SamplingParams(max_tokens=20, temperature=0)))
    beside, began, steps = 0, clocked.now, 0
    while not generation.finished:
        launch = clocked.step()
        assert launch is not None and launch.nature != "extraction"
        beside += launch.num_extracted
        steps += 1
    assert beside > 500 and clocked.now - began == pytest.approx(0.004 * steps)
    assert extracted() == 256
    assert extracted() == 256
    clocked.now += 10
    assert extracted() == 512


def costs(num_tokens: int) -> float:
    """Seconds on a device where each token costs something. One of 32 tokens takes less than two of a few."""
    return 0.003 + 0.0001 * num_tokens


def streaming() -> Clocked:
    """Two generations without end, past their prompts."""
    clocked = Clocked(ExtractionLimits(share=0.1, max_step_tokens=512), costs)
    params = SamplingParams(max_tokens=500, temperature=0)
    for i in range(2):
        clocked.add(request([7 + i] * 30, params))
    for _ in range(10):
        clocked.step()
    return clocked


def want(clocked: Clocked, num_tokens: int, first: int = 100) -> Group:
    wanted = HiddenStatesParams((NUM_LAYERS,), "all")
    return clocked.add(request([first] * num_tokens, SamplingParams(max_tokens=0), hidden_states=wanted))


def test_they_have_a_share_of_the_time_beside_streams() -> None:
    """Few streams have few tokens: a share of these would be nothing."""
    clocked = streaming()
    for i in range(20):
        want(clocked, 400, 100 + i)
    began, steps, extracted, long = clocked.now, 300, 0, 0
    for _ in range(steps):
        launch = clocked.step()
        assert launch is not None and len(launch.plan.samples) == 2, "streams are in every step"
        extracted += launch.num_extracted
        long += costs(launch.plan.num_tokens) > 2 * costs(2)
    longer = clocked.now - began - steps * costs(2)
    assert longer == pytest.approx(0.0001 * extracted)
    assert longer / (clocked.now - began) == pytest.approx(0.1, rel=0.1)
    assert long <= 3, "to learn what they cost, and now and then again"
    assert extracted > 5 * 0.1 * 2 * steps, "of their tokens it would be this at most"


def test_a_short_one_is_in_the_next_step() -> None:
    clocked = streaming()
    for first in (100, 101):
        group = want(clocked, 24, first)
        launch = clocked.step()
        assert launch is not None and launch.num_extracted == 24 and group.finished
        waited, other = 0, want(clocked, 24, first + 50)
        while not other.finished:
            launch = clocked.step()
            assert launch is not None
            waited += launch.num_extracted == 0
        assert 6 <= waited <= 8, "2.4 ms are a ninth of seven steps"
        for _ in range(20):
            clocked.step()


def test_who_waits_for_a_first_token_does_not_wait_for_them() -> None:
    clocked = streaming()
    want(clocked, 24)
    clocked.add(request([9] * 200, SamplingParams(max_tokens=5, temperature=0)))
    prompt = extracted = 0
    while prompt < 200:
        launch = clocked.step()
        assert launch is not None
        prompt += launch.num_prompt_tokens - launch.num_extracted
        extracted += launch.num_extracted
        assert extracted <= 0.12 * prompt, "their share of the tokens, as ever"


@pytest.mark.parametrize("streams", [True, False])
def test_they_owe_nothing_for_a_step_that_nobody_waits_for(streams: bool) -> None:
    """Which has their share of the tokens while the generations wait for a result."""
    clocked = streaming()
    extractions, clock = clocked.scheduler.extractions, clocked.scheduler.clock
    extractions._share.settle(1000, 0, 512)
    ready = ready_of(clocked.scheduler._running) if streams else Ready([], [], [])
    draft = Draft(clocked.now, clocked.scheduler._step_limits, StepQuota(), 512, 100)

    def fill() -> None:
        draft.budget -= 5

    assert extractions.take_share(draft, fill, ready, 0) == 5
    assert (extractions._time.due(512, 2) == 0) == streams
    assert clock.decode_seconds is not None
    extractions._time.ran(100 * clock.decode_seconds, 0.0)
    assert extractions._time.due(512, 2) > 0
