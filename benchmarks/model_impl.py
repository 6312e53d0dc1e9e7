"""What it costs when transformers computes a model: own family and `--model-impl transformers` on the same checkpoint.

    python -m benchmarks.model_impl [--rounds 5] [--device cpu] [--dtype float32] [--threads N] [--json FILE]

Random weights in two shapes: a tiny Llama, and that of SmolLM2-135M. Both engines are loaded first; then, round by
round, each task is given to one after the other, so that what else happens on the machine falls on both alike. The
table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from bequest import LLM, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
}
# name, requests, tokens of each prompt, tokens of each answer
TASKS = (("1 stream", 1, 8, 32), ("16 streams", 16, 8, 32), ("prompt of 512", 1, 512, 1))
IMPLS = ("bequest", "transformers")


def make_checkpoint(directory: Path, shape: dict[str, Any], vocab_size: int) -> Path:
    kv_heads = shape["num_attention_heads"] // (3 if shape["num_attention_heads"] % 3 == 0 else 2)
    described = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(described))
    vocabulary = {f"<{token}>": token for token in range(vocab_size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")).save(str(directory / "tokenizer.json"))
    return directory


def measure(llm: LLM, task: tuple[str, int, int, int], vocab_size: int, draw: random.Random) -> float:
    """Tokens per second: of the prompt where only one is generated, else of the answers."""
    _, requests, prompt_len, output_len = task
    prompts = [[draw.randrange(1, vocab_size) for _ in range(prompt_len)] for _ in range(requests)]
    started = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True))
    return requests * (prompt_len if output_len == 1 else output_len) / (time.perf_counter() - started)


def compare(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    vocab_size = 1024 if shape == "tiny" else 49152
    draw, rates = random.Random(1), {(task[0], impl): [] for task in TASKS for impl in IMPLS}
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder), SHAPES[shape], vocab_size)
        flags = {"load_format": "dummy", "num_blocks": 1200, "dtype": options.dtype, "device": options.device}
        flags["threads"] = options.threads
        engines = {impl: LLM(model, progress=False, model_impl=impl, **flags) for impl in IMPLS}
        for round_number in range(options.rounds + 1):
            for task in TASKS:
                for impl, llm in engines.items():
                    rate = measure(llm, task, vocab_size, draw)
                    if round_number:  # the first warms up
                        rates[task[0], impl].append(rate)
        for llm in engines.values():
            llm.close()
    medians = {key: statistics.median(values) for key, values in rates.items()}
    return [{"shape": shape, "task": task[0]} | {impl: medians[task[0], impl] for impl in IMPLS} for task in TASKS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for shape in options.shapes for row in compare(shape, options)]
    print("| shape | task | own family, tokens/s | transformers | slower by |\n|---|---|---|---|---|")
    for row in rows:
        own, other = (row[impl] for impl in IMPLS)
        print(f"| {row['shape']} | {row['task']} | {own:,.0f} | {other:,.0f} | {own / other:.1f} |")
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
