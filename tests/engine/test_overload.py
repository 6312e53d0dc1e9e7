"""Overload on a counted clock: who was let in keeps its pace, and a light tenant does not feel a heavy one."""

from __future__ import annotations

import pytest

from benchmarks.simulated_load import NARROW, WIDE, Device, loaded, measure, ratios


@pytest.mark.parametrize(("device", "seconds"), [(WIDE, 6.0), (NARROW, 30.0)])
def test_paces_hold_under_twice_the_load(device: Device, seconds: float) -> None:
    seen = ratios(measure(device, seconds))
    assert seen.inter_token < 1.5 and seen.light_first < 2.0, seen
    assert seen.refused > 0 and seen.light_refused == 0, seen


def test_it_is_fairness_that_does_it() -> None:
    """The same requests under one name wait for each other."""
    apart = loaded(WIDE, 6.0, heavy=120.0, light=6.0)["light"]
    together = loaded(WIDE, 6.0, one=126.0)["one"]
    assert together.p99(together.first) > 10 * apart.p99(apart.first)
