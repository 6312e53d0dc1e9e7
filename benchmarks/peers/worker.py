"""One engine in a process of its own, driven by lines of JSON: the other half of compare_cpu.py.

    python worker.py NAME MODEL THREADS [beams]

loads MODEL with the adapter `with_NAME.py`, generates one token, and writes a line to say so. Then every line read,
`{"requests": R, "prompt_len": P, "output_len": O, "seed": S}`, is answered by the seconds that R greedy completions of
P random tokens took, and how many tokens they came to.

An adapter has `load(model, threads)`, which gives a function from prompts (lists of token ids) and an output length to
the number of tokens generated: greedy, past any end token, nothing reused from prompts before.

With `beams` (compare_beams_cpu.py) the tasks have a "width" too, and the adapter's `load_beams(model, threads)` gives
two functions: one makes a prompt resident where the engine can, and is not measured; one searches: prompt, width,
output length → number of beams.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from types import ModuleType

Generate = Callable[[list[list[int]], int], int]

# Ordinary tokens of the embedded model: above its special tokens, below the end of its vocabulary.
FIRST_TOKEN, LAST_TOKEN = 100, 49_000


def random_prompts(requests: int, prompt_len: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(prompt_len)] for _ in range(requests)]


def measure(generate: Generate, task: dict[str, int]) -> dict[str, float]:
    prompts = random_prompts(task["requests"], task["prompt_len"], task["seed"])
    start = time.perf_counter()
    tokens = generate(prompts, task["output_len"])
    seconds = time.perf_counter() - start
    expected = task["requests"] * task["output_len"]
    if tokens != expected:
        raise RuntimeError(f"{tokens} tokens were generated, not {expected}")
    return {"seconds": seconds, "tokens": tokens}


def measure_beams(adapter: ModuleType, model: str, threads: int) -> Callable[[dict[str, int]], dict[str, float]]:
    remember, search = adapter.load_beams(model, threads)

    def measured(task: dict[str, int]) -> dict[str, float]:
        (prompt,) = random_prompts(1, task["prompt_len"], task["seed"])
        remember(prompt)
        start = time.perf_counter()
        beams = search(prompt, task["width"], task["output_len"])
        seconds = time.perf_counter() - start
        if beams != task["width"]:
            raise RuntimeError(f"{beams} beams came back, not {task['width']}")
        return {"seconds": seconds, "tokens": beams * task["output_len"]}

    return measured


def measure_prompts(adapter: ModuleType, model: str, threads: int) -> Callable[[dict[str, int]], dict[str, float]]:
    generate: Generate = adapter.load(model, threads)
    return lambda task: measure(generate, task)


def main(name: str, model: str, threads: int, beams: bool) -> None:
    # What libraries print goes to stderr; the answers have the real stdout for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    adapter = importlib.import_module(f"with_{name}")
    measured = (measure_beams if beams else measure_prompts)(adapter, model, threads)
    first = {"requests": 1, "prompt_len": 8, "width": 2, "output_len": 1, "seed": -1}
    answers.write(json.dumps(measured(first)) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(measured(json.loads(line))) + "\n")
    answers.flush()
    # Some engines leave threads behind that would keep the process, and with it the driver, waiting.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["beams"])
