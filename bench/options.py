"""The command line of `bequest bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from bequest.bench.arguments import Integer, add_output, add_server, levels, not_negative
from bequest.bench.load_options import LoadOptions, add_load_command
from bequest.cli.parser import Parser

_DESCRIPTION = """\
Two-stage generation against a running server. Each job has a prompt of its own; stage 1 samples from it, a short
suffix is appended, and stage 2 reads a few tokens off: 32 beams of 3, or 3 greedy tokens where the server has no beams.
What is measured is stage 2, in these modes:

  re-send              everything again as a new prompt, with no help from the prefix cache
  re-send, prefix hit  the same with the prefix cache's help (--resend-cached)
  continuation         `continuation_of` stage 1
  lease under pressure `continuation_of` a stage 1 that was retained, after other requests have used the cache

Stage 1 is seeded, so all modes must give the same tokens; a lease must be continued with nothing but suffix + 1 tokens
computed. Exit status: 0, or 1 if anything differed or a mode failed, or 2 if the run could not start."""

_EPILOG = """\
  bequest bench two-stage                                      against http://127.0.0.1:8000
  bequest bench two-stage --concurrency 1 --jobs 4 --resend-cached
  bequest bench two-stage --base-url http://host:8000 --model name --json two_stage.json --plot two_stage.png"""


@dataclass(frozen=True, slots=True)
class TwoStageOptions:
    base_url: str
    api_key: str | None
    model: str | None
    jobs: int
    concurrency: tuple[int, ...]
    prompt_tokens: int
    stage1_tokens: int
    suffix_tokens: int
    width: int
    tokens: int
    pressure: int
    resend_cached: bool
    tolerance: float
    seed: int
    json: str | None
    plot: str | None

    @property
    def context_tokens(self) -> int:
        """The longest sequence of a job."""
        return self.prompt_tokens + self.stage1_tokens + self.suffix_tokens + self.tokens


def parse(arguments: Sequence[str]) -> TwoStageOptions | LoadOptions:
    """The options of `bequest bench ARGUMENTS`; ends the process with a message for wrong ones."""
    parser = Parser("bequest bench", description="Measures a running server.")
    commands = parser.add_subparsers(dest="command", metavar="serve | two-stage", required=True)
    add_load_command(commands)
    two_stage = commands.add_parser(
        "two-stage",
        help="continuation against sending everything again",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server(two_stage)
    _add_load(two_stage)
    add_output(two_stage)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.choices[namespace.command].refuse(unknown)
    given = vars(namespace)
    return LoadOptions(**given) if given.pop("command") == "serve" else TwoStageOptions(**given)


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")

    def add(flag: str, least: int, default: int, text: str) -> None:
        group.add_argument(flag, metavar="N", type=Integer(least), default=default, help=f"{text} (default: {default})")

    add("--jobs", 1, 16, "jobs of each mode at each concurrency; never fewer than the concurrency")
    group.add_argument(
        "--concurrency",
        metavar="N,N,…",
        type=levels,
        default=(1, 8, 64),
        help="how many jobs run at once, a level after the other (default: 1,8,64)",
    )
    add("--prompt-tokens", 1, 500, "length of a prompt")
    add("--stage1-tokens", 1, 200, "tokens sampled in stage 1")
    add("--suffix-tokens", 0, 5, "tokens appended to what stage 1 gave")
    add("--width", 1, 32, "beams of stage 2; 1: greedy")
    add("--tokens", 1, 3, "tokens of stage 2")
    add("--pressure", 0, 4, "other requests between the stages of each leased job, each with a fresh prompt")
    group.add_argument("--resend-cached", action="store_true", help="measure re-sending with prefix hits too")
    group.add_argument(
        "--tolerance",
        metavar="X",
        type=not_negative,
        default=0.0,
        help="log-probabilities this close are ties, whose order may differ; for bfloat16 on a GPU, where the last "
        "bits depend on the batch (default: 0, everything must be equal)",
    )
    add("--seed", 0, 0, "chooses the prompts and seeds stage 1")
