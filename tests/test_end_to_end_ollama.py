"""The official `ollama` client and the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import ollama
import pytest

from tests.test_end_to_end import Server

GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def server(embedded_server: Server) -> Server:
    return embedded_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ollama.Client]:
    client = ollama.Client(server.url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def model(client: ollama.Client) -> str:
    name = client.list().models[0].model
    assert name is not None
    return name


def test_chats_streamed_and_whole_are_those_of_openais_shape(server: Server, client: ollama.Client, model: str) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat(model, messages, options=GREEDY)
    parts = list(client.chat(model, messages, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    other = server.client().chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=12,  # type: ignore[arg-type]
    )
    assert other.choices[0].message.content == whole.message.content
    last = parts[-1]
    assert last.prompt_eval_count == whole.prompt_eval_count and last.total_duration and last.eval_duration
    assert last.prompt_eval_duration and last.total_duration >= last.prompt_eval_duration + last.eval_duration
    assert whole.eval_duration and whole.prompt_eval_duration


def test_a_context_goes_on_as_the_conversation_would(client: ollama.Client, model: str) -> None:
    first = client.generate(model, "Name a colour.", options=GREEDY)
    second = client.generate(model, "Another one.", context=first.context, options=GREEDY)
    messages = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": first.response},
        {"role": "user", "content": "Another one."},
    ]
    assert client.chat(model, messages, options=GREEDY).message.content == second.response


def test_a_schema_is_followed(client: ollama.Client, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    answer = client.generate(model, "The weather?", format=schema, options={"temperature": 0})
    found = json.loads(answer.response)
    assert found["city"] in ("Paris", "Rome") and found["days"] <= 9
    text = client.chat(model, [{"role": "user", "content": "Hi"}], format="json", options=GREEDY).message.content
    assert text and text.lstrip().startswith("{")


def test_vectors(client: ollama.Client, model: str) -> None:
    found = client.embed(model, ["a cat", "a cat", "the sea"]).embeddings
    assert found[0] == found[1] != found[2] and len(found[0]) == 576


def test_the_embedded_model_is_as_large_as_its_file(client: ollama.Client) -> None:
    [listed] = client.list().models
    assert listed.details is not None and listed.size is not None
    assert (listed.details.format, listed.details.quantization_level) == ("gguf", "Q4")
    assert 90e6 < listed.size < 110e6
