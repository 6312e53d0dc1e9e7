"""The tables of docs/benchmarks.md, out of the figures in benchmarks/results.

    python -m benchmarks.tables           # writes the document
    python -m benchmarks.tables --check   # ends with 1 if the document says something else than the figures

A result is a JSON file with one table: the claim that it shows, the command, the machine, and the commit that its
figures came with. The document is made of them and of nothing else. How figures came about is told in docs/lab.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import msgspec

_ROOT = Path(__file__).parent.parent
RESULTS = _ROOT / "benchmarks" / "results"
DOCUMENT = _ROOT / "docs" / "benchmarks.md"
_WIDTH = 100
_HEAD = """\
# Figures, and the commands that make them

Each table shows one claim. It stands in a JSON file of benchmarks/results, with the command, the machine and the commit
that the figures came with, and `python -m benchmarks.tables` writes this page. Figures that stand beside each other
were taken in one run where nothing else is said. Absolute times of a shared machine mean little.
[lab/benchmarks.md](lab/benchmarks.md) has earlier figures and how they came about.
"""
_ORDER = ("A GPU", "A CPU", "The scheduler")


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    section: str
    place: int  # in its section
    claim: str
    command: str
    machine: str
    commit: str | None  # None: nobody took it down
    columns: list[str]
    rows: list[list[str]]
    note: str | None = None


def load(path: Path) -> Result:
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    if result.section not in _ORDER:
        raise ValueError(f"{path.name}: `section` must be one of {', '.join(_ORDER)}")
    if any(len(row) != len(result.columns) for row in result.rows):
        raise ValueError(f"{path.name}: each row needs {len(result.columns)} cells")
    return result


def document(results: list[Result]) -> str:
    parts = [_wrapped(paragraph) for paragraph in _HEAD.strip().split("\n\n")]
    for section in _ORDER:
        parts.append(f"## {section}")
        shown = sorted((r for r in results if r.section == section), key=lambda r: r.place)
        parts += map(_shown, shown)
    return "\n\n".join(parts) + "\n"


def _shown(result: Result) -> str:
    commit = "no commit was taken down" if result.commit is None else f"commit {result.commit}"
    said = f"`{result.command}`; {result.machine}; {commit}."
    parts = [_wrapped(f"**{result.claim}**"), _table(result), _wrapped(said)]
    return "\n\n".join([*parts, _wrapped(result.note)] if result.note else parts)


def _table(result: Result) -> str:
    lines = [result.columns, ["---"] * len(result.columns), *result.rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in line) + "|" for line in lines)


def _wrapped(text: str) -> str:
    if text.startswith("#"):
        return text
    return textwrap.fill(" ".join(text.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = document([load(path) for path in sorted(RESULTS.glob("*.json"))])
    if not options.check:
        DOCUMENT.write_text(text)
    elif DOCUMENT.read_text() != text:
        sys.exit(f"{DOCUMENT} does not say what the results do: run python -m benchmarks.tables")


if __name__ == "__main__":
    main()
