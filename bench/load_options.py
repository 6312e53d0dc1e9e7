"""The command line of `bequest bench serve`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from bequest.bench.arguments import Integer, add_output, add_server, levels, rates
from bequest.cli.parser import Parser

_DESCRIPTION = """\
Load on any server with OpenAI's API: streamed requests of one shape, so many at once (--concurrency) or so many a
second at random moments (--rate), a level after the other. For each level: requests and tokens a second, the time to
the first token, between tokens and to the end, at percentiles. Exit status: 0, 1 if requests failed, 2 if the run could
not start."""
_EPILOG = """\
  bequest bench serve                                          against http://127.0.0.1:8000
  bequest bench serve --concurrency 1,16,64 --prompt-tokens 500 --tokens 200
  bequest bench serve --rate 1,2,4,8 --requests 200 --json load.json --plot load.png"""

# Flags of vLLM's benchmark, and what does the same here.
_ELSEWHERE = {
    "--num-prompts": "the flag is --requests",
    "--request-rate": "the flag is --rate",
    "--max-concurrency": "the flag is --concurrency",
    "--random-input-len": "the flag is --prompt-tokens",
    "--input-len": "the flag is --prompt-tokens",
    "--random-output-len": "the flag is --tokens",
    "--output-len": "the flag is --tokens",
    "--backend": "every server is asked as OpenAI's is, see --endpoint",
    "--host": "the flag is --base-url, as in --base-url http://host:8000",
    "--port": "the flag is --base-url, as in --base-url http://127.0.0.1:8000",
    "--save-result": "the flag is --json FILE",
}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    base_url: str
    api_key: str | None
    model: str | None
    endpoint: Literal["chat", "completions"]
    requests: int
    concurrency: tuple[int, ...]
    rate: tuple[float, ...]  # requests a second; empty: as fast as the concurrency allows
    prompt_tokens: int
    tokens: int
    seed: int
    json: str | None
    plot: str | None

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.tokens


def add_load_command(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="load on any OpenAI server: rates and percentiles",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        elsewhere=_ELSEWHERE,
    )
    add_server(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="default: %(default)s")
    group.add_argument("--concurrency", metavar="N,N,…", type=levels, default=(1, 8, 64), help="default: 1,8,64")
    group.add_argument(
        "--rate", metavar="X,X,…", type=rates, default=(), help="requests a second, in place of --concurrency"
    )
    for flag, default, text in (
        ("--requests", 64, "requests of each level; never fewer than run at once"),
        ("--prompt-tokens", 256, "length of a prompt, nearly: prompts are words"),
        ("--tokens", 128, "length of an answer; the end token is ignored where the server can"),
    ):
        group.add_argument(flag, metavar="N", type=Integer(1), default=default, help=f"{text} (default: {default})")
    group.add_argument("--seed", metavar="N", type=Integer(0), default=0, help="chooses the prompts (default: 0)")
    add_output(parser)
