"""POST /v1/embeddings, with the official client and without."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bequest.engine.types.hidden import HiddenStatesParams
from tests.server.fake_states import HIDDEN, NUM_LAYERS, states_of
from tests.server.fakes import BOS
from tests.server.front import Front

PATH = "/v1/embeddings"
PROMPT = (BOS, *b"abc")


def expected(ids: Any, length: int = HIDDEN, pooling: str = "last", normalize: bool = True) -> npt.NDArray[np.float32]:
    rows = states_of(ids, [NUM_LAYERS], range(len(ids)))[0].astype(np.float64)
    vector = (rows[-1] if pooling == "last" else rows.mean(0).astype(np.float32).astype(np.float64))[:length]
    scaled: npt.NDArray[np.float32] = (vector / (np.linalg.norm(vector) if normalize else 1)).astype(np.float32)
    return scaled


async def test_the_official_client_asks_for_base64_and_reads_floats(front: Front) -> None:
    answer = await front.client().embeddings.create(model="fake/model", input=["abc", "x"])
    assert [entry.index for entry in answer.data] == [0, 1] and answer.object == "list" and answer.model == "fake/model"
    assert [entry.object for entry in answer.data] == ["embedding"] * 2
    for entry, ids in zip(answer.data, (PROMPT, (BOS, *b"x")), strict=True):
        assert np.allclose(entry.embedding, expected(ids), rtol=1e-6) and len(entry.embedding) == HIDDEN
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (6, 6)
    request = front.engine.submitted[0]
    assert request.hidden_states == HiddenStatesParams((NUM_LAYERS,), "last", "last", "float32")
    assert request.extracts and not request.terms.keep_record and front.engine.states.held == 0


async def test_the_strict_client_reads_floats(front: Front) -> None:
    answer = await front.strict().embeddings.create(model="fake/model", input="abc", encoding_format="float")
    assert np.allclose(answer.data[0].embedding, expected(PROMPT), rtol=1e-6)


async def test_both_formats_hold_the_same_bits(front: Front) -> None:
    _, floats = await front.post(PATH, {"input": "abc"})
    _, text = await front.post(PATH, {"input": "abc", "encoding_format": "base64"})
    vector = np.frombuffer(base64.b64decode(text["data"][0]["embedding"]), "<f4")
    assert np.array_equal(vector, np.asarray(floats["data"][0]["embedding"], np.float32))
    assert set(floats) == {"object", "data", "model", "usage"}
    assert abs(np.linalg.norm(vector) - 1) < 1e-6


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("dimensions", [None, 1, 3, HIDDEN])
@pytest.mark.parametrize("normalize", [True, False, None])
async def test_options(front: Front, pooling: str, dimensions: int | None, normalize: bool | None) -> None:
    own = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
    _, content = await front.post(PATH, {"input": "abc", **own})
    wanted = expected(PROMPT, dimensions or HIDDEN, pooling, normalize is not False)
    found = np.asarray(content["data"][0]["embedding"], np.float32)
    assert found.shape == wanted.shape and np.allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("given, count", [("abc", 1), ([97, 98], 1), (["a", "b"], 2), ([[97], [98, 99], [3]], 3)])
async def test_inputs(front: Front, given: Any, count: int) -> None:
    _, content = await front.post(PATH, {"input": given})
    assert [entry["index"] for entry in content["data"]] == list(range(count))


async def test_a_vector_of_zeros_stays_one(front: Front) -> None:
    front.engine.states.spoil = lambda values: values * 0
    _, content = await front.post(PATH, {"input": "abc"})
    assert content["data"][0]["embedding"] == [0.0] * HIDDEN


async def test_two_thousand_inputs(front: Front) -> None:
    """As many as OpenAI takes, through a queue that holds fewer."""
    front.engine.most_extractions = 200
    inputs = [[i % 256, i // 256] for i in range(2048)]
    answer = await front.client().embeddings.create(model="fake/model", input=inputs, timeout=60)
    assert np.allclose(answer.data[1234].embedding, expected(inputs[1234]), rtol=1e-6)
    assert len(answer.data) == 2048 and front.engine.states.held == 0


async def test_fields_have_their_classes(front: Front) -> None:
    answer, content = await front.post(PATH, {"input": "abc", "user": "me", "dimensions": None, "colour": "blue"})
    assert answer.status == 200 and answer.headers["X-Bequest-Ignored"] == "colour", content
    assert answer.headers["X-Request-Id"] == front.engine.submitted[0].id


@pytest.mark.parametrize("field, value", [("chat_template", "x"), ("chat_template_kwargs", {"a": 1})])
async def test_what_renders_messages_needs_some(front: Front, field: str, value: Any) -> None:
    """A text is taken as it is, and the client would not see that its template was not."""
    answer, content = await front.post(PATH, {"input": ["a", "b"], field: value})
    assert answer.status == 400 and content["error"]["param"] == field
    assert "`messages`" in content["error"]["message"] and front.engine.submitted == []


@pytest.mark.parametrize("more", [{}, {"chat_template": "x"}])
async def test_an_input_that_is_missing(front: Front, more: dict[str, Any]) -> None:
    answer, content = await front.post(PATH, more)
    assert answer.status == 400 and content["error"]["param"] == "input"
    assert "`input` is missing" in content["error"]["message"] and "`messages`" in content["error"]["message"]
