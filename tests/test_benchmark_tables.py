"""docs/benchmarks.md says what the figures of benchmarks/results do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from benchmarks.tables import DOCUMENT, RESULTS, Result, document, load

FILES = sorted(RESULTS.glob("*.json"))


def test_the_document_is_what_the_results_give() -> None:
    assert FILES
    assert DOCUMENT.read_text() == document([load(path) for path in FILES]), "run python -m benchmarks.tables"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_it_is_from(path: Path) -> None:
    result = load(path)
    assert result.claim.endswith(".") and result.machine and result.rows
    assert re.match(r"(bequest|python|PYTHONPATH=\. python) ", result.command)
    assert result.commit is None or re.fullmatch(r"[0-9a-f]{8}", result.commit)
    module = re.search(r"benchmarks[./](\w+)", result.command)
    assert module is None or (RESULTS.parent / f"{module[1]}.py").exists()


@dataclass(frozen=True)
class Wrong:
    change: dict[str, object]
    says: str


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong({"section": "Elsewhere"}, "section"),
        Wrong({"rows": [["1"]]}, "2 cells"),
        Wrong({"speed": 1}, "speed"),
    ],
)
def test_a_wrong_result_is_refused(tmp_path: Path, wrong: Wrong) -> None:
    good = Result("A CPU", 1, "It is fast.", "python -m x", "any", None, ["", "ms"], [["a", "1"]])
    path = tmp_path / "x.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(good) | wrong.change))
    with pytest.raises((ValueError, msgspec.ValidationError), match=wrong.says):
        load(path)


def test_a_table() -> None:
    shown = document([Result("A CPU", 1, "It is fast.", "python -m x", "any", None, ["", "ms"], [["a", "1"]], "Once.")])
    assert "|  | ms |\n|---|---|\n| a | 1 |\n" in shown
    assert "`python -m x`; any; no commit was taken down.\n\nOnce." in shown
