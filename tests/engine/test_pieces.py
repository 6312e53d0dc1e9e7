"""Prompts beside streams: in pieces by what a step may cost, by who is there and by what waits. On a counted clock."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.bursts import SHAPES, measure
from benchmarks.simulated_load import zeros
from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.scheduling.policy.clock import StepClock
from bequest.engine.scheduling.policy.costs import SizeCosts
from bequest.engine.scheduling.policy.pieces import Demand, PromptPieces
from bequest.engine.scheduling.policy.tuning import DEFAULT, OFF, Tuning
from bequest.engine.types import Request, SamplingParams, StepPlan, Terms
from bequest.engine.types.image import FIRST_ID, Image, PreparedImage
from bequest.engine.types.request import Lineage

SIZES = (16, 64, 256, 1024)


def gpu(num_tokens: int) -> float:
    """Seconds of a step: memory's time, or the arithmetic's."""
    return max(0.004, 0.0025 + 20e-6 * num_tokens)


# --- what a size costs -------------------------------------------------------------------------------------------


def test_a_size_is_found_within_a_few_steps() -> None:
    costs = SizeCosts(SIZES)
    tried = []
    for _ in range(6):
        tried.append(costs.most_within(0.010))
        costs.note(tried[-1], gpu(tried[-1]))
    assert tried == [1024, 256, 256, 256, 256, 256]


def test_what_is_larger_takes_no_less() -> None:
    costs = SizeCosts(SIZES)
    costs.note(64, 0.050)
    assert costs.most_within(0.040) == 16, "256 was not seen, and takes as long as 64"


def test_the_shortest_of_the_latest_steps_counts() -> None:
    costs = SizeCosts(SIZES)
    for seconds in (0.005, 0.500, 0.006):
        costs.note(1024, seconds)
    assert costs.most_within(0.005) == 1024
    for _ in range(4):
        costs.note(1024, 0.020)
    assert costs.most_within(0.005) == 256, "a device that became slower"


def test_what_was_too_long_is_tried_again() -> None:
    costs = SizeCosts(SIZES)
    costs.note(256, 0.016)
    steps = next(i for i in range(1000) if costs.note(64, 0.004) or costs.most_within(0.008) >= 256)
    assert 100 < steps < 200


@pytest.mark.parametrize(("tokens", "expected"), [(7, 7), (16, 16), (63, 16), (64, 64), (5000, 1024)])
def test_the_largest_size_that_has_no_more_tokens(tokens: int, expected: int) -> None:
    assert SizeCosts(SIZES).at_most(tokens) == expected


# --- how large a piece is ----------------------------------------------------------------------------------------


def pieces(decode: float | None = 0.004, tuning: Tuning = DEFAULT) -> PromptPieces:
    clock = StepClock(mixed_sizes=(8, *SIZES), tuning=tuning)
    for size in SIZES:
        clock.ran("mixed", size, gpu(size))
    if decode is not None:
        clock.ran("decode", 1, decode)
    return PromptPieces(clock, tuning)


def test_a_step_takes_no_longer_than_a_few_without_prompts() -> None:
    demand = Demand(num_streams=20, rows=20, num_waiting=1, backlog=500)
    assert pieces(decode=0.0080).tokens_of_step(1024, demand) == 256 - 20
    assert pieces(decode=0.0200).tokens_of_step(1024, demand) == 1024 - 20
    assert pieces(decode=0.0200).tokens_of_step(100, demand) == 100, "no more than there is"


def test_some_milliseconds_are_nothing() -> None:
    demand = Demand(num_streams=4, rows=4, num_waiting=0, backlog=500)
    assert pieces(decode=0.0001).tokens_of_step(1024, demand) == 256 - 4


def test_a_burst_is_computed_before_its_first_ones_delay_it() -> None:
    few = Demand(num_streams=4, rows=4, num_waiting=1, backlog=500)
    for waiting in (1, 3):
        assert pieces(decode=0.005).tokens_of_step(1024, replace(few, num_waiting=waiting)) == 256 - 4
    for waiting in (4, 8):
        assert pieces(decode=0.005).tokens_of_step(1024, replace(few, num_waiting=waiting)) == 1024


def test_beams_that_fill_a_size_leave_prompts_some_tokens() -> None:
    demand = Demand(num_streams=2, rows=300, num_waiting=1, backlog=500)
    assert pieces(decode=0.002).tokens_of_step(2048, demand) == DEFAULT.piece_tokens, "256 have no room for 300"


def test_each_open_request_makes_room() -> None:
    assert pieces().tokens_of_step(2048, Demand(30, 30, num_waiting=2, backlog=500)) == 256 - 30
    assert pieces().tokens_of_step(2048, Demand(120, 120, num_waiting=8, backlog=500)) == 1024 - 120
    assert pieces().tokens_of_step(2048, Demand(10, 120, num_waiting=1, backlog=500)) == 256 - 120, "of beams"


def test_a_backlog_makes_steps_long() -> None:
    assert pieces().tokens_of_step(2048, Demand(4, 4, num_waiting=1, backlog=8000)) == 256 - 4
    assert pieces().tokens_of_step(2048, Demand(4, 4, num_waiting=1, backlog=50_000)) == 1024 - 4


def test_all_is_for_prompts_where_nobody_waits_for_them_or_nothing_is_known() -> None:
    demand = Demand(num_streams=4, rows=4, num_waiting=1, backlog=500)
    assert pieces().tokens_of_step(1024, replace(demand, num_streams=0)) == 1024
    assert pieces(decode=None).tokens_of_step(1024, demand) == 1024
    assert pieces(tuning=replace(DEFAULT, piece_cost=OFF)).tokens_of_step(1024, demand) == 1024 - 4


# --- in a scheduler ----------------------------------------------------------------------------------------------


class Steps:
    """A scheduler over the device above."""

    def __init__(self) -> None:
        limits = SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=1024, prefix_caching=True)
        self.scheduler = make_scheduler(limits, CacheSizes(16, 4000), ())
        self._numbers = itertools.count(1)

    def send(self, prompt_len: int, answer: int = 400, lineage: Lineage | None = None, image: bool = False) -> None:
        number = next(self._numbers)
        prompt = tuple(range(number * 5000, number * 5000 + prompt_len))
        params, terms = SamplingParams(max_tokens=answer, temperature=0), Terms(keep_record=False, lineage=lineage)
        asked = Request(f"r{number}", "one", prompt, params, terms=terms)
        if image:
            pixels = PreparedImage(np.zeros((1, 2, 2, 3), np.uint8), (prompt_len,), 4)
            seen = Image.of(pixels, FIRST_ID, lambda text: ())
            asked = replace(asked, prompt_token_ids=seen.token_ids, images=(seen,))
        group = self.scheduler.new_group(asked, lambda _: None, seed=0, arrival_number=number, now=0.0)
        self.scheduler.retention.open(group)
        self.scheduler.add(group, ChoiceOutput(asked, 0, None))

    def step(self) -> StepPlan:
        launch = self.scheduler.plan(0.0)
        assert launch is not None
        self.scheduler.apply(launch, zeros(launch.plan, gpu(launch.plan.num_tokens)), 0.0)
        return launch.plan

    def sizes(self, count: int) -> list[int]:
        return [self.step().num_tokens for _ in range(count)]


def test_the_steps_of_a_prompt_beside_a_stream() -> None:
    steps = Steps()
    steps.send(900)
    steps.send(20)
    steps.sizes(8)
    steps.send(900)
    seen = steps.sizes(12)
    # Steps of 8 ms; 1,024 took 23. The first one tries a size that nobody has seen.
    assert seen[0] <= 512 and max(seen[1:]) <= 256 and seen[-1] == 3 and sum(seen) == 900 + 24 + seen.count(3), seen
    assert 3 <= sum(size > 3 for size in seen) <= 5, seen


def test_a_prompt_whose_image_is_looked_at_is_not_cut() -> None:
    steps = Steps()
    steps.send(900)
    steps.send(20)
    steps.sizes(8)
    steps.send(900, image=True)
    assert steps.sizes(2) == [902, 3], "streams wait for the tower already"


def test_what_waits_counts_as_far_as_there_are_slots() -> None:
    steps = Steps()
    for _ in range(14):
        steps.send(20)
    steps.sizes(4)
    for _ in range(40):
        steps.send(1000)
    assert steps.sizes(1)[0] <= 256, "two of them have slots; of all forty it would be 1,024"
    waiting = steps.scheduler.waiting
    assert waiting.num_tokens == 1000 * len(waiting)


def test_a_continuation_waits_with_what_it_adds() -> None:
    steps = Steps()
    steps.send(900, lineage=Lineage("parent", 0, 880))
    assert steps.scheduler.waiting.num_tokens == 20
    steps.step()
    assert steps.scheduler.waiting.num_tokens == 0


@pytest.mark.parametrize(("connections", "answer", "between"), [(64, 192, 0.6), (256, 8, 1.01)])
def test_a_burst(connections: int, answer: int, between: float) -> None:
    """Pieces make the steps of 64 streams short, and cost a burst of 256 nothing."""
    gpu = SHAPES["llama-3.1-8b"]
    off = measure(replace(gpu, tuning=replace(DEFAULT, piece_cost=OFF)), connections, 2, answer)
    on = measure(gpu, connections, 2, answer)
    assert on["itl_p99_ms"] < between * off["itl_p99_ms"]
    assert on["ttft_p99_ms"] < 1.2 * off["ttft_p99_ms"]
    assert on["tokens_per_second"] > 0.92 * off["tokens_per_second"], "of one burst; in the long run it is more"
