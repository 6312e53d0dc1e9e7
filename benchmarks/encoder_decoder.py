"""Encoder-decoder models with random weights of known shapes, side by side with transformers in one run.

    python -m benchmarks.encoder_decoder [--shapes t5-small whisper-tiny] [--device cpu] [--dtype float32] [--threads N]
                                         [--repeats N] [--json FILE]

Both get the same jobs: (encoder length, output length) pairs, greedy, the output lengths forced. transformers runs them
in batches as large as the engine's, padded to the longest input and stepped until the longest output; it has the whole
batch at once, as has the engine. `equal` jobs, where nothing is padded, are the most favourable for it; `mixed` ones
are what a server sees. Both have the weights in --dtype. On a CPU float32 has a second line, the engine with a float16
cache, and --dtype bfloat16 runs both sides in float32 too, so that one run has all four. All take turns, and a line is
the median of --repeats turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.model_shapes import write_config
from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.types import OutputMode, Request, SamplingParams
from bequest.engine.types.encoder import EncoderInput

Job = tuple[int, int]  # encoder positions, output tokens
Side = tuple[str, str]  # dtype, that of the engine's cache
START = {"t5-small": (0,), "whisper-tiny": (50257, 50362), "bart-large": (2,)}


@dataclass(frozen=True, slots=True)
class Shape:
    architecture: str
    config_class: str
    config: dict[str, Any]
    encoder: tuple[int, int]  # least and most positions of a mixed input; the most is that of an equal one
    outputs: tuple[int, int]
    batch: int
    frames_per_position: int = 0  # of audio


SHAPES = {
    "t5-small": Shape(
        "T5ForConditionalGeneration", "T5Config", {"decoder_start_token_id": 0}, (32, 512), (16, 128), 16
    ),
    "whisper-tiny": Shape("WhisperForConditionalGeneration", "WhisperConfig", {}, (1500, 1500), (16, 128), 8, 2),
    "bart-large": Shape("BartForConditionalGeneration", "BartConfig", {}, (512, 512), (128, 128), 64),
}


def make_jobs(shape: Shape, kind: str, count: int) -> list[Job]:
    draw = random.Random(7)
    if kind == "equal":
        return [(shape.encoder[1], shape.outputs[1])] * count
    return [(draw.randint(*shape.encoder), draw.randint(*shape.outputs)) for _ in range(count)]


def make_inputs(shape: Shape, jobs: list[Job], draw: np.random.Generator) -> list[EncoderInput]:
    if shape.frames_per_position:
        frames = [length * shape.frames_per_position for length, _ in jobs]
        arrays = [draw.standard_normal((80, count), np.float32) for count in frames]
        return [EncoderInput.of_audio(array, shape.frames_per_position) for array in arrays]
    return [EncoderInput.of_tokens(draw.integers(100, 30000, length).tolist()) for length, _ in jobs]


# --- the two sides ----------------------------------------------------------------------------------------------------


async def run_engine(built: Built, start: tuple[int, ...], jobs: list[Job], inputs: list[EncoderInput]) -> float:
    """Seconds for all jobs at once."""

    async def one(i: int) -> int:
        params = SamplingParams(max_tokens=jobs[i][1], temperature=0, ignore_eos=True)
        request = Request(f"{id(inputs)}-{i}", "bench", start, params, output=OutputMode.FINAL, encoder=inputs[i])
        async for delta in built.engine.generate(request):
            if delta.usage is not None:
                return delta.usage.completion_tokens
        raise AssertionError("a request ends with usage or an error")

    started = time.perf_counter()
    tokens = await asyncio.gather(*(one(i) for i in range(len(jobs))))
    assert list(tokens) == [output for _, output in jobs]
    return time.perf_counter() - started


def run_transformers(
    model: Any, shape: Shape, start: tuple[int, ...], jobs: list[Job], inputs: list[EncoderInput]
) -> float:
    """Seconds for all jobs, a batch after another."""
    started = time.perf_counter()
    for first in range(0, len(jobs), shape.batch):
        batch = inputs[first : first + shape.batch]
        length = max(output for _, output in jobs[first : first + shape.batch])
        prompt = torch.tensor([start] * len(batch), device=model.device)
        generate(model, batch, prompt, length)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


@torch.inference_mode()
def generate(model: Any, batch: list[EncoderInput], prompt: torch.Tensor, length: int) -> None:
    options = {"decoder_input_ids": prompt, "max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
    if batch[0].features is not None:
        features = torch.from_numpy(np.stack([item.features for item in batch]))  # type: ignore[arg-type]
        model.generate(input_features=features.to(model.device, model.dtype), **options)
        return
    longest = max(item.length for item in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(batch):
        ids[row, : item.length] = torch.tensor(item.token_ids)
        mask[row, : item.length] = 1
    model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), **options)


def make_transformers(shape: Shape, device: str, dtype: str) -> Any:
    config = getattr(transformers, shape.config_class)(**shape.config)
    torch.manual_seed(0)
    model = getattr(transformers, shape.architecture)(config).eval()
    model = model.to(device, getattr(torch, dtype))
    # Nothing but the lengths: rules on tokens cost it time.
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, decoder_start_token_id=START_OF[shape.architecture]
    )
    return model


START_OF = {shape.architecture: START[name][0] for name, shape in SHAPES.items()}


async def build(directory: Path, shape: Shape, options: argparse.Namespace, side: Side) -> Built:
    dtype, cache = side
    config = EngineConfig(
        model=str(directory),
        device=options.device,
        dtype=dtype,
        kv_cache_dtype=cache,
        load_format="dummy",
        max_num_seqs=shape.batch,
        max_model_len=256,
        threads=options.threads,
        kv_cache_gb=2.0 if options.device == "cpu" else 20.0,
    )
    return await build_engine(config)


def sides(options: argparse.Namespace) -> list[Side]:
    if options.device == "cuda":
        return [(options.dtype, "auto")]
    if options.dtype == "float32":
        return [("float32", "auto"), ("float32", "float16")]
    return [("bfloat16", "auto"), ("float32", "auto")]


async def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    shape = SHAPES[name]
    rows, draw = [], np.random.default_rng(5)
    models = {dtype: make_transformers(shape, options.device, dtype) for dtype, _ in sides(options)}
    with tempfile.TemporaryDirectory() as folder:
        values = models[options.dtype].config.to_dict() | {"architectures": [shape.architecture]}
        directory = write_config(values, Path(folder) / name)
        engines = {side: await build(directory, shape, options, side) for side in sides(options)}
        torch.set_num_threads(options.threads)
        gc.collect()
        gc.freeze()  # as the server does: neither side should wait for a look at what was loaded
        for kind in options.jobs:
            jobs = make_jobs(shape, kind, options.rounds * shape.batch)
            seconds, their_seconds = await take_turns(engines, models, shape, START[name], jobs, options.repeats, draw)
            tokens = sum(output for _, output in jobs)
            for side, ours in seconds.items():
                dtype, theirs = side[0], their_seconds[side[0]]
                stored = engines[side].engine.info.kv_cache_dtype
                rows.append(
                    {
                        "shape": name,
                        "jobs": kind,
                        "requests": len(jobs),
                        "dtype": dtype,
                        "cache": stored,
                        "tokens_per_second": tokens / ours,
                        "transformers_tokens_per_second": tokens / theirs,
                        "ratio": theirs / ours,
                    }
                )
                print(
                    f"{name:12} {kind:6} {len(jobs):4} requests  {dtype:8} cache {stored:8} {tokens / ours:8,.0f} "
                    f"tokens/s  transformers {tokens / theirs:8,.0f}  × {theirs / ours:.2f}",
                    flush=True,
                )
        for built in engines.values():
            await built.engine.stop()
    return rows


async def take_turns(
    engines: dict[Side, Built],
    models: dict[str, Any],
    shape: Shape,
    start: tuple[int, ...],
    jobs: list[Job],
    repeats: int,
    draw: np.random.Generator,
) -> tuple[dict[Side, float], dict[str, float]]:
    """Median seconds of each engine and of transformers in each dtype."""
    warm = [(length, 4) for length, _ in jobs[: shape.batch]]
    ours: dict[Side, list[float]] = {side: [] for side in engines}
    theirs: dict[str, list[float]] = {dtype: [] for dtype in models}
    for turn in range(repeats + 1):
        turn_jobs = jobs if turn else warm
        # No input comes twice: the engine would find its cross keys and do without the encoder.
        inputs = make_inputs(shape, turn_jobs, draw)
        for side, built in engines.items():
            ours[side].append(await run_engine(built, start, turn_jobs, inputs))
        for dtype, model in models.items():
            theirs[dtype].append(run_transformers(model, shape, start, turn_jobs, inputs))
    return (
        {side: statistics.median(times[1:]) for side, times in ours.items()},
        {dtype: statistics.median(times[1:]) for dtype, times in theirs.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["t5-small", "whisper-tiny"], choices=list(SHAPES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--jobs", nargs="+", default=["mixed", "equal"], choices=["mixed", "equal"])
    parser.add_argument("--rounds", type=int, default=2, help="batches of requests")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    transformers.logging.set_verbosity_error()
    rows = [row for name in options.shapes for row in asyncio.run(measure(name, options))]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
