"""`bequest run`: one prompt, one answer, on standard output."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bequest.cli.connection import Connection, Failure, connected
from bequest.cli.parser import Parser
from bequest.cli.shown import ShownAnswer

_EPILOG = """\
  bequest run org/name "What is the capital of France?"
  bequest run model.gguf --json-schema schema.json "Invent a person" < notes.txt
  bequest run http://127.0.0.1:8000 "Say hello"       a server that runs already

What comes on standard input, until it ends, stands behind the prompt."""
_PATIENCE = 2.0  # seconds, after which somebody may wonder what is waited for
_ELSEWHERE = {
    "--model": "name the model without a flag: bequest run MODEL PROMPT",
    "-m": "name the model without a flag: bequest run MODEL PROMPT",
    "--prompt": "give the prompt without a flag: bequest run MODEL PROMPT",
    "-p": "give the prompt without a flag: bequest run MODEL PROMPT",
    "-n": "the flag is --max-tokens",
    "--n-predict": "the flag is --max-tokens",
    "--format": "the flag is --json-schema",
}


def main(arguments: Sequence[str]) -> int:
    given = _parse(arguments)
    try:
        body = _body(given)
        with connected(None if given.model == "-" else given.model, given.api_key) as connection:
            return _answer(connection, body)
    except Failure as error:
        print(f"bequest run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "bequest run",
        description="Answers one prompt.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        elsewhere=_ELSEWHERE,
        spare='a prompt of several words stands in quotes, as in bequest run MODEL "Say hello"',
    )
    parser.add_argument(
        "model", metavar="MODEL|URL", help="as for `bequest serve`; -: a server here, or the embedded one"
    )
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="default: standard input alone")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--json-schema", metavar="FILE|JSON", help="holds the answer to this JSON schema")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="longest answer")
    parser.add_argument("--temperature", metavar="X", type=float, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", metavar="N", type=int)
    parser.add_argument("--api-key", metavar="KEY", help="of the server; default: BEQUEST_API_KEY")
    return parser.read(arguments)


def _body(given: argparse.Namespace) -> dict[str, Any]:
    prompt = "\n\n".join(part for part in (given.prompt or "", _piped().rstrip("\n")) if part)
    if not prompt:
        raise Failure('there is no prompt: give one behind the model, as in bequest run MODEL "Say hello"')
    messages = [{"role": "system", "content": given.system}] if given.system else []
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": prompt}]}
    for name in ("max_tokens", "temperature", "seed"):
        if (value := getattr(given, name)) is not None:
            body[name] = value
    if given.json_schema is not None:
        schema = _schema(given.json_schema)
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return body


def _piped() -> str:
    """Standard input, where it is no terminal. A pipe that nobody will write to, as a program leaves one open that
    started this one, looks like one whose text takes its time: what is waited for is said, and nothing is left out."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    waits = threading.Timer(_PATIENCE, _say_what_is_awaited)
    waits.daemon = True
    waits.start()
    try:
        return sys.stdin.read()
    finally:
        waits.cancel()


def _say_what_is_awaited() -> None:
    said = "waiting for the end of standard input, which belongs to the prompt; </dev/null gives it none"
    print(f"bequest run: {said}", file=sys.stderr, flush=True)


def _schema(given: str) -> Any:
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except OSError as error:
            raise Failure(f"--json-schema {given}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise Failure(f"--json-schema {given}: the file is not in UTF-8") from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise Failure(f"--json-schema: not valid JSON: {error}") from None


def _answer(connection: Connection, body: dict[str, Any]) -> int:
    """0, or 1 where the answer was cut off at its longest."""
    reason, answer = None, ShownAnswer()
    try:
        for event in connection.stream("/v1/chat/completions", body):
            for choice in event.get("choices", ()):
                answer.take(choice["delta"])
                reason = choice.get("finish_reason") or reason
    except Failure:
        answer.break_off()
        raise
    print()
    if reason == "length":
        print("bequest run: the answer was cut off; --max-tokens allows a longer one", file=sys.stderr)
        return 1
    return 0
