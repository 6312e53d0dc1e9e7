"""A coding agent's loop over /v1/messages: read, edit, run, again and again, with `cache_control` on its newest block.

    python -m benchmarks.agent_loop [--turns 20] [--url http://host:port]

Starts a server of the embedded model, unless a URL is given, and talks to it with the official `anthropic` client as
agents do: each turn sends the whole conversation, forces one of three tools, and answers the call. Of each turn it
prints the tokens of the prompt, those that are new in it (neither in the prompt before nor in the answer to that), and
those that were computed. Last come their sums, beside what would be computed without a cache.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic

SYSTEM = (
    "You are a careful programmer. You work in a repository with tools: you read files, you edit them, and you run "
    "the tests until they pass. Change as little as you can, and explain nothing. "
) * 4
_PATH = {"path": {"type": "string", "maxLength": 12}}
TOOLS: list[dict[str, Any]] = [
    {"name": "read", "description": "Reads a file.", "input_schema": _PATH},
    {
        "name": "edit",
        "description": "Replaces a line.",
        "input_schema": {**_PATH, "line": {"type": "integer", "maximum": 99}},
    },
    {"name": "run", "description": "Runs the tests.", "input_schema": {"suite": {"enum": ["all", "fast"]}}},
]
RESULTS = {
    "read": "def total(items):\n    cost = 0\n    for item in items:\n        cost += item.price\n    return cost\n",
    "edit": "1 line changed.",
    "run": "FAILED test_total: AssertionError: 3 != 4\n1 failed, {turn} passed in 0.{turn:02d} s",
}
EPHEMERAL = {"type": "ephemeral"}


@dataclass(frozen=True)
class Turn:
    prompt: int  # tokens
    new: int
    computed: int
    seconds: float


def schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def loop(client: anthropic.Anthropic, num_turns: int) -> Iterator[Turn]:
    model = client.models.list().data[0].id
    tools: list[Any] = [{**tool, "input_schema": schema(tool["input_schema"])} for tool in TOOLS]
    system: Any = [{"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL}]
    said: list[Any] = [{"role": "user", "content": [text("The tests fail. Make them pass.")]}]
    known = 0  # tokens of the prompt before and of its answer
    for number in range(num_turns):
        said[-1]["content"][-1]["cache_control"] = EPHEMERAL
        began = time.perf_counter()
        tool = TOOLS[number % len(TOOLS)]["name"]
        choice: Any = {"type": "tool", "name": tool, "disable_parallel_tool_use": True}
        answer = client.messages.create(
            model=model, max_tokens=64, system=system, messages=said, tools=tools, tool_choice=choice, extra_body=GREEDY
        )
        usage = answer.usage
        written = usage.cache_creation_input_tokens or 0
        prompt = usage.input_tokens + written + (usage.cache_read_input_tokens or 0)
        yield Turn(prompt, prompt - known, usage.input_tokens + written, time.perf_counter() - began)
        known = prompt + usage.output_tokens
        del said[-1]["content"][-1]["cache_control"]
        said.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        said.append({"role": "user", "content": [result(call.id, call.name, number) for call in calls]})


GREEDY = {"temperature": 0}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def result(call_id: str, name: str, turn: int) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": RESULTS[name].format(turn=turn)}


@contextmanager
def served() -> Iterator[str]:
    command = [sys.executable, "-m", "bequest", "serve", "--port", "0", "--kv-cache-gb", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield next(match[1] for line in process.stderr if (match := re.search(r"ready on (http://\S+)", line)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def report(turns: Iterator[Turn]) -> None:
    print("turn  prompt    new  computed  seconds")
    seen = []
    for number, turn in enumerate(turns, 1):
        print(f"{number:4}  {turn.prompt:6}  {turn.new:5}  {turn.computed:8}  {turn.seconds:7.2f}", flush=True)
        seen.append(turn)
    prompts, computed, new = (sum(getattr(turn, name) for turn in seen) for name in ("prompt", "computed", "new"))
    less = prompts / computed
    print(f"\nprompts have {prompts} tokens, {new} of them new; {computed} were computed, {less:.1f} times less")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--url")
    options = parser.parse_args()
    if options.url:
        report(loop(anthropic.Anthropic(base_url=options.url, api_key="any"), options.turns))
        return
    with served() as url:
        report(loop(anthropic.Anthropic(base_url=url, api_key="any"), options.turns))


if __name__ == "__main__":
    main()
