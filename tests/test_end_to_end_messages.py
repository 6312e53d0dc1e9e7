"""Anthropic's client and a server of the embedded model: an agent's turns compute what is new, and leases are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from benchmarks.agent_loop import EPHEMERAL, loop
from tests.test_end_to_end import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--kv-cache-gb", "0.5")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


def leases(server: Server) -> list[Any]:
    listed: Any = server.client().get("/continuations?limit=100", cast_to=object)
    return [entry for entry in listed["data"] if (entry["request_id"] or "").startswith("cache:")]


def test_each_turn_of_an_agent_computes_what_is_new(server: Server, client: anthropic.Anthropic) -> None:
    first, *others = loop(client, 6)
    assert first.computed == first.prompt > 400
    # One token more: the last of an answer was sampled, and never fed back.
    assert [turn.computed for turn in others] == [turn.new + 1 for turn in others]
    assert max(turn.new for turn in others) < 100
    assert {entry["grade"] for entry in leases(server)} == {"leased"}


def test_a_stream_with_a_lease(server: Server, client: anthropic.Anthropic) -> None:
    ask: Any = [{"role": "user", "content": "What is the capital of France?"}]
    system: Any = [{"type": "text", "text": "You answer in one sentence. " * 20, "cache_control": EPHEMERAL}]
    model = client.models.list().data[0].id
    before = len(leases(server))
    options: Any = {
        "model": model,
        "max_tokens": 30,
        "system": system,
        "messages": ask,
        "extra_body": {"temperature": 0},
    }
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert "Paris" in text and message.stop_reason in ("end_turn", "max_tokens")
    assert (message.usage.cache_creation_input_tokens or 0) > 100
    assert len(leases(server)) == before + 1
    again = client.messages.create(**options)
    assert again.content[0].text == text  # type: ignore[union-attr]
    assert (again.usage.cache_read_input_tokens or 0) > 100 and again.usage.cache_creation_input_tokens == 0
    first = next(event for event in client.messages.create(stream=True, **options) if event.type == "message_start")
    read, whole = first.message.usage, again.usage
    assert (read.cache_read_input_tokens, read.input_tokens) == (whole.cache_read_input_tokens, whole.input_tokens)
    assert len(leases(server)) == before + 1


def test_a_call_that_must_come(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools: Any = [{"name": "weather", "description": "The weather of a city.", "input_schema": schema}]
    ask: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    model = client.models.list().data[0].id
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(model=model, max_tokens=60, messages=ask, tools=tools, tool_choice=choice)
    call = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use" and call.name == "weather" and isinstance(call.input["city"], str)


def test_an_answer_of_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    model = client.models.list().data[0].id
    ask: Any = [{"role": "user", "content": "How old is the dog?"}]
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = client.messages.create(model=model, max_tokens=30, messages=ask, output_config=form)
    assert answer.content[0].text.startswith('{"age":')  # type: ignore[union-attr]
