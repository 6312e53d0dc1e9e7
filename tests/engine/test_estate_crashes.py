"""A few of the kills that `python -m benchmarks.estate_crashes` makes a thousand of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_what_was_promised_outlives_kills(tmp_path: Path) -> None:
    _crashes(2, tmp_path)
    # As a kill in the middle of a write leaves them.
    for file, torn in (("promised", '{"id": "torn-id", "tokens": [1, 2'), ("forgotten", "run1-2")):
        with (tmp_path / file).open("a") as lines:
            lines.write(torn)
    figures = _crashes(4, tmp_path)
    assert figures["kills"] == 4 and figures["wrong"] == 0
    assert figures["promised"] > 0 and figures["continued"] > 0


def _crashes(kills: int, folder: Path) -> dict[str, int]:
    """In a process without threads: it forks the servers that it kills."""
    command = [sys.executable, "-m", "benchmarks.estate_crashes", "--seed", "3", "--kills", str(kills)]
    subprocess.run([*command, "--folder", folder, "--json", folder / "told.json"], check=True, timeout=200)
    figures: dict[str, int] = json.loads((folder / "told.json").read_text())
    return figures
