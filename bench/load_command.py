"""`bequest bench serve`: runs the levels and reports."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from bequest.bench.client import Client, Streamed
from bequest.bench.load import Level, LevelResult, Load, all_levels
from bequest.bench.load_options import LoadOptions
from bequest.bench.load_report import LoadRow, draw_load, load_json, load_table, summarise_load
from bequest.bench.models import choose_model
from bequest.bench.workload import prompt_texts


async def run_load(options: LoadOptions) -> tuple[str, list[LoadRow]]:
    """The model's name and a row for each level."""
    levels = all_levels(options)
    async with Client(options.base_url, options.api_key) as client:
        model = await choose_model(client, options.model, options.context_tokens, "--prompt-tokens or --tokens")
        most = max(options.requests, *(level.concurrency for level in levels))
        prompts = await prompt_texts(client, model, options.prompt_tokens, options.seed, most)
        load = Load(client, model, prompts, options)
        await load.warm_up()
        return model, [summarise_load(await _watched(load, level, options.requests)) for level in levels]


async def _watched(load: Load, level: Level, requests: int) -> LevelResult:
    """A bar with the tokens so far on a terminal, a line elsewhere."""
    count = max(requests, level.concurrency)
    with tqdm(total=count, desc=str(level), unit=" requests", disable=None, leave=False) as bar:
        if bar.disable:
            print(f"{level}: {count} requests", file=sys.stderr, flush=True)
        seen = {"tokens": 0, "failed": 0}

        def advance(answer: Streamed | None) -> None:
            seen["failed"] += answer is None
            seen["tokens"] += 0 if answer is None else answer.output_tokens
            elapsed = max(bar.format_dict["elapsed"], 1e-9) if not bar.disable else 1.0
            bar.set_postfix_str(f"{seen['tokens'] / elapsed:,.0f} tokens/s, {seen['failed']} failed", refresh=False)
            bar.update()

        return await load.run(level, advance)


def report_load(model: str, rows: list[LoadRow], options: LoadOptions) -> int:
    shape = f"prompts of about {options.prompt_tokens} tokens, answers of {options.tokens}"
    title = f"{model}: {options.endpoint}, {shape}, {options.requests} requests a level"
    print(f"{title}\n\n{load_table(rows)}")
    for row in rows:
        for error, count in row.errors.items():
            print(f"{row.level}: {count} failed: {error}", file=sys.stderr)
    if options.json:
        settings: dict[str, Any] = asdict(options) | {"model": model}
        del settings["api_key"], settings["json"], settings["plot"]
        Path(options.json).write_bytes(orjson.dumps(load_json(rows, settings), option=orjson.OPT_INDENT_2))
    if options.plot:
        draw_load(rows, options.plot, title)
    return 1 if any(row.failed for row in rows) else 0
