"""One engine in a process of its own, driven by lines of JSON: the other half of compare_cpu.py.

    python worker.py NAME MODEL THREADS

loads MODEL with the adapter `with_NAME.py`, generates one token, and writes a line to say so. Then every line read,
`{"requests": R, "prompt_len": P, "output_len": O, "seed": S}`, is answered by the seconds that R greedy completions of
P random tokens took, and how many tokens they came to.

An adapter has `load(model, threads)`, which gives a function from prompts (lists of token ids) and an output length to
the number of tokens generated: greedy, past any end token, nothing reused from prompts before.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable

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


def main(name: str, model: str, threads: int) -> None:
    # What libraries print goes to stderr; the answers have the real stdout for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate: Generate = importlib.import_module(f"with_{name}").load(model, threads)
    answers.write(json.dumps(measure(generate, {"requests": 1, "prompt_len": 8, "output_len": 1, "seed": -1})) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(measure(generate, json.loads(line))) + "\n")
    answers.flush()
    # Some engines leave threads behind that would keep the process, and with it the driver, waiting.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
