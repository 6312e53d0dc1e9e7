"""Beam search beside other engines on this machine's CPU, on the embedded SmolLM2-135M-Instruct.

    PYTHONPATH=. python benchmarks/compare_beams_cpu.py --peers-python PEERS/bin/python [--rounds 3] [--json FILE]

32 beams of 3 tokens after a prompt of 300 that is resident where the engine keeps prompts (transformers does not). As
in compare_cpu.py each engine lives in a process of its own and takes its turn round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from compare_cpu import ENGINES, Worker, is_installed
from peers.export import export_model, export_tokenizer

from bequest.engine.models.embedded import embedded_model_path

NAMES = ("bequest", "transformers", "vllm")


@dataclass(frozen=True, slots=True)
class Search:
    """A task of the workers."""

    prompt_len: int
    width: int
    output_len: int

    def message(self, seed: int) -> dict[str, int]:
        shape = {"prompt_len": self.prompt_len, "width": self.width, "output_len": self.output_len}
        return {**shape, "requests": 1, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    search = Search(prompt_len=300, width=32, output_len=3)
    model = embedded_model_path()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder) / "export"
        export_model(model, export)
        export_tokenizer(model, export)
        workers = []
        for engine in (engine for engine in ENGINES if engine.name in options.engines):
            python = sys.executable if engine.name == "bequest" else options.peers_python
            if is_installed(engine.package, python):
                path = model if engine.reads_gguf else export
                workers.append(Worker(engine, python, path, options.threads, "beams"))
        for number in range(options.rounds + 1):
            for worker in workers:
                took = worker.ask(search.message(number))
                if number > 0:  # the first time of anything is not what is measured
                    seconds.setdefault(worker.name, []).append(took)
        for worker in workers:
            worker.close()
    ours = statistics.median(seconds["bequest"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:14} {middle:8.3f} s   {middle / ours:6.1f}× ours")
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=2))


if __name__ == "__main__":
    main()
