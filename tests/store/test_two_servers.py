"""Two servers and a store: what one has promised, the other continues when the first was killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from openai import NotFoundError

from tests.store.mooncake_world import Store, running_store, why_not
from tests.test_end_to_end import Server

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.timeout(400)]

PROMPT = "Once upon a time there was a fox who lived in a small house at the edge of a wood."
SUFFIX = " The moral of the story:"


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with running_store() as store:
        yield store


def ask(server: Server, prompt: str, **fields: object) -> dict[str, object]:
    model = server.client().models.list().data[0].id
    extra = {"return_token_ids": True, **fields}
    answer = server.client().completions.create(
        model=model, prompt=prompt, max_tokens=24, temperature=0, extra_body=extra
    )
    return answer.model_dump()


def test_an_estate_outlives_its_server(store: Store) -> None:
    flags = ("--kv-cache-gb", "0.25", "--host-cache-gb", "0.25", "--estate-store", store.url("fox"))
    one, two = Server(*flags), Server(*flags)
    try:
        lasting = {"ttl": 600, "durable": True}
        parent = ask(one, PROMPT, request_id="fox", retain=lasting)
        assert parent["retained"]["durable"], parent["retained"]  # type: ignore[index]
        here = ask(one, SUFFIX, continuation_of="fox")
        one.process.send_signal(signal.SIGKILL)
        assert one.process.wait(30) == -signal.SIGKILL
        there = ask(two, SUFFIX, continuation_of="fox")
        assert _tokens(there) == _tokens(here)
        found = there["continuation"]
        assert isinstance(found, dict) and found["source"] == "file", found
        assert found["computed_tokens"] == len(here["choices"][0]["prompt_token_ids"]) - found["inherited_tokens"]  # type: ignore[index]
        assert found["computed_tokens"] == _suffix_tokens(two) + 1
        entry = two.client().get("/continuations/fox", cast_to=object)
        assert isinstance(entry, dict) and entry["grade"] == "stored"
        two.client().delete("/continuations/fox", cast_to=object)
        with pytest.raises(NotFoundError):
            ask(two, SUFFIX, continuation_of="fox")
    finally:
        one.stop()
        two.stop()


def _tokens(answer: dict[str, object]) -> object:
    return answer["choices"][0]["token_ids"]  # type: ignore[index]


def _suffix_tokens(server: Server) -> int:
    model = server.client().models.list().data[0].id
    url = server.url + "/tokenize"
    body = {"model": model, "prompt": SUFFIX, "add_special_tokens": False}
    answer = server.client().post(url, body=body, cast_to=object)
    assert isinstance(answer, dict)
    return int(answer["count"])
