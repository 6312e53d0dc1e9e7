"""`speculation` and `prediction` as clients send them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bequest.engine.types.speculation import ON_CPU, ModelDrafts, Speculation
from tests.server.front import Front

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def drafting(front: Front) -> Front:
    front.engine.info = replace(front.engine.info, drafts=ON_CPU)
    return front


@pytest.mark.parametrize(
    ("given", "wish"),
    [
        (None, Speculation()),
        (True, Speculation()),
        (False, Speculation(method="off")),
        ({}, Speculation()),
        ({"method": None, "max_tokens": None}, Speculation()),
        ({"method": "auto", "max_tokens": 3}, Speculation(most=3)),
        ({"method": "ngram"}, Speculation(method="ngram")),
        ({"method": "suffix", "max_tokens": 2}, Speculation(method="suffix", most=2)),
        ({"method": "off"}, Speculation(method="off")),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/v1/responses"])
async def test_what_a_request_may_say(front: Front, path: str, given: Any, wish: Speculation) -> None:
    body: dict[str, Any] = {"/v1/completions": {"prompt": "a"}, CHAT: {"messages": HELLO}}.get(path, {"input": "a"})
    answer, content = await drafting(front).post(path, {**body, "speculation": given})
    assert answer.status == 200, content
    assert front.engine.submitted[-1].speculation == wish


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"method": "eagle"}, "speculation.method"),
        ({"method": 3}, "speculation.method"),
        ({"method": ["ngram"]}, "speculation.method"),
        ({"method": {}}, "speculation.method"),
        ({"tokens": 3}, "speculation.tokens"),
        ({"max_tokens": 0}, "speculation.max_tokens"),
        ({"max_tokens": 17}, "speculation.max_tokens"),
        ({"max_tokens": True}, "speculation.max_tokens"),
        ({"max_tokens": "4"}, "speculation.max_tokens"),
        ("ngram", "speculation"),
    ],
)
async def test_what_is_wrong_with_it(front: Front, given: Any, param: str) -> None:
    answer, content = await drafting(front).post("/v1/completions", {"prompt": "a", "speculation": given})
    assert answer.status == 400 and content["error"]["param"] == param, content
    assert not front.engine.submitted


async def test_a_device_that_checks_no_drafts(front: Front) -> None:
    asked: list[dict[str, Any]] = [{"speculation": {"method": name}} for name in ("ngram", "suffix")]
    for field in (*asked, {"prediction": {"type": "content", "content": "x"}}):
        answer, content = await front.post(CHAT, {"messages": HELLO, **field})
        assert answer.status == 400 and content["error"]["code"] == "unsupported_parameter", content
        assert content["error"]["param"].startswith(next(iter(field)))
    answer, _ = await front.post(CHAT, {"messages": HELLO, "speculation": False})
    assert answer.status == 200


async def test_a_draft_model_has_to_be_there(front: Front) -> None:
    body: dict[str, Any] = {"prompt": "a", "speculation": {"method": "eagle3"}}
    model = ModelDrafts(method="draft", costs=ON_CPU)
    for drafts in (None, ON_CPU, replace(ON_CPU, model=model)):
        front.engine.info = replace(front.engine.info, drafts=drafts)
        answer, content = await front.post("/v1/completions", body)
        assert answer.status == 400 and content["error"]["param"] == "speculation.method", content
    answer, _ = await front.post("/v1/completions", body | {"speculation": {"method": "draft", "max_tokens": 3}})
    assert answer.status == 200
    assert front.engine.submitted[-1].speculation == Speculation(method="draft", most=3)


@pytest.mark.parametrize("content", ["abc", [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]])
async def test_a_prediction(front: Front, content: Any) -> None:
    prediction = {"type": "content", "content": content}
    answer, told = await drafting(front).post(CHAT, {"messages": HELLO, "prediction": prediction})
    assert answer.status == 200, told
    assert front.engine.submitted[-1].speculation.prediction == tuple(b"abc")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"content": "a"}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": [{"type": "video"}]}, "prediction.content[0].type"),
        ("a", "prediction"),
    ],
)
async def test_what_is_wrong_with_a_prediction(front: Front, given: Any, param: str) -> None:
    answer, content = await drafting(front).post(CHAT, {"messages": HELLO, "prediction": given})
    assert answer.status == 400 and content["error"]["param"] == param, content
