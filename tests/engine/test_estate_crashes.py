"""A few of the kills that `python -m benchmarks.estate_crashes` makes a thousand of."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.estate_crashes import crashes


@pytest.mark.timeout(300)
def test_what_was_promised_outlives_kills(tmp_path: Path) -> None:
    crashes(2, seed=3, folder=tmp_path)
    figures = crashes(4, seed=3, folder=tmp_path)
    assert figures["kills"] == 4 and figures["wrong"] == 0
    assert figures["promised"] > 0 and figures["continued"] > 0
