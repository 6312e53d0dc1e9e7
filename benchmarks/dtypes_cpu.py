"""A decoder-only model with random weights on this CPU in float32 and bfloat16, beside transformers in the same dtypes.

    python -m benchmarks.dtypes_cpu [--shape qwen3-0.6b] [--prompt 512] [--output 32] [--repeats 3] [--threads N]
                                    [--json FILE]

Three tasks, in tokens per second: `prefill`, one prompt and one token; `decode`, the tokens after the first of one
stream with a short prompt; `decode 8`, those of eight streams at once. All four sides take turns, and a figure is the
median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.model_shapes import SHAPES, write_config
from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.types import OutputMode, Request, SamplingParams

DTYPES = ("float32", "bfloat16")
SHORT = 16  # tokens of a prompt that is not measured
Prompts = list[list[int]]
# Seconds of prompts with so many tokens of output.
Timed = Callable[[Prompts, int], Awaitable[float]]


def engine_side(built: Built) -> Timed:
    async def one(prompt: list[int], outputs: int) -> None:
        params = SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True)
        request = Request(f"{id(prompt)}-{outputs}", "bench", tuple(prompt), params, output=OutputMode.FINAL)
        async for _ in built.engine.generate(request):
            pass

    async def timed(prompts: Prompts, outputs: int) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(one(prompt, outputs) for prompt in prompts))
        return time.perf_counter() - started

    return timed


def transformers_side(model: Any) -> Timed:
    async def timed(prompts: Prompts, outputs: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            ids = torch.tensor(prompts)
            mask = torch.ones_like(ids)
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=outputs,
                min_new_tokens=outputs,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - started

    return timed


async def rates(side: Timed, options: argparse.Namespace, draw: np.random.Generator, vocabulary: int) -> list[float]:
    """Tokens per second of the three tasks. No prompt comes twice: its keys would be found."""

    def prompts(count: int, length: int) -> Prompts:
        return [draw.integers(1, vocabulary, length).tolist() for _ in range(count)]

    async def decode(streams: int) -> float:
        first = await side(prompts(streams, SHORT), 1)
        whole = await side(prompts(streams, SHORT), options.output)
        return streams * (options.output - 1) / (whole - first)

    prefill = await side(prompts(1, options.prompt), 1)
    return [options.prompt / prefill, await decode(1), await decode(8)]


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    values, draw = SHAPES[options.shape].config, np.random.default_rng(3)
    sides: dict[tuple[str, str], Timed] = {}
    built: list[Built] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = write_config(values, Path(folder) / options.shape)
        for dtype in DTYPES:
            config = EngineConfig(
                model=str(directory),
                device="cpu",
                dtype=dtype,
                load_format="dummy",
                max_model_len=options.prompt + options.output,
                max_num_batched_tokens=options.prompt,
                threads=options.threads,
                kv_cache_gb=2.0,
            )
            built.append(await build_engine(config))
            sides["bequest", dtype] = engine_side(built[-1])
        torch.set_num_threads(options.threads)
        model_config = transformers.AutoConfig.from_pretrained(directory)
        for dtype in DTYPES:
            model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, dtype)).eval()
            sides["transformers", dtype] = transformers_side(model)
        seen: dict[tuple[str, str], list[list[float]]] = {side: [] for side in sides}
        for _ in range(options.repeats + 1):  # the first is for warming up
            for name, side in sides.items():
                seen[name].append(await rates(side, options, draw, values["vocab_size"]))
        for one in built:
            await one.engine.stop()
    rows = []
    for (name, dtype), all_rates in seen.items():
        prefill, decode, eight = (statistics.median(column) for column in zip(*all_rates[1:], strict=True))
        rows.append({"engine": name, "dtype": dtype, "prefill": prefill, "decode": decode, "decode 8": eight})
        print(f"{name:13} {dtype:9} prefill {prefill:8,.0f}  decode {decode:6.1f}  decode 8 {eight:7.1f} tokens/s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = asyncio.run(measure(options))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
