"""Hidden states of encoder-decoder models over HTTP: whose they are, and every complaint about that."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from bequest.engine.types import Request
from bequest.engine.types.hidden import HiddenStatesParams
from tests.server.fake_states import NUM_LAYERS, states_of
from tests.server.front import Front
from tests.server.test_encoder_prompts import HI, INFO, START
from tests.server.test_hidden_states import numbers

STATES, COMPLETIONS, EMBEDDINGS = "/v1/hidden_states", "/v1/completions", "/v1/embeddings"
ENCODER_LAYERS = 3
PAIR = {"encoder_prompt": "hi", "decoder_prompt": [20, 21]}


@pytest.fixture
def model(front: Front) -> Front:
    encoder = replace(INFO, num_layers=ENCODER_LAYERS)
    front.engine.info = front.engine.states.info = replace(front.engine.info, encoder=encoder)
    return front


async def ask(model: Front, **fields: Any) -> tuple[Any, Request]:
    answer, content = await model.post(STATES, {"input": "hi", **fields})
    assert answer.status == 200, content
    assert model.engine.states.held == 0, "what is sent is given back"
    return content, model.engine.submitted[-1]


async def refused(model: Front, path: str, body: dict[str, Any]) -> Any:
    before = len(model.engine.submitted)
    answer, content = await model.post(path, body)
    assert answer.status == 400 and len(model.engine.submitted) == before
    return content["error"]


async def test_a_plain_input_is_the_encoders(model: Front) -> None:
    content, request = await ask(model, positions="all", layers=[0, -1], request_id="name")
    assert content["stack"] == "encoder"
    [entry] = content["data"]
    assert entry["layers"] == [0, ENCODER_LAYERS] and entry["positions"] == [0, 1, 2]
    assert np.array_equal(numbers(entry), states_of(HI, [0, ENCODER_LAYERS], range(3)))
    assert request.encodes_only and request.terms.lineage is None
    assert request.hidden_states == HiddenStatesParams((0, ENCODER_LAYERS), "all", stack="encoder")


@pytest.mark.parametrize(
    ("given", "stack", "expected"),
    [
        (PAIR, None, "decoder"),
        (PAIR, "encoder", "encoder"),
        ([PAIR, PAIR], None, "decoder"),
        ([PAIR, "hi"], "decoder", "decoder"),
        ({"encoder_prompt": "hi", "decoder_prompt": None}, None, "encoder"),
        ({"prompt": "hi"}, "decoder", "decoder"),
        (["hi", HI], None, "encoder"),
        (HI, None, "encoder"),
    ],
)
async def test_whose_they_are(model: Front, given: Any, stack: str | None, expected: str) -> None:
    content, request = await ask(model, input=given, stack=stack)
    assert content["stack"] == expected
    assert request.hidden_states is not None and request.hidden_states.stack == expected
    read = HI if expected == "encoder" else list(request.prompt_token_ids)
    layer = ENCODER_LAYERS if expected == "encoder" else NUM_LAYERS
    assert np.array_equal(numbers(content["data"][-1]), states_of(read, [layer], [len(read) - 1]))


@pytest.mark.parametrize("encoding", ["base64", "safetensors"])
@pytest.mark.parametrize("pooling", ["none", "mean"])
async def test_every_encoding_of_several_inputs(model: Front, encoding: str, pooling: str) -> None:
    fields = {"layers": "all", "positions": "all", "pooling": pooling, "encoding_format": encoding}
    content, _ = await ask(model, input=["hi", [5, 6, 7, 8]], **fields)
    for index, ids in enumerate((HI, [5, 6, 7, 8])):
        expected = states_of(ids, range(ENCODER_LAYERS + 1), range(len(ids)))
        expected = expected if pooling == "none" else expected.mean(axis=1, dtype=np.float64).astype(np.float32)
        if encoding == "base64":
            assert np.array_equal(numbers(content["data"][index]), expected)
            continue
        tensors = safetensors.numpy.load(content)
        for layer in range(ENCODER_LAYERS + 1):
            assert np.array_equal(tensors[f"{index}.layer.{layer}"], expected[layer])
    if encoding == "safetensors":
        length = int.from_bytes(content[:8], "little")
        assert json.loads(content[8 : 8 + length])["__metadata__"]["stack"] == "encoder"


async def test_of_a_parent(model: Front) -> None:
    """The decoder's, or on demand what its encoder read."""
    _, parent = await model.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 2})
    content, request = await ask(model, input=None, continuation_of=parent["id"])
    assert content["stack"] == "decoder" and request.terms.lineage is not None
    content, request = await ask(model, input=None, continuation_of=parent["id"], stack="encoder", positions="all")
    assert np.array_equal(numbers(content["data"][0]), states_of(HI, [ENCODER_LAYERS], range(3)))
    assert request.encodes_only and "continuation" not in content


async def test_with_an_answer(model: Front) -> None:
    wanted = {"stack": "encoder", "positions": "all", "layers": [0, 2]}
    body = {"prompt": PAIR, "n": 2, "return_hidden_states": wanted}
    answer, content = await model.post(COMPLETIONS, body)
    assert answer.status == 200, content
    for choice in content["choices"]:
        assert choice["hidden_states"]["positions"] == [0, 1, 2]
        assert np.array_equal(numbers(choice["hidden_states"]), states_of(HI, [0, 2], range(3)))
    request = model.engine.submitted[-1]
    assert not request.extracts and request.prompt_token_ids == (START, 20, 21)
    _, content = await model.post(COMPLETIONS, {"prompt": PAIR, "return_hidden_states": True})
    assert content["choices"][0]["hidden_states"]["layers"] == [NUM_LAYERS], "without a word it is the decoder"


@pytest.mark.parametrize("pooling", [None, "mean", "last"])
async def test_embeddings_are_means_of_the_encoders_states(model: Front, pooling: str | None) -> None:
    answer, content = await model.post(EMBEDDINGS, {"input": "hi", "pooling": pooling, "normalize": False})
    assert answer.status == 200
    rows = states_of(HI, [ENCODER_LAYERS], range(3))[0]
    expected = rows[-1] if pooling == "last" else rows.mean(axis=0)
    assert np.allclose(content["data"][0]["embedding"], expected, atol=1e-6)
    assert model.engine.submitted[-1].encodes_only


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"layers": [ENCODER_LAYERS + 1]}, "layers"),
        ({"layers": [NUM_LAYERS + 1], "stack": "decoder"}, "layers"),
        ({"positions": [3]}, "positions"),
        ({"positions": [2], "stack": "decoder"}, "positions"),
        ({"input": [PAIR, "hi"]}, "stack"),
        ({"stack": "both"}, "stack"),
        ({"retain": True}, "retain"),
        ({"input": None, "continuation_of": "x", "stack": "encoder", "continuation_at": 3}, "continuation_at"),
        ({"continuation_of": "x", "stack": "encoder"}, "input"),
        ({"input": {"decoder_prompt": "x"}}, "input.encoder_prompt"),
        ({"input": ""}, "input"),
        ({"input": "x" * 64}, "input"),
        ({"input": {"encoder_prompt": "hi", "decoder_prompt": "x" * 600}}, "input.decoder_prompt"),
    ],
)
async def test_complaints(model: Front, fields: dict[str, Any], param: str) -> None:
    assert (await refused(model, STATES, {"input": "hi", **fields}))["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"return_hidden_states": {"stack": "both"}}, "return_hidden_states.stack"),
        ({"return_hidden_states": {"stack": "encoder", "include_prompt": True}}, "return_hidden_states.include_prompt"),
        ({"return_hidden_states": {"stack": "encoder", "positions": [3]}}, "return_hidden_states.positions"),
        ({"return_hidden_states": {"stack": "encoder", "layers": [4]}}, "return_hidden_states.layers"),
        ({"return_hidden_states": {"stack": "encoder"}, "max_tokens": 0, "retain": True}, "retain"),
        ({"suffix": "b"}, "suffix"),
    ],
)
async def test_complaints_about_a_completion(model: Front, body: dict[str, Any], param: str) -> None:
    assert (await refused(model, COMPLETIONS, {"prompt": "hi", **body}))["param"] == param


async def test_a_model_without_an_encoder(front: Front) -> None:
    error = await refused(front, COMPLETIONS, {"prompt": "a", "return_hidden_states": {"stack": "encoder"}})
    assert error["param"] == "return_hidden_states.stack"
    answer, content = await front.post(STATES, {"input": "a", "stack": "decoder"})
    assert answer.status == 200 and "stack" not in content


async def test_a_model_that_hears(model: Front) -> None:
    encoder = replace(INFO, takes="audio", num_layers=ENCODER_LAYERS)
    model.engine.info = replace(model.engine.info, encoder=encoder)
    for path in (STATES, EMBEDDINGS):
        error = await refused(model, path, {"input": "hi"})
        assert error["param"] == "input" and "audio" in error["message"]
