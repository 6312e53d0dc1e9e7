"""Prints the figures of the house: see the package's docstring."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.house.calls import longest_chain
from benchmarks.house.circles import include_circles, python_circles
from benchmarks.house.flags import flag_tests
from benchmarks.house.lengths import MOST_LINES, long_cxx_functions, long_python_functions
from benchmarks.house.sources import parsed_once
from benchmarks.house.widths import type_widths

HERE = Path(__file__).parents[2]
_MOST_TYPES = 5


def measure(root: Path) -> dict[str, dict[str, Any]]:
    """Figure → its number, and what it is made of."""
    with parsed_once():
        python, cxx = python_circles(root), include_circles(root)
        flags, widths = flag_tests(root), type_widths(root)
        lengths, cxx_lengths = long_python_functions(root), long_cxx_functions(root)
        chain = longest_chain(root)
    return {
        "circles of files, Python": _counted(python.files),
        "circles of folders, Python": _counted(python.folders),
        "pairs of siblings that import each other, Python": {
            "number": len(python.pairs),
            "of": [" ↔ ".join(pair) for pair in python.pairs],
        },
        "circles of files, csrc": _counted(cxx.files),
        "circles of folders, csrc": _counted(cxx.folders),
        "tests of kind flags outside the kinds": {"number": sum(flags.values()), "of": flags},
        "fields of the widest engine type": {
            "number": max(widths.values(), default=0),
            "of": dict(islice(widths.items(), _MOST_TYPES)),
        },
        f"functions over {MOST_LINES} lines, Python": {"number": len(lengths), "of": lengths},
        f"functions over {MOST_LINES} lines, csrc": {"number": len(cxx_lengths), "of": cxx_lengths},
        "calls from a route to the engine, at most": {"number": max(len(chain) - 1, 0), "of": chain},
    }


def _counted(chains: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {"number": len(chains), "of": [" → ".join(chain) for chain in chains]}


def _lines_of(parts: Mapping[str, int] | Sequence[str]) -> list[str]:
    return [f"{part}: {number}" for part, number in parts.items()] if isinstance(parts, Mapping) else list(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=HERE, help="a checkout; this one unless it is given")
    parser.add_argument("--json", action="store_true", help="as JSON")
    args = parser.parse_args()
    figures = measure(args.root.resolve())
    if args.json:
        print(json.dumps(figures, indent=2, ensure_ascii=False))
        return
    width = max(map(len, figures))
    for name, figure in figures.items():
        print(f"{name:<{width}}  {figure['number']:>4}")
        for line in _lines_of(figure["of"]):
            print(f"    {line}")


if __name__ == "__main__":
    main()
