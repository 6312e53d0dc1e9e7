"""What a grammar costs: time per token of 16 requests at once, free and under a JSON schema, in turn.

    python -m benchmarks.structured [--shape qwen3-0.6b] [--batch 16] [--tokens 256] [--rounds 5] [--json FILE]
    python -m benchmarks.structured --step-ms 0.5       # over a device that is not there, and takes so long for a step

Without a shape it is the embedded model; a shape has random weights, and a tokenizer of as many tokens. Nobody's answer
ends early: the schema is a list without end of objects with strings, numbers and enumerations, and the free requests
ignore the end token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import SHAPES, write_model
from benchmarks.timed_runner import TimedRunner, scripts_of, timed_engine
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.constraints.grammar import Grammar, GrammarSource, Vocabulary
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import OutputMode, Request, SamplingParams

SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["small", "middle", "large"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 100_000},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
}
PROMPT = 32  # tokens


async def seconds_per_token(engine: AsyncEngine, grammar: Grammar | None, batch: int, tokens: int, salt: str) -> float:
    """Of each request: from the first token of all to the last."""
    begun: list[float] = []
    ended: list[float] = []

    async def one(index: int) -> None:
        params = SamplingParams(max_tokens=tokens, seed=index, ignore_eos=True, grammar=grammar)
        prompt = tuple((index * 7 + i) % 200 + 20 for i in range(PROMPT))
        request = Request(f"{salt}-{index}", "bench", prompt, params, output=OutputMode.DELTA)
        count = 0
        async for delta in engine.generate(request):
            count += sum(len(choice.token_ids) for choice in delta.choices)
            if delta.first:
                begun.append(time.perf_counter())
        assert count == tokens, f"an answer ended after {count} tokens"
        ended.append(time.perf_counter())

    await asyncio.gather(*(one(index) for index in range(batch)))
    return (max(ended) - max(begun)) / (tokens - 1)


@dataclass(frozen=True, slots=True)
class TimedConfig:
    """A device that is not there."""

    seconds: float  # of a step
    model: Path | None  # whose tokenizer it is; None: the embedded model's


async def measure(config: EngineConfig | TimedConfig, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    runner: TimedRunner | None = None
    if isinstance(config, TimedConfig):
        sys.setswitchinterval(0.0005)  # as the server has it
        engine, text, runner = timed_engine(config.seconds, 256, config.model)
    else:
        built = await build_engine(config)
        engine, text = built.engine, built.text
    info = engine.info
    vocabulary = Vocabulary(text.tokenizer, info.vocab_size, info.eos_token_ids)
    grammar = Grammar(GrammarSource("json_schema", json.dumps(SCHEMA)), vocabulary)
    if runner is not None:
        runner.follow(scripts_of(grammar, batch, tokens), PROMPT)
    free: list[float] = []
    bound: list[float] = []
    spent: dict[str, list[float]] = {"free": [], "bound": []}
    for turn in range(rounds + 1):  # the first warms up
        for name, rule, times in (("free", None, free), ("bound", grammar, bound)):
            before = time.process_time()
            times.append(await seconds_per_token(engine, rule, batch, tokens, f"{name}{turn}"))
            spent[name].append((time.process_time() - before) / (batch * tokens))
    await engine.stop()
    ratios = [b / f for b, f in zip(bound[1:], free[1:], strict=True)]
    return {
        "model": info.name,
        "batch": batch,
        "free_ms": statistics.median(free[1:]) * 1e3,
        "constrained_ms": statistics.median(bound[1:]) * 1e3,
        "free_cpu_us": min(spent["free"][1:]) * 1e6,
        "constrained_cpu_us": min(spent["bound"][1:]) * 1e6,
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--step-ms", type=float, help="no model, but steps that take so long")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = None if options.shape is None else write_model(options.shape, Path(folder) / options.shape)
        config: EngineConfig | TimedConfig = EngineConfig(max_num_seqs=64, max_model_len=1024)
        if options.step_ms is not None:
            config = TimedConfig(options.step_ms * 1e-3, directory)
        elif directory is not None:
            config = EngineConfig(model=str(directory), load_format="dummy", max_num_seqs=64, max_model_len=1024)
        figures = asyncio.run(measure(config, options.batch, options.tokens, options.rounds))
    for name, value in figures.items():
        print(f"{name:16} {value:.3f}" if isinstance(value, float) else f"{name:16} {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
