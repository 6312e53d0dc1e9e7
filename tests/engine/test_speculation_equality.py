"""Random requests with drafts and without: `python -m benchmarks.speculation_equality` in small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.speculation_equality import METHODS, compare


async def test_drafts_change_nothing(tiny_model: Callable[[str], Path]) -> None:
    counts = await compare(str(tiny_model("llama")), 2500, 3, METHODS)
    assert counts["off"]["drafted"] == 0 and counts["off"]["preempted"] > 0
    for method in METHODS:
        assert counts[method]["drafted"] > counts[method]["accepted"] > 20, method
