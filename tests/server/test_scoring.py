"""`continuation_suffixes`: the log-probabilities of several suffixes of one prompt, or of a parent."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from bequest.engine.types import OutputMode, Retain
from tests.server.conftest import Starter
from tests.server.fakes import BOS, FakeEngine
from tests.server.front import Front

COMPLETIONS = "/v1/completions"
SCORE: dict[str, Any] = {"prompt": "abc", "continuation_suffixes": ["xy", [1, 2, 3]], "max_tokens": 0}


async def score(front: Front, **fields: Any) -> dict[str, Any]:
    answer, body = await front.post(COMPLETIONS, {**SCORE, **fields})
    assert answer.status == 200, body
    scored: dict[str, Any] = body
    return scored


async def refused(front: Front, **fields: Any) -> dict[str, Any]:
    answer, body = await front.post(COMPLETIONS, {**SCORE, **fields})
    assert answer.status == 400 and not front.engine.submitted, body
    error: dict[str, Any] = body["error"]
    return error


async def test_a_choice_for_each_suffix(front: Front) -> None:
    body = await score(front)
    first, second = body["choices"]
    assert first == {
        "index": 0,
        "text": "xy",
        "logprobs": {
            "tokens": ["x", "y"],
            "token_logprobs": [-15.0, -15.125],
            "top_logprobs": [{"x": -15.0}, {"y": -15.125}],
            "text_offset": [0, 1],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "cumulative_logprob": -30.125,
        "token_ids": [120, 121],
    }
    assert (second["index"], second["token_ids"], second["cumulative_logprob"]) == (1, [1, 2, 3], -0.75)
    assert body["object"] == "text_completion"
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4 + 5, 0)


async def test_what_the_engine_is_asked(front: Front) -> None:
    await score(front, logprobs=2, retain={"ttl": 9}, temperature=0.7, stop=["z"])
    [request] = front.engine.submitted
    assert request.prompt_token_ids == (BOS, *b"abc")
    assert request.suffixes == ((120, 121), (1, 2, 3))
    assert (request.params.max_tokens, request.params.n, request.params.logprobs) == (0, 1, 2)
    assert request.terms.retain == Retain(9.0) and request.output is OutputMode.FINAL


async def test_alternatives(front: Front) -> None:
    body = await score(front, logprobs=1, return_tokens_as_token_ids=True, continuation_suffixes=[[7]])
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:65": -0.25, "token_id:7": -0.875}]


@pytest.mark.parametrize("prompt", [None, "", []])
async def test_behind_a_parent(front: Front, prompt: Any) -> None:
    _, parent = await front.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 2, "request_id": "p"})
    body = await score(front, prompt=prompt, continuation_of="p", retain=True, request_id="scored")
    request = front.engine.submitted[-1]
    assert body["continuation"]["parent"] == parent["id"]
    assert request.terms.lineage is not None and request.terms.lineage.at == len(request.prompt_token_ids)
    assert len(body["choices"]) == 2
    # The lease is of the parent's tokens, not of what was scored behind them.
    assert body["retained"]["tokens"] == len(request.prompt_token_ids)
    _, entry = await front.get("/v1/continuations/scored")
    assert [choice["tokens"] for choice in entry["choices"]] == [len(request.prompt_token_ids)]


async def test_a_parent_that_is_gone(front: Front) -> None:
    body = await score(front, prompt=None, continuation_of="gone", continuation_fallback="whole")
    assert body["continuation"]["source"] == "recompute" and len(body["choices"]) == 2


async def test_as_many_as_there_may_be(front: Front) -> None:
    body = await score(front, continuation_suffixes=[[1]] * 1024)
    assert [choice["index"] for choice in body["choices"]] == list(range(1024))


async def test_the_younger_name_of_max_tokens(front: Front) -> None:
    body = await score(front, max_tokens=None, max_completion_tokens=0)
    assert len(body["choices"]) == 2


async def test_with_the_official_client(front: Front) -> None:
    extra = {"continuation_suffixes": ["x", "yz"]}
    answer = await front.strict().completions.create(model="fake/model", prompt="abc", max_tokens=0, extra_body=extra)
    assert [choice.text for choice in answer.choices] == ["x", "yz"]
    assert answer.choices[1].logprobs is not None and answer.choices[1].logprobs.tokens == ["y", "z"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continuation_suffixes": []}, "continuation_suffixes"),
        ({"continuation_suffixes": [[1]] * 1025}, "continuation_suffixes"),
        ({"continuation_suffixes": ["a", ""]}, "continuation_suffixes[1]"),
        ({"continuation_suffixes": ["a", []]}, "continuation_suffixes[1]"),
        ({"continuation_suffixes": ["a", [1, 900]]}, "continuation_suffixes[1][1]"),
        ({"continuation_suffixes": ["a", 5]}, "continuation_suffixes[1]"),
        ({"continuation_suffixes": "a"}, "continuation_suffixes"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"stream": True}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"catalogue": "c"}, "catalogue"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"continuation_suffix": "a"}, "continuation_suffix"),
        ({"continuation_token_ids": [1]}, "continuation_token_ids"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
async def test_what_cannot_be_scored(front: Front, fields: dict[str, Any], param: str) -> None:
    error = await refused(front, **fields)
    assert error["param"] == param and f"`{param.partition('[')[0]}" in error["message"], error


@pytest.mark.parametrize(
    ("suffix", "param"), [([1] * 509, "continuation_suffixes"), ("x" * 4000, "continuation_suffixes[0]")]
)
async def test_a_suffix_that_does_not_fit_behind_its_prompt(front: Front, suffix: Any, param: str) -> None:
    error = await refused(front, continuation_suffixes=[suffix])
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["details"]["max_model_len"] == 512
    assert len((await score(front, continuation_suffixes=[[1] * 508]))["choices"]) == 1


async def test_a_prompt_behind_a_parent_is_a_suffix_already(front: Front) -> None:
    await front.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 2, "request_id": "p"})
    answer, body = await front.post(COMPLETIONS, {**SCORE, "continuation_of": "p"})
    assert answer.status == 400 and body["error"]["param"] == "prompt"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/hidden_states", "/v1/embeddings"])
async def test_other_endpoints_say_where_it_belongs(front: Front, path: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    base = {"messages": messages} if "chat" in path else {"input": "a"}
    answer, body = await front.post(path, {**base, "continuation_suffixes": ["x"]})
    assert answer.status == 400 and body["error"]["code"] == "unsupported_parameter"
    assert "/v1/completions" in body["error"]["message"]


async def test_a_full_queue(front: Front) -> None:
    front.engine.full = True
    with pytest.raises(openai.RateLimitError):
        await front.client().completions.create(
            model="fake/model", prompt="abc", max_tokens=0, extra_body={"continuation_suffixes": ["x"]}
        )


async def test_a_client_that_leaves_stops_the_scoring(start: Starter) -> None:
    front = await start(FakeEngine())
    front.engine.held = True
    raw = await front.connect(SCORE)
    await front.until(lambda: bool(front.engine.submitted))
    raw.writer.close()
    await front.until(lambda: front.engine.aborted == [front.engine.submitted[0].id])
