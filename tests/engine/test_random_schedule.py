"""20,000 random steps of the scheduler over the paged fake: invariants after each, all tokens against the oracle.

Many short worlds rather than few long ones: a world draws its shape once, and faults are found by shapes. Of 37 random
changes to the scheduler and the cache twenty worlds of 250 steps found 23, and worlds of 1,000 steps none of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.engine.world import World

RUNS = 20
STEPS_PER_RUN = 300
STEPS_OF_OTHERS = 200  # windows, encoders, recurrent layers: each kind has twenty shapes, too


# Of the strips of a cache: beside one that keeps all tokens, several, without any such, tiny and almost wide ones.
WINDOWS = [(0, 4), (0, 1, 9), (0, 0, 30), (6,), (2, 17), (0, 3, 3, 3)]


def run(seed: int, steps: int, most_encoder: int = 0, windows: tuple[int, ...] = (0,)) -> World:
    return drive(World(seed, most_encoder, windows), steps)


def drive(world: World, steps: int) -> World:
    draw = world.draw
    for _ in range(steps):
        if draw.random() < 0.3 and len(world.open) < 30:
            world.arrive()
        if draw.random() < 0.02:
            world.leave()
        if draw.random() < 0.05:
            world.meddle()
        world.pass_time()
        launched = world.launch()
        world.check()
        if not launched or draw.random() < 0.5:
            world.apply()
            world.check()
    world.finish_everything()
    return world


def unseen(events: Iterable[str], worlds: Iterable[World]) -> set[str]:
    """Those that happen in no world. Goes no further than it needs: where most happens stands first."""
    left = set(events)
    for world in worlds:
        left -= {event for event, times in world.seen.items() if times > 0}
        if not left:
            break
    return left


@pytest.mark.parametrize("seed", range(RUNS))
def test_random_steps(seed: int) -> None:
    assert run(seed, STEPS_PER_RUN).seen["finished"] > 20


def test_the_worlds_see_everything() -> None:
    """The seeds are not so kind that something never happens."""
    events = {"blocks", "host", "leased", "refused", "preempted", "swapped out", "swapped in", "aborted", "late"}
    events |= {"NaN", "forgotten", "not prolonged", "beams", "searched", "cut", "extracted", "with states", "scored"}
    events |= {"drafted", "drafted with states", "answered as one", "answered one by one"}
    assert not unseen(events, (run(seed, 300) for seed in (108, 115, *range(100, 107))))


@pytest.mark.parametrize("windows", [(0,), (0, 4)])
@pytest.mark.parametrize("seed", range(600, 608))
def test_random_steps_that_pass_extractions(seed: int, windows: tuple[int, ...]) -> None:
    assert drive(World(seed, windows=windows, yields=True), STEPS_OF_OTHERS).seen["finished"] > 10


def test_some_steps_pass_extractions_and_some_cannot() -> None:
    events = {"passed", "could not pass", "aborted", "preempted", "searched", "extracted"}
    assert not unseen(events, (drive(World(seed, yields=True), 300) for seed in range(600, 612)))


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(400, 404))
def test_random_steps_with_windows(seed: int, windows: tuple[int, ...]) -> None:
    assert run(seed, STEPS_OF_OTHERS, windows=windows).seen["finished"] > 10


def test_the_worlds_with_windows_see_everything() -> None:
    events = {"blocks", "host", "leased", "preempted", "swapped out", "swapped in", "searched", "extracted"}
    events |= {"windows of leases", "with states", "drafted"}
    worlds = sorted(enumerate(WINDOWS * 2, 500), reverse=True, key=lambda world: world[0] == 509)
    assert not unseen(events, (run(seed, 300, windows=windows) for seed, windows in worlds))


@pytest.mark.parametrize("seed", range(200, 200 + RUNS))
def test_random_steps_of_an_encoder_decoder_model(seed: int) -> None:
    assert run(seed, STEPS_OF_OTHERS, most_encoder=50).seen["finished"] > 10


def test_the_worlds_with_encoders_see_everything() -> None:
    events = {"blocks", "host", "leased", "preempted", "swapped in", "encoded", "shared", "cross on the host"}
    events |= {"states of an encoder"}
    assert not unseen(events, (run(seed, 300, most_encoder=50) for seed in (336, *range(330, 340))))


# In the first, a search is cut while a step of its beams is under way: late.
@pytest.mark.parametrize(("seed", "steps"), [(307, 500), *((400 + run, STEPS_OF_OTHERS) for run in range(RUNS))])
def test_random_steps_of_a_model_with_recurrent_layers(seed: int, steps: int) -> None:
    assert drive(World(seed, recurrent=True), steps).seen["finished"] > 5


def test_the_worlds_with_recurrent_layers_see_everything() -> None:
    events = {"leased", "states out", "states in"}
    assert not unseen(events, (drive(World(seed, recurrent=True), 300) for seed in range(300, 312)))
