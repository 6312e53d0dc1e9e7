"""`bequest bench`: `serve` is load_command.py's; `two-stage` runs modes, compares them with each other, and reports."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from bequest.bench import plot
from bequest.bench.checks import check
from bequest.bench.client import BenchError, Client
from bequest.bench.load_command import report_load, run_load
from bequest.bench.load_options import LoadOptions
from bequest.bench.models import choose_model
from bequest.bench.options import TwoStageOptions, parse
from bequest.bench.report import Failure, Row, as_json, summarise, table
from bequest.bench.two_stage import Abilities, JobResult, Mode, TwoStage, probe
from bequest.bench.workload import make_workload


@dataclass(slots=True)
class Outcome:
    """What a run found out, so far."""

    model: str
    abilities: Abilities
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    options = parse(arguments)
    try:
        _check_outputs(options)
        if isinstance(options, LoadOptions):
            return report_load(*asyncio.run(run_load(options)), options)
        outcome = asyncio.run(two_stage(options))
    except BenchError as error:
        print(f"bequest bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return _report(outcome, options)


async def two_stage(options: TwoStageOptions) -> Outcome:
    levels = [(concurrency, max(options.jobs, concurrency)) for concurrency in options.concurrency]
    async with Client(options.base_url, options.api_key) as client:
        model = await choose_model(client, options.model, options.context_tokens, "--prompt-tokens or --stage1-tokens")
        workload = await make_workload(client, model, options, max(jobs for _, jobs in levels))
        abilities = await probe(client, model, workload, options)
        for note in abilities.notes:
            print(f"note: {note}", file=sys.stderr)
        modes = [mode for mode in Mode if abilities.continuation or not mode.continues]
        if not options.resend_cached:
            modes.remove(Mode.RESEND_CACHED)
        bench = TwoStage(client, model, workload, options, abilities)
        outcome = Outcome(model, abilities)
        with tqdm(total=len(modes) * sum(jobs for _, jobs in levels), unit="job", disable=None) as bar:
            for concurrency, jobs in levels:
                await _level(bench, modes, concurrency, jobs, outcome, bar)
    return outcome


async def _level(
    bench: TwoStage, modes: Sequence[Mode], concurrency: int, jobs: int, outcome: Outcome, bar: Any
) -> None:
    """All modes at one concurrency, re-sending first: the others are compared with it."""
    references: dict[int, JobResult] = {}
    resend: Row | None = None
    for mode in modes:
        bar.set_description(f"{concurrency} at once, {mode.value}")
        if bar.disable:  # no terminal: a line for the log
            print(f"{concurrency} at once, {mode.value}: {jobs} jobs", file=sys.stderr, flush=True)
        try:
            results = await bench.run(mode, concurrency, jobs, bar.update)
            if mode is Mode.RESEND:
                references = {result.number: result for result in results}
            differences = await check(bench, mode, results, references)
        except BenchError as error:
            outcome.failures.append(Failure(concurrency, mode, str(error)))
            continue
        row = summarise(concurrency, mode, results, differences, resend)
        resend = row if mode is Mode.RESEND else resend
        outcome.rows.append(row)


def _check_outputs(options: TwoStageOptions | LoadOptions) -> None:
    """A run of minutes must not end in a file that cannot be written."""
    if options.plot:
        plot.need_matplotlib()
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path and (fault := _unwritable(Path(path).absolute())):
            raise BenchError(f"{flag} {path}: {fault}")


def _unwritable(path: Path) -> str | None:
    if not path.parent.is_dir():
        return "the folder does not exist"
    if path.is_dir():
        return "it is a folder; name a file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "it may not be written"
    return None


def _report(outcome: Outcome, options: TwoStageOptions) -> int:
    beams = outcome.abilities.beams
    second = f"{options.width} beams of {options.tokens}" if beams else f"{options.tokens} greedy tokens"
    title = (
        f"{outcome.model}: {options.prompt_tokens} tokens, {options.stage1_tokens} sampled, "
        f"{options.suffix_tokens} appended, then {second}"
    )
    if outcome.rows:
        print(f"{title}\n\n{table(outcome.rows, beams)}")
    for failure in outcome.failures:
        print(f"failed: {failure.mode.value} at {failure.concurrency}: {failure.error}", file=sys.stderr)
    failing = sum(row.differences.failing(options.tolerance) for row in outcome.rows)
    if failing:
        print(f"\n{failing} of the answers are not what they must be:", file=sys.stderr)
        for row in outcome.rows:
            _tell_differences(row)
    if options.json:
        settings = asdict(options) | {"model": outcome.model, "beams": beams}
        del settings["api_key"], settings["json"], settings["plot"]
        figures = as_json(outcome.rows, outcome.failures, settings, outcome.abilities.notes)
        Path(options.json).write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))
    if options.plot and outcome.rows:
        plot.draw(outcome.rows, options.plot, title)
    return 1 if failing or outcome.failures else 0


def _tell_differences(row: Row) -> None:
    wrong = row.differences
    told = [
        (wrong.stage1, "sampled other tokens in stage 1 than re-sending did"),
        (
            wrong.stage2,
            "answered stage 2 otherwise than a fresh request with the same tokens "
            f"(log-probabilities up to {wrong.widest:.3g} apart)",
        ),
        (wrong.leases, "had no lease, or were not continued with suffix + 1 tokens from blocks or host"),
    ]
    for count, what in told:
        if count:
            print(f"  {row.mode.value} at {row.concurrency}: {count} of {row.jobs} {what}", file=sys.stderr)
