"""The statistics, the comparisons and the table of `bequest bench`."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bequest.bench.checks import Differences, gap, lease_honoured, same
from bequest.bench.client import Answer, Choice
from bequest.bench.report import summarise, table
from bequest.bench.tables import percentile
from bequest.bench.two_stage import JobResult, Mode


def answer(*choices: Choice, seconds: float = 1.0, **fields: Any) -> Answer:
    usage = {"prompt_tokens": 8, "completion_tokens": 2}
    given = {"id": "cmpl-1", "usage": usage, "continuation": None, "retained": None} | fields
    return Answer(choices=choices, first_seconds=seconds, total_seconds=2 * seconds, **given)


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=40))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")
    for share in (1, 50, 90, 99):
        assert percentile(values, share) == pytest.approx(expected[share - 1])


def test_percentiles_of_one_value() -> None:
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0


def test_percentiles_at_the_ends() -> None:
    assert percentile([2.0, 1.0, 3.0], 0) == 1.0 and percentile([2.0, 1.0, 3.0], 100) == 3.0


def test_greedy_answers() -> None:
    expected = answer(Choice("a", (1, 2, 3), (-0.1, -0.2, -0.3)))
    assert same(expected, answer(Choice("b", (1, 2, 3))), 0), "the same tokens are the same, whatever the text"
    other = answer(Choice("a", (1, 9, 8), (-0.1, -0.21, -5.0)))
    assert not same(expected, other, 0)
    assert same(expected, other, 0.02), "a tie at the second token; what follows it may be anything"
    assert not same(expected, other, 0.001)
    assert gap(expected, expected) is None and 0.001 < (gap(expected, other) or 0) <= 0.02
    assert gap(expected, answer()) == float("inf")
    assert not same(expected, answer(Choice("a", (1, 2))), 0.02)
    assert not same(expected, answer(Choice("a", (1, 9, 8))), 0.02), "no log-probabilities to tell"
    assert not same(expected, answer(), 0.02)


def test_answers_without_token_ids() -> None:
    assert same(answer(Choice("a")), answer(Choice("a")), 0)
    assert not same(answer(Choice("a")), answer(Choice("b")), 0.1)


def test_beams() -> None:
    def beams(*scores: tuple[int, float]) -> Answer:
        return answer(*(Choice("", (token,), cumulative_logprob=score) for token, score in scores))

    expected = beams((1, -1.0), (2, -1.001), (3, -4.0))
    swapped = beams((2, -1.0), (1, -1.001), (3, -4.0))
    assert same(expected, expected, 0) and not same(expected, swapped, 0) and same(expected, swapped, 0.01)
    assert not same(expected, beams((1, -1.0), (2, -1.001), (4, -4.1)), 0.01)


@pytest.mark.parametrize(
    "source, computed, retained, honoured",
    [
        ("blocks", 4, True, True),
        ("host", 4, True, True),
        ("prefix_cache", 4, True, False),
        ("recompute", 4, True, False),
        ("blocks", 3, True, False),
        ("blocks", 5, True, False),
        ("blocks", 4, False, False),
    ],
)
def test_leases(source: str, computed: int, retained: bool, honoured: bool) -> None:
    stage1 = answer(Choice("", (1, 2)), retained={"id": "cmpl-1"} if retained else None)
    told = {"source": source, "computed_tokens": computed}
    stage2 = answer(Choice("", (3,)), continuation=told, usage={"prompt_tokens": 13, "completion_tokens": 1})
    result = JobResult(0, stage1, stage2, whole="")
    assert lease_honoured(result, (7, 8, 9)) is honoured
    assert lease_honoured(result, " three words here") is honoured, "counted from the usage"


def results(seconds: list[float], computed: int) -> list[JobResult]:
    told = {"source": "blocks", "computed_tokens": computed}
    return [JobResult(i, answer(), answer(seconds=s, continuation=told), whole="") for i, s in enumerate(seconds)]


def test_rows_and_the_table() -> None:
    resend = summarise(8, Mode.RESEND, results([1.0, 3.0, 2.0], 700), Differences(), None)
    row = summarise(8, Mode.LEASE, results([0.1, 0.3, 0.2], 6), Differences(1, 2, 3), resend)
    assert row.first_ms[50] == pytest.approx(200) and row.first_ms[90] == pytest.approx(280)
    assert row.total_ms[50] == pytest.approx(400) and row.speed_up == pytest.approx(10)
    title, rule, first, second = table([resend, row], beams=False).splitlines()
    assert "first token, ms: p50" in title and set(rule) == {"─"}
    assert first.split()[:5] == ["8", "re-send", "2,000.0", "2,800.0", "2,980.0"]
    assert first.split()[5:] == ["4,000.0", "5,960.0", "700", "3", "blocks", "–", "0"]
    assert second.split()[4:] == ["200.0", "280.0", "298.0", "400.0", "596.0", "6", "3", "blocks", "10.0×", "6"]
    assert "stage 2, ms: p50" in table([row], beams=True)
