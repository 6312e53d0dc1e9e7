"""The forward pass of one checkpoint by its own family and by transformers: CPU time of a token, without the engine.

    OMP_NUM_THREADS=1 python -m benchmarks.model_impl_forward

One thread, float32, random weights. CPU time says the same on a busy machine as on an idle one, within its caches.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.model_impl import IMPLS, SHAPES, make_checkpoint
from bequest.engine.kernels import cpu as kernels
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.impl import Implementation
from bequest.engine.models.load import load_model
from tests.models.paged import PagedSequences

# name, sequences, tokens of each prompt, decoding steps that are measured; 0: the prompt is
TASKS = (("1 stream", 1, 8, 6), ("16 streams", 16, 8, 4), ("prompt of 256", 1, 256, 0))
ROUNDS = 3


@torch.inference_mode()
def seconds_per_token(model: Decoder, task: tuple[str, int, int, int], vocab_size: int) -> float:
    """The least of some rounds."""
    _, count, prompt_len, steps = task
    draw, found = random.Random(1), []
    for _ in range(ROUNDS):
        sequences = PagedSequences(model, count, prompt_len + steps)
        prompts = {each: [draw.randrange(vocab_size) for _ in range(prompt_len)] for each in range(count)}
        started = time.process_time()
        sequences.step(prompts, dict.fromkeys(prompts, 1))
        if steps:
            started = time.process_time()
            for _ in range(steps):
                sequences.step({each: [5] for each in prompts})
        found.append((time.process_time() - started) / (count * (steps or prompt_len)))
    return min(found)


def main() -> None:
    kernels.set_num_threads(1)
    torch.set_num_threads(1)
    print("| shape | task | own family, ms | transformers, ms | ratio |\n|---|---|---|---|---|")
    for shape, sizes in SHAPES.items():
        vocab_size = 1024 if shape == "tiny" else 49152
        with tempfile.TemporaryDirectory() as folder:
            path = make_checkpoint(Path(folder), sizes, vocab_size)
            loaded = [load_model(path, "float32", dummy=True, impl=Implementation(impl)) for impl in IMPLS]  # type: ignore[arg-type]
        for task in TASKS:
            own, other = (1e3 * seconds_per_token(one.model, task, vocab_size) for one in loaded)  # type: ignore[arg-type]
            print(f"| {shape} | {task[0]} | {own:.3g} | {other:.3g} | {other / own:.1f} |", flush=True)


if __name__ == "__main__":
    main()
