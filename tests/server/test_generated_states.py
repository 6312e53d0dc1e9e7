"""`return_hidden_states`: on the choices of a whole answer, in one chunk of a streamed one, and the same numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import orjson
import pytest

from bequest.engine.types.hidden import HiddenStatesParams, Span
from tests.server.fake_states import HIDDEN, NUM_LAYERS, states_of
from tests.server.fakes import BOS, PIECES
from tests.server.front import Front
from tests.server.test_hidden_states import numbers

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abc"},
    CHAT: {"messages": [{"role": "user", "content": "abc"}]},
}
SAMPLED = tuple(piece.encode()[0] for piece in PIECES)


async def whole(front: Front, path: str = COMPLETIONS, **fields: Any) -> Any:
    answer, content = await front.post(path, {**BODIES[path], **fields})
    assert answer.status == 200, content
    await front.until(lambda: front.engine.states.held == 0)
    return content


async def streamed(front: Front, path: str = COMPLETIONS, **fields: Any) -> list[Any]:
    """The chunks, without the end, which must be there."""
    answer, content = await front.post(path, {**BODIES[path], "stream": True, **fields})
    assert answer.status == 200
    *events, done, empty = content.decode().split("\n\n")
    assert done == "data: [DONE]" and empty == "" and all(event.startswith("data: ") for event in events)
    await front.until(lambda: front.engine.states.held == 0)
    return [orjson.loads(event[6:]) for event in events]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_last_sampled_token(front: Front, path: str) -> None:
    content = await whole(front, path, return_hidden_states=True, max_tokens=5)
    request = front.engine.submitted[-1]
    assert request.hidden_states == HiddenStatesParams((NUM_LAYERS,)) and not request.extracts
    [choice] = content["choices"]
    ids = (*request.prompt_token_ids, *SAMPLED[:5])
    shown = choice["hidden_states"]
    assert shown["positions"] == [len(ids) - 1] and shown["index"] == 0 and shown["shape"] == [1, 1, HIDDEN]
    assert np.array_equal(numbers(shown), states_of(ids, [NUM_LAYERS], [len(ids) - 1]))
    assert content["computed_tokens"] == 1
    assert "hidden_states" not in choice.get("message", {})


@pytest.mark.parametrize("nothing", [None, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_nothing_is_asked_for(front: Front, path: str, nothing: Any) -> None:
    content = await whole(front, path, return_hidden_states=nothing)
    assert "hidden_states" not in content["choices"][0] and "computed_tokens" not in content
    assert front.engine.submitted[-1].hidden_states is None
    assert all("hidden_states" not in chunk for chunk in await streamed(front, path, return_hidden_states=nothing))


OPTIONS: list[Any] = [
    True,
    {},
    {"layers": "all", "positions": "all", "encoding_format": "base64"},
    {"layers": [2, 0, -1], "positions": "all", "include_prompt": True},
    {"positions": [0, -1, 2, 0], "dtype": "float16", "encoding_format": "base64"},
    {"positions": {"start": 1, "end": -1}, "dtype": "bfloat16", "encoding_format": "base64"},
    {"positions": "all", "pooling": "mean", "include_prompt": True},
    {"positions": [4, 6], "pooling": None, "layers": None, "include_prompt": None},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "path, extra", [(COMPLETIONS, {}), (CHAT, {}), (COMPLETIONS, {"prompt": ["abc", "de"], "n": 2})]
)
async def test_streamed_is_what_the_whole_answer_has(front: Front, path: str, extra: Any, options: Any) -> None:
    fields = {"return_hidden_states": options, "max_tokens": 7, **extra}
    content = await whole(front, path, **fields)
    chunks = await streamed(front, path, **fields)
    in_choices = [choice["hidden_states"] for choice in content["choices"]]
    [chunk] = [chunk for chunk in chunks if "hidden_states" in chunk]
    assert chunk is chunks[-1] and chunk["choices"] == []
    assert chunk["hidden_states"] == in_choices and chunk["computed_tokens"] == content["computed_tokens"]
    assert [entry["index"] for entry in in_choices] == list(range(len(in_choices)))
    ended = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ended) == list(range(len(in_choices)))


async def test_selected_numbers_of_each_choice(front: Front) -> None:
    options = {"layers": [1, 4], "positions": [0, -1], "encoding_format": "base64"}
    content = await whole(front, n=3, max_tokens=5, return_hidden_states=options)
    prompt = (BOS, *b"abc")
    for i, choice in enumerate(content["choices"]):
        ids = (*prompt, *SAMPLED[i:][:5])
        assert choice["hidden_states"]["positions"] == [4, len(ids) - 1]
        assert np.array_equal(numbers(choice["hidden_states"]), states_of(ids, [1, 4], [4, len(ids) - 1]))


async def test_what_a_completion_did_not_come_to(front: Front) -> None:
    shown = (await whole(front, max_tokens=16, return_hidden_states={"positions": [2, 12]}))["choices"][0]
    assert shown["hidden_states"]["positions"] == [6]
    shown = (await whole(front, max_tokens=16, return_hidden_states={"positions": [12]}))["choices"][0]
    assert shown["hidden_states"]["positions"] == [] and shown["hidden_states"]["data"] == [[]]
    for pooling in ("mean", "last"):
        options = {"positions": {"start": 12}, "pooling": pooling}
        content = await whole(front, max_tokens=16, return_hidden_states=options)
        assert content["choices"][0]["hidden_states"] is None
        assert (await streamed(front, max_tokens=16, return_hidden_states=options))[-1]["hidden_states"] == [None]


async def test_a_completion_of_nothing_is_an_extraction(front: Front) -> None:
    content = await whole(front, max_tokens=0, return_hidden_states={"positions": "all"})
    assert front.engine.submitted[-1].extracts
    assert content["choices"][0]["hidden_states"]["positions"] == [0, 1, 2, 3]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("usage", [True, False])
async def test_the_order_of_the_last_chunks(front: Front, path: str, usage: bool) -> None:
    """Every choice ends, then the states, then the usage; the lease is told in the very last chunk."""
    fields = {"return_hidden_states": True, "retain": True, "n": 2, "max_tokens": 5}
    chunks = await streamed(front, path, **fields, stream_options={"include_usage": usage})
    kinds = ["states" if "hidden_states" in c else "usage" if c.get("usage") else "text" for c in chunks]
    assert kinds[-2:] == (["states", "usage"] if usage else ["text", "states"]) and kinds.count("states") == 1
    assert [("retained" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(("usage" in chunk) is usage for chunk in chunks)


async def test_the_official_client_sees_them(front: Front) -> None:
    client = front.strict()
    extra = {"return_hidden_states": {"encoding_format": "base64"}}
    messages: Any = [{"role": "user", "content": "abc"}]
    answer = await client.chat.completions.create(model="fake/model", messages=messages, extra_body=extra)
    shown: Any = answer.choices[0].hidden_states  # type: ignore[attr-defined]
    stream = await client.chat.completions.create(
        model="fake/model", messages=messages, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-2].hidden_states == [shown] and chunks[-1].usage is not None  # type: ignore[attr-defined]


async def test_the_official_streaming_helper_goes_on_working(front: Front) -> None:
    messages: Any = [{"role": "user", "content": "abc"}]
    extra = {"return_hidden_states": {"positions": "all"}}
    async with front.client().chat.completions.stream(
        model="fake/model", messages=messages, extra_body=extra
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "".join(PIECES)


async def test_beams_have_states(front: Front) -> None:
    content = await whole(front, use_beam_search=True, n=2, max_tokens=3, return_hidden_states=True)
    assert [choice["hidden_states"]["index"] for choice in content["choices"]] == [0, 1]


async def test_with_a_parent(front: Front) -> None:
    parent = await whole(front)
    content = await whole(front, prompt="x", continuation_of=parent["id"], return_hidden_states={"positions": [0]})
    assert content["choices"][0]["hidden_states"]["positions"] == [12] and content["continuation"]["at"] == 11


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_large_ones_come_whole(front: Front, encoding: str) -> None:
    engine = front.engine
    engine.info = engine.states.info = dataclasses.replace(engine.info, hidden_size=1001)
    options = {"layers": "all", "positions": "all", "include_prompt": True, "encoding_format": encoding}
    fields: dict[str, Any] = {"prompt": [7] * 200, "return_hidden_states": options}
    content = await whole(front, **fields)
    chunks = await streamed(front, **fields, stream_options={"include_usage": True})
    [shown] = chunks[-2]["hidden_states"]
    ids = (*[7] * 200, *SAMPLED)
    expected = states_of(ids, range(NUM_LAYERS + 1), range(len(ids)), 1001)
    assert np.array_equal(numbers(shown), expected)
    assert np.array_equal(numbers(content["choices"][0]["hidden_states"]), expected)
    assert chunks[-1]["usage"]["prompt_tokens"] == 200


async def test_a_span_is_passed_on(front: Front) -> None:
    await whole(front, return_hidden_states={"positions": {"start": -2}, "include_prompt": True})
    wanted = front.engine.submitted[-1].hidden_states
    assert wanted == HiddenStatesParams((NUM_LAYERS,), Span(-2, None), include_prompt=True)


async def test_metrics(front: Front) -> None:
    await whole(front, n=2, return_hidden_states=True)
    await streamed(front, return_hidden_states=True)
    text = front.metrics.exposition()[0].decode()
    assert 'bequest:extractions_total{model_name="fake/model",of="completion"} 2.0' in text
    assert 'bequest:extracted_vectors_total{model_name="fake/model"} 3.0' in text
