"""`langchain-openai`: chat, streams, batches, structured output, tools, Responses with `previous_response_id`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import program, run
from tests.test_end_to_end import Server


@pytest.fixture(scope="module")
def told(server: Server) -> dict[str, Any]:
    python = program("llm").with_name("python")
    (only,) = server.client().models.list().data
    done = run(python, Path(__file__).with_name("langchain_session.py"), server.url, only.id)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("way", ["invoke", "stream", "completion"])
def test_answers(told: dict[str, Any], way: str) -> None:
    assert "Paris" in told[way]


def test_a_batch_gives_the_same_answer_each_time(told: dict[str, Any]) -> None:
    assert len(told["batch"]) == 3 and set(told["batch"]) == {told["stream"]}


def test_usage_comes_once(told: dict[str, Any]) -> None:
    (usage,) = told["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0


def test_structured_output(told: dict[str, Any]) -> None:
    assert 0 <= told["dog"]["age"] <= 20 and told["dog"]["name"]


def test_tools(told: dict[str, Any]) -> None:
    assert told["call"] == ["weather", ["city"]]
    assert told["after the call"] == "ai"


def test_a_response_goes_on(told: dict[str, Any]) -> None:
    first, second = told["responses"]
    assert "Paris" in first and "Rome" in second
    assert told["previous"].startswith("resp_")


def test_embeddings(told: dict[str, Any]) -> None:
    assert len(told["embeddings"]) == 2 and min(told["embeddings"]) > 0


def test_a_prompt_that_is_too_long_is_recognised(told: dict[str, Any]) -> None:
    """By its own exception, which it makes of what the message says."""
    kind, message = told["refused"]
    assert kind == "OpenAIContextOverflowError" and "prompt is too long" in message
