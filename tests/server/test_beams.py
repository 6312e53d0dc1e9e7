"""Beam search over HTTP: what reaches the engine, what comes back, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import openai
import pytest

from bequest.engine.types import MAX_BEAM_WIDTH, BeamParams
from bequest.server.asks.sampling import MAX_ANSWER_BYTES
from tests.server.conftest import Starter
from tests.server.fakes import FakeEngine
from tests.server.front import Front

BEAMS: dict[str, Any] = {"prompt": "abc", "use_beam_search": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "max_tokens": 4}


async def refused(front: Front, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer, content = await front.post(path, body)
    assert answer.status == 400, content
    assert front.engine.submitted == []
    error: dict[str, Any] = content["error"]
    return error


@pytest.mark.parametrize(
    "fields, beams, n",
    [
        ({}, BeamParams(1), 1),
        ({"n": 3}, BeamParams(3), 3),
        ({"n": 2, "beam_width": 5}, BeamParams(5), 2),
        ({"n": 2, "best_of": 5}, BeamParams(5), 2),
        ({"best_of": 5, "beam_width": 5}, BeamParams(5), 1),
        ({"n": MAX_BEAM_WIDTH}, BeamParams(MAX_BEAM_WIDTH), MAX_BEAM_WIDTH),
        ({"length_penalty": 0, "early_stopping": True}, BeamParams(1, 0.0, True), 1),
        ({"length_penalty": -1.5, "early_stopping": "never"}, BeamParams(1, -1.5, "never"), 1),
        ({"length_penalty": None, "early_stopping": None, "beam_width": None}, BeamParams(1), 1),
        ({"temperature": 0, "top_p": 1, "top_k": -1, "seed": 7, "stop": [], "stream": False}, BeamParams(1), 1),
    ],
)
async def test_searches_reach_the_engine(front: Front, fields: dict[str, Any], beams: BeamParams, n: int) -> None:
    answer, content = await front.post("/v1/completions", {**BEAMS, **fields})
    assert answer.status == 200, content
    [request] = front.engine.submitted
    assert request.params.beams == beams and request.params.n == n
    assert "X-Bequest-Ignored" not in answer.headers


async def test_what_restricts_a_search_reaches_the_engine(front: Front) -> None:
    fields = {"max_tokens": 9, "min_tokens": 3, "stop_token_ids": [9], "allowed_token_ids": [5, 9], "logprobs": 2}
    await front.post("/v1/completions", {**BEAMS, **fields, "logit_bias": {"5": 1.5}, "ignore_eos": True})
    [request] = front.engine.submitted
    params = request.params
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.ignore_eos) == (9, 3, 2, True)
    assert params.stop_token_ids == {9} and params.allowed_token_ids == (5, 9) and params.logit_bias == ((5, 1.5),)


async def test_the_models_sampling_defaults_do_not_touch_a_search(start: Starter) -> None:
    engine = FakeEngine()
    engine.info = dataclasses.replace(engine.info, default_sampling={"temperature": 0.25, "top_k": 20, "top_p": 0.5})
    front = await start(engine)
    answer, content = await front.post("/v1/completions", BEAMS)
    assert answer.status == 200, content
    params = engine.submitted[0].params
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)


NO_BEAMS = [
    ({"temperature": 0.5}, "temperature", "invalid_value"),
    ({"temperature": 2}, "temperature", "invalid_value"),
    ({"top_p": 0.9}, "top_p", "unsupported_parameter"),
    ({"top_k": 5}, "top_k", "unsupported_parameter"),
    ({"min_p": 0.1}, "min_p", "unsupported_parameter"),
    ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
    ({"frequency_penalty": -1}, "frequency_penalty", "unsupported_parameter"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "unsupported_parameter"),
    ({"bad_words": ["x"]}, "bad_words", "unsupported_parameter"),
    ({"stop": "x"}, "stop", "unsupported_parameter"),
    ({"stop": ["x"]}, "stop", "unsupported_parameter"),
    ({"stream": True}, "stream", "unsupported_parameter"),
    ({"beam_width": 0}, "beam_width", "invalid_value"),
    ({"beam_width": 1025}, "beam_width", "invalid_value"),
    ({"beam_width": 10**30}, "beam_width", "invalid_value"),
    ({"best_of": 1025}, "best_of", "invalid_value"),
    ({"n": 1025}, "n", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 0, "beam_width": 2}, "n", "invalid_value"),
    ({"n": 3, "beam_width": 2}, "beam_width", "invalid_value"),
    ({"n": 3, "best_of": 2}, "best_of", "invalid_value"),
    ({"beam_width": 3, "best_of": 2}, "best_of", "invalid_value"),
    ({"beam_width": 2.5}, "beam_width", "invalid_type"),
    ({"length_penalty": 5.1}, "length_penalty", "invalid_value"),
    ({"length_penalty": -1e300}, "length_penalty", "invalid_value"),
    ({"length_penalty": "1"}, "length_penalty", "invalid_type"),
    ({"early_stopping": "always"}, "early_stopping", "invalid_value"),
    ({"early_stopping": 1}, "early_stopping", "invalid_type"),
    ({"use_beam_search": "yes"}, "use_beam_search", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"min_tokens": 17}, "min_tokens", "invalid_value"),
    ({"num_beams": 4}, "num_beams", "unknown_parameter"),
    ({"beamWidth": 4}, "beamWidth", "unknown_parameter"),
]


@pytest.mark.parametrize("path, base", [("/v1/completions", BEAMS), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("fields, param, code", NO_BEAMS)
async def test_refused_searches(
    front: Front, path: str, base: dict[str, Any], fields: dict[str, Any], param: str, code: str
) -> None:
    error = await refused(front, {**base, **fields}, path)
    assert (error["param"], error["code"]) == (param, code)
    assert f"`{param}`" in error["message"]


@pytest.mark.parametrize(
    "param, value", [("beam_width", 2), ("length_penalty", 2), ("early_stopping", True), ("early_stopping", "never")]
)
async def test_fields_of_a_search_without_one(front: Front, param: str, value: Any) -> None:
    for idle in ({}, {"use_beam_search": False}, {"use_beam_search": None}):
        error = await refused(front, {"prompt": "abc", **idle, param: value})
        assert (error["param"], error["code"]) == (param, "invalid_value") and "use_beam_search" in error["message"]
    answer, _ = await front.post("/v1/completions", {"prompt": "abc", "length_penalty": 1, "early_stopping": False})
    assert answer.status == 200


@pytest.mark.parametrize(
    "name, value",
    [
        ("use_beam_search", True),
        ("beam_width", 2),
        ("best_of", 2),
        ("length_penalty", 2),
        ("early_stopping", "never"),
        ("catalogue", "x"),
    ],
)
async def test_responses_have_no_beams(front: Front, name: str, value: Any) -> None:
    error = await refused(front, {"input": "hi", name: value}, "/v1/responses")
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    idle = {"use_beam_search": False, "length_penalty": 1, "early_stopping": False, "best_of": 1, "catalogue": None}
    answer, content = await front.post("/v1/responses", {"input": "hi", **idle})
    assert answer.status == 200, content


async def test_answers_that_would_not_fit(front: Front) -> None:
    front.engine.info = dataclasses.replace(front.engine.info, max_model_len=100_000)
    error = await refused(front, {**BEAMS, "beam_width": 1024, "max_tokens": 2000, "logprobs": 20})
    assert (error["param"], error["code"]) == ("logprobs", "answer_too_large")
    assert error["details"] == {"budget": MAX_ANSWER_BYTES, "needed": 1024 * 2000 * 21 * 100}
    await refused(front, {"prompt": ["a"] * 64, "n": 16, "max_tokens": 2000, "logprobs": 20})
    answer, _ = await front.post("/v1/completions", {**BEAMS, "beam_width": 1024, "max_tokens": 2000})
    assert answer.status == 200, "tokens alone are small"


async def test_the_strict_client_accepts_beams(front: Front) -> None:
    client = front.strict()
    extra = {"use_beam_search": True, "beam_width": 4}
    plain = await client.completions.create(model="fake/model", prompt="abc", n=3, logprobs=1, extra_body=extra)
    chat = await client.chat.completions.create(
        model="fake/model", messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=3, extra_body=extra
    )
    for answer in (plain, chat):
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.beam_score for choice in answer.choices] == [-0.5, -1.5, -2.5]  # type: ignore[union-attr]
        assert all(choice.cumulative_logprob < 0 for choice in answer.choices)  # type: ignore[union-attr]
    assert plain.usage is not None and plain.usage.prompt_tokens == 4
    assert plain.choices[0].logprobs is not None and chat.choices[0].logprobs is None


async def test_choices_without_beams_have_no_beam_score(front: Front) -> None:
    _, content = await front.post("/v1/completions", {"prompt": "abc", "logprobs": 1})
    assert "beam_score" not in content["choices"][0] and "cumulative_logprob" in content["choices"][0]


async def test_errors_of_the_official_client(front: Front) -> None:
    client = front.client(max_retries=2)
    with pytest.raises(openai.BadRequestError, match="`stream` cannot be used with `use_beam_search`") as caught:
        await client.completions.create(
            model="fake/model", prompt="a", stream=True, extra_body={"use_beam_search": True}
        )
    assert caught.value.code == "unsupported_parameter" and caught.value.param == "stream"


async def test_beams_continue_a_parent_and_are_leased(front: Front) -> None:
    _, parent = await front.post("/v1/completions", {"prompt": "abc", "max_tokens": 3, "retain": True})
    body = {**BEAMS, "prompt": "d", "continuation_of": parent["id"], "n": 2, "max_tokens": 2, "retain": {"ttl": 60}}
    answer, content = await front.post("/v1/completions", body)
    assert answer.status == 200, content
    assert content["continuation"]["parent"] == parent["id"] and content["retained"]["id"] == content["id"]
    second = front.engine.submitted[1]
    assert second.params.beams == BeamParams(2) and second.prompt_token_ids[-1] == ord("d")
    _, grandchild = await front.post(
        "/v1/completions", {"continuation_of": content["id"], "continuation_choice": 1, "max_tokens": 1}
    )
    assert grandchild["continuation"]["parent"] == content["id"]


async def test_scores_far_below_what_stands_for_impossible_stay_as_they_are(start: Starter) -> None:
    import math

    from bequest.engine.types import ChoiceDelta, Delta, Request, Usage

    def script(request: Request) -> Any:
        scores = (-25_000.0, -math.inf)
        yield Delta(
            request.id,
            tuple(ChoiceDelta(i, "x", (120,), None, "length", None, s, s) for i, s in enumerate(scores)),
            first=True,
            usage=Usage(1, 2, 0),
        )

    front = await start(FakeEngine(script))
    _, content = await front.post("/v1/completions", {**BEAMS, "n": 2})
    assert [choice["beam_score"] for choice in content["choices"]] == [-25_000.0, -9999.0]
    assert [choice["cumulative_logprob"] for choice in content["choices"]] == [-25_000.0, -9999.0]
