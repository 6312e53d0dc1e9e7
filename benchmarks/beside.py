"""Two trees side by side on one machine: each benchmark in one, then in the other, and the ratios of their figures.

    python -m benchmarks.beside OTHER STAGE… [--rounds 1] [--json FILE]

OTHER is a built checkout, mostly the tree before a change. With more rounds the trees take turns, and the median of
each figure counts. A ratio is this tree's figure by the other's; whether more or less of it is better, its name says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent.parent
STAGES = {
    "engine": ["-m", "benchmarks.gpu_engine"],
    "http": ["-m", "benchmarks.http_load", "--concurrency", "1,64,256"],
    "beams": ["-m", "benchmarks.beams_http", "--items", "100000", "--rounds", "12"],
    "states": ["-m", "benchmarks.gpu_hidden_states", "--no-transformers"],
    "cpu": ["benchmarks/compare_cpu.py", "--engines", "bequest", "--rounds", "5"],
    "overhead": ["-m", "benchmarks.server_overhead"],
    "overload": ["-m", "benchmarks.overload", "--timed", "--seconds", "10"],
}


def figures_of(tree: Path, stage: str) -> dict[str, float]:
    """Runs a benchmark in a tree; every number that it wrote, by its path."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, *STAGES[stage], "--json", str(file)]
        paths = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        if not file.exists():
            print(f"{stage} failed in {tree.name}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}", flush=True)
            return {}
        return dict(_leaves("", json.loads(file.read_text())))


def _leaves(path: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _leaves(f"{path}[{i}]", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seen: dict[str, dict[str, list[float]]] = {}
    for stage in options.stages:
        runs: dict[Path, list[dict[str, float]]] = {options.other: [], HERE: []}
        for _ in range(options.rounds):
            for tree, figures in runs.items():
                figures.append(figures_of(tree.resolve(), stage))
        names = [name for name in runs[HERE][0] if all(name in run for each in runs.values() for run in each)]
        print(f"== {stage}: {'figure':>60}{'before':>12}{'after':>12}{'ratio':>8}", flush=True)
        for name in names:
            before, after = (statistics.median(run[name] for run in runs[tree]) for tree in (options.other, HERE))
            seen.setdefault(stage, {})[name] = [before, after]
            ratio = f"{after / before:8.3f}" if before else "       -"
            print(f"{name[-70:]:>72}{before:12.5g}{after:12.5g}{ratio}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(seen, indent=2))


if __name__ == "__main__":
    main()
