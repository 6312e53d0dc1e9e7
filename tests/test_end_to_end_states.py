"""Hidden states of the embedded model over HTTP, beside those that transformers computes."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from tests.engine.model_states import Reference, reference_of
from tests.models.embedded_reference import embedded_reference
from tests.test_end_to_end import Server

NUM_LAYERS, HIDDEN = 30, 576
# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
LAYERS = [0, 1, 17, -1]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--kv-cache-gb", "0.5", "--max-num-batched-tokens", "7", "--cpu-matmul", "exact")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of(embedded_reference())


def post(server: Server, path: str, **fields: Any) -> bytes:
    request = urllib.request.Request(
        server.url + path, json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def extract(server: Server, **fields: Any) -> Any:
    return json.loads(post(server, "/v1/hidden_states", encoding_format="base64", **fields))


def complete(server: Server, **fields: Any) -> Any:
    return json.loads(post(server, "/v1/completions", temperature=0, return_token_ids=True, **fields))


def numbers(entry: Any) -> npt.NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(entry["data"]), np.float32).reshape(entry["shape"])


def check(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """[K, P, H], relative to the largest number of each layer."""
    assert found.shape == expected.shape
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() <= TOLERANCE * np.abs(other).max()


def test_of_a_prompt(server: Server, reference: Reference) -> None:
    expected = reference(PROMPT)
    for again in (False, True):  # computed, and found in the cache
        answer = extract(server, input=PROMPT, layers=LAYERS, positions=[3, 0, -1, 8])
        [entry] = answer["data"]
        assert entry["layers"] == [0, 1, 17, 30] and entry["positions"] == [3, 0, 15, 8]
        check(numbers(entry), expected[LAYERS][:, [3, 0, 15, 8]])
        assert answer["computed_tokens"] == (4 if again else len(PROMPT))


def test_a_file_with_every_layer_and_position_of_two_prompts(server: Server, reference: Reference) -> None:
    inputs = [PROMPT, [*PROMPT[:9], 77, 78]]
    fields = {"layers": "all", "positions": "all", "encoding_format": "safetensors"}
    tensors = safetensors.numpy.load(post(server, "/v1/hidden_states", input=inputs, **fields))
    for index, tokens in enumerate(inputs):
        found = np.stack([tensors[f"{index}.layer.{layer}"] for layer in range(NUM_LAYERS + 1)])
        check(found, reference(tokens))


def test_of_a_parent_it_costs_what_is_asked_for(server: Server, reference: Reference) -> None:
    parent = complete(server, prompt=PROMPT, max_tokens=8, ignore_eos=True, retain=True)
    tokens = PROMPT + parent["choices"][0]["token_ids"]
    expected = reference(tokens)
    last = extract(server, continuation_of=parent["id"], continuation_at="last", layers=LAYERS)
    check(numbers(last["data"][0]), expected[LAYERS][:, [-1]])
    assert last["data"][0]["positions"] == [len(tokens) - 1]
    assert last["computed_tokens"] == 1 and last["continuation"]["source"] == "blocks"
    three = extract(server, continuation_of=parent["id"], continuation_at=20, layers=LAYERS, positions=[-1, 2, 5])
    check(numbers(three["data"][0]), expected[LAYERS][:, [19, 2, 5]])
    assert three["computed_tokens"] == 3
    child = complete(server, continuation_of=last["id"], prompt="", max_tokens=2)
    assert child["continuation"]["inherited_tokens"] >= len(tokens) - 1


@pytest.mark.parametrize("include_prompt", [False, True])
def test_of_a_completion_streamed_or_not(server: Server, reference: Reference, include_prompt: bool) -> None:
    wanted = {"layers": LAYERS, "positions": "all", "include_prompt": include_prompt, "encoding_format": "base64"}
    fields = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "return_hidden_states": wanted}
    whole = complete(server, **fields)
    tokens = PROMPT + whole["choices"][0]["token_ids"]
    shown = whole["choices"][0]["hidden_states"]
    positions = list(range(0 if include_prompt else len(PROMPT), len(tokens)))
    assert shown["positions"] == positions
    check(numbers(shown), reference(tokens)[LAYERS][:, positions])
    events = post(server, "/v1/completions", temperature=0, stream=True, **fields).decode().split("\n\n")
    chunks = [json.loads(event[6:]) for event in events[:-2]]
    assert chunks[-1]["hidden_states"] == [shown] and chunks[-1]["choices"] == []
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]


def test_the_last_token_of_each_choice(server: Server, reference: Reference) -> None:
    answer = complete(server, prompt=PROMPT, max_tokens=4, n=2, seed=3, return_hidden_states=True)
    for choice in answer["choices"]:
        tokens = PROMPT + choice["token_ids"]
        shown = choice["hidden_states"]
        assert shown["positions"] == [len(tokens) - 1]
        check(np.asarray(shown["data"], np.float32), reference(tokens)[[NUM_LAYERS]][:, [-1]])


def test_embeddings_with_the_official_client(server: Server, reference: Reference) -> None:
    client = server.client()
    (model,) = client.models.list().data
    lengths = {"last": 64, "mean": HIDDEN}
    for pooling, length in lengths.items():
        answer = client.embeddings.create(
            model=model.id,
            input=[PROMPT, PROMPT[:5]],
            dimensions=length,
            encoding_format="float",
            extra_body={"pooling": pooling},
        )
        for entry, tokens in zip(answer.data, (PROMPT, PROMPT[:5]), strict=True):
            rows = reference(tokens)[-1]
            vector = (rows[-1] if pooling == "last" else rows.mean(0))[:length]
            assert np.abs(np.asarray(entry.embedding) - vector / np.linalg.norm(vector)).max() < TOLERANCE
