"""What a full queue tells those that it refuses."""

from __future__ import annotations

import pytest

from bequest.engine.scheduling.policy.pace import Pace


def paced(departures: int, seconds_each: float) -> Pace:
    pace = Pace()
    for number in range(departures):
        pace.departed(number * seconds_each)
    return pace


@pytest.mark.parametrize(
    "departures, seconds_each, max_queued, expected",
    [
        (0, 1.0, 100, 1.0),  # nothing is known
        (200, 0.001, 100, 1.0),  # never less than a second
        (200, 0.1, 400, 10.0),  # a quarter of 400, ten a second
        (200, 5.0, 400, 60.0),  # never more than a minute
    ],
)
def test_a_quarter_of_the_queue_at_the_latest_pace(
    departures: int, seconds_each: float, max_queued: int, expected: float
) -> None:
    pace = paced(departures, seconds_each)
    assert pace.seconds_to_try_again(max_queued, departures * seconds_each) == pytest.approx(expected)


def test_the_past_is_forgotten_and_silence_counts() -> None:
    pace = paced(200, 5.0)
    for number in range(64):
        pace.departed(1000.0 + number * 0.1)
    assert pace.seconds_to_try_again(400, 1006.4) == pytest.approx(10.0)
    assert pace.seconds_to_try_again(400, 1012.8) == pytest.approx(20.0), "nobody has left since"


def test_one_that_left_long_ago() -> None:
    assert paced(1, 1.0).seconds_to_try_again(100, 7.0) == 7.0
