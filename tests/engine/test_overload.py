"""Overload on a counted clock: who was let in keeps its pace, and a light tenant does not feel a heavy one."""

from __future__ import annotations

from benchmarks.simulated_load import capacity, loaded, ratios

SECONDS = 8.0


def test_paces_hold_under_twice_the_load() -> None:
    seen = ratios(SECONDS)
    assert seen.inter_token < 1.5 and seen.light_first < 2.0, seen
    assert seen.refused > 0 and seen.light_refused == 0, seen


def test_it_is_fairness_that_does_it() -> None:
    """The same requests under one name wait for each other."""
    most = capacity(SECONDS / 4)
    apart = loaded(SECONDS, heavy=most * 2.0, light=most * 0.1)["light"]
    together = loaded(SECONDS, one=most * 2.1)["one"]
    assert together.p99(together.first) > 10 * apart.p99(apart.first)
