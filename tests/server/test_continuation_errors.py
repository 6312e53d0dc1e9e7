"""Continuations and leases that cannot be had: class, code, details, and the official client's number of tries."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from bequest.engine.errors import InsufficientRetention, NameInUse, ParentFailed, RetentionTooLarge
from bequest.server.stores.coming import Coming
from tests.server.conftest import Starter
from tests.server.front import Front

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
MORE: list[Any] = [{"role": "user", "content": "more"}]
SYSTEM: list[Any] = [{"role": "system", "content": "be brief"}]


async def refused(front: Front, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    before = len(front.engine.submitted)
    answer, content = await front.post(path, body)
    assert answer.status == status, content
    assert set(content["error"]) == {"message", "type", "param", "code", "details"}
    assert len(front.engine.submitted) == before
    error: dict[str, Any] = content["error"]
    return error


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({"continuation_of": "p", "prompt": "x", "continuation_suffix": "y"}, "continuation_suffix", "invalid_value"),
        (
            {"continuation_of": "p", "prompt": [1], "continuation_token_ids": [2]},
            "continuation_token_ids",
            "invalid_value",
        ),
        (
            {"continuation_of": "p", "prompt": "", "continuation_suffix": "x", "continuation_token_ids": [2]},
            "continuation_suffix",
            "invalid_value",
        ),
        ({"continuation_of": "p", "prompt": ["x", "y"]}, "prompt", "invalid_value"),
        ({"continuation_of": "p", "prompt": [[1], [2]]}, "prompt", "invalid_value"),
        ({"continuation_of": "p", "prompt": [1, "x"]}, "prompt", "invalid_value"),
        ({"continuation_of": "p", "prompt": [258]}, "prompt[0]", "invalid_value"),
        (
            {"continuation_of": "p", "prompt": "", "continuation_token_ids": [1, 999]},
            "continuation_token_ids[1]",
            "invalid_value",
        ),
        ({"continuation_of": "p", "echo": True}, "echo", "invalid_value"),
        ({"continuation_of": "p", "prompt_logprobs": 0}, "prompt_logprobs", "invalid_value"),
        ({"continuation_of": "p", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "invalid_value"),
        ({"continuation_of": "p", "suffix": "x"}, "suffix", "invalid_value"),
        ({"continuation_of": "p", "continuation_at": "start"}, "continuation_at", "invalid_value"),
        ({"continuation_of": "p", "continuation_at": True}, "continuation_at", "invalid_type"),
        ({"continuation_of": "p", "continuation_at": 1.5}, "continuation_at", "invalid_type"),
        ({"continuation_of": "p", "continuation_at": 0}, "continuation_at", "continuation_index_out_of_range"),
        ({"continuation_of": "p", "continuation_at": -1}, "continuation_at", "continuation_index_out_of_range"),
        ({"continuation_of": "p", "continuation_at": 12}, "continuation_at", "continuation_index_out_of_range"),
        ({"continuation_of": "p", "continuation_at": 10**30}, "continuation_at", "continuation_index_out_of_range"),
        ({"continuation_of": "p", "continuation_choice": 1}, "continuation_choice", "continuation_choice_out_of_range"),
        (
            {"continuation_of": "p", "continuation_choice": -1},
            "continuation_choice",
            "continuation_choice_out_of_range",
        ),
        ({"continuation_of": "p", "cache_salt": "other"}, "cache_salt", "continuation_mismatch"),
        ({"continuation_of": "x" * 201}, "continuation_of", "invalid_value"),
        ({"continuation_of": ""}, "continuation_of", "invalid_value"),
        ({"continuation_of": "", "prompt": None, "continuation_suffix": "x"}, "continuation_of", "invalid_value"),
        ({"continuation_suffix": "x"}, "continuation_suffix", "invalid_value"),
        ({"continuation_token_ids": [1]}, "continuation_token_ids", "invalid_value"),
        ({"continuation_fallback": "x"}, "continuation_fallback", "invalid_value"),
        ({"continuation_at": 3}, "continuation_at", "invalid_value"),
        ({"continuation_at": "last"}, "continuation_at", "invalid_value"),
        ({"continuation_choice": 1}, "continuation_choice", "invalid_value"),
        ({"continuation_of": "gone", "continuation_fallback": [258]}, "continuation_fallback[0]", "invalid_value"),
        ({"retain": "yes"}, "retain", "invalid_type"),
        ({"retain": 60}, "retain", "invalid_type"),
        ({"retain": {"ttl": 0}}, "retain.ttl", "invalid_value"),
        ({"retain": {"ttl": -5}}, "retain.ttl", "invalid_value"),
        ({"retain": {"ttl": 86401}}, "retain.ttl", "invalid_value"),
        ({"retain": {"ttl": 10**30}}, "retain.ttl", "invalid_value"),
        ({"retain": {"ttl": "5"}}, "retain.ttl", "invalid_type"),
        ({"retain": {"ttl": True}}, "retain.ttl", "invalid_type"),
        ({"retain": {"seconds": 5}}, "retain.seconds", "unknown_parameter"),
        ({"retain": True, "store": False}, "retain", "invalid_value"),
        ({"retain": True, "prompt": ["a", "b"]}, "retain", "invalid_value"),
        ({"continuationOf": "p"}, "continuationOf", "unknown_parameter"),
        ({"continuation_off": "p"}, "continuation_off", "unknown_parameter"),
        ({"continuationAt": 3}, "continuationAt", "unknown_parameter"),
        ({"parent": "p"}, "parent", "unknown_parameter"),
        ({"parent_id": "p"}, "parent_id", "unknown_parameter"),
        ({"retains": True}, "retains", "unknown_parameter"),
    ],
)
async def test_completions(front: Front, fields: dict[str, Any], param: str, code: str) -> None:
    await front.post(COMPLETIONS, {"prompt": "abc", "request_id": "p"})
    error = await refused(front, COMPLETIONS, {"prompt": "x", **fields})
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"].endswith((".", "?"))


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({"messages": HELLO}, "messages", "continuation_repeats_parent"),
        ({"messages": HELLO + MORE}, "messages", "continuation_repeats_parent"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "?"}, *MORE]},
            "messages",
            "continuation_repeats_parent",
        ),
        ({"messages": MORE, "continuation_suffix": "x"}, "continuation_suffix", "invalid_value"),
        ({"messages": MORE, "continuation_token_ids": [1]}, "continuation_token_ids", "invalid_value"),
        ({"messages": [], "continuation_token_ids": [-1]}, "continuation_token_ids[0]", "invalid_value"),
        ({"messages": MORE, "continuation_at": 5}, "continuation_at", "invalid_value"),
        ({"messages": MORE, "continuation_at": 500}, "continuation_at", "continuation_index_out_of_range"),
        ({"messages": MORE, "continuation_choice": 2}, "continuation_choice", "continuation_choice_out_of_range"),
        ({"messages": MORE, "continue_final_message": True}, "continue_final_message", "invalid_value"),
        ({"messages": [], "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ({"messages": [{"role": "a robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": MORE, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
        ({"messages": MORE, "echo": True}, "echo", "unsupported_parameter"),
        ({"messages": MORE, "prompt": "x"}, "prompt", "unsupported_parameter"),
        ({"messages": MORE, "continuation_fallback": "x"}, "continuation_fallback", "invalid_type"),
        ({"messages": MORE, "continuation_of": "plain"}, "continuation_of", "continuation_mismatch"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages", "context_length_exceeded"),
        (
            {"continuation_of": "gone", "continuation_fallback": [{"role": "user"}]},
            "continuation_fallback[0].content",
            "missing_required_parameter",
        ),
    ],
)
async def test_chats(front: Front, fields: dict[str, Any], param: str, code: str) -> None:
    await front.post(CHAT, {"messages": HELLO, "request_id": "p"})
    await front.post(COMPLETIONS, {"prompt": "abc", "request_id": "plain"})
    error = await refused(front, CHAT, {"messages": MORE, "continuation_of": "p", **fields})
    assert (error["param"], error["code"]) == (param, code), error


async def test_numbers_in_the_details(front: Front) -> None:
    await front.post(COMPLETIONS, {"prompt": "abc", "request_id": "p", "n": 2})
    error = await refused(front, COMPLETIONS, {"continuation_of": "p", "continuation_at": 12})
    assert error["details"] == {"parent_tokens": 11} and "from 1 to 11" in error["message"]
    error = await refused(front, COMPLETIONS, {"continuation_of": "p", "continuation_choice": 2})
    assert error["details"] == {"choices": 2}


async def test_repeating_is_told_from_asking_again(front: Front) -> None:
    """What begins like the whole first request is a repetition; its last question alone is not."""
    await front.post(CHAT, {"messages": SYSTEM + HELLO, "request_id": "p"})
    await refused(front, CHAT, {"messages": SYSTEM + HELLO + MORE, "continuation_of": "p"})
    answer, _ = await front.post(CHAT, {"messages": HELLO, "continuation_of": "p", "request_id": "c"})
    assert answer.status == 200
    await refused(front, CHAT, {"messages": SYSTEM + HELLO + HELLO, "continuation_of": "c"})
    await front.post(CHAT, {"messages": HELLO, "request_id": "q"})
    await front.post(CHAT, {"messages": MORE, "continuation_of": "q", "request_id": "r"})
    answer, _ = await front.post(CHAT, {"messages": HELLO, "continuation_of": "r"})
    assert answer.status == 200
    await refused(front, CHAT, {"messages": HELLO + MORE, "continuation_of": "r"})


# --- the official client's tries


async def tried(front: Front, kind: type[openai.APIStatusError], **extra: Any) -> tuple[Any, int]:
    """The error that the client raises, and how often it tried."""
    client = front.client(max_retries=1)
    client._calculate_retry_timeout = lambda *_: 0.0  # type: ignore[method-assign]
    tries = []
    send = client._client.send

    async def counted(*args: Any, **options: Any) -> Any:
        tries.append(1)
        return await send(*args, **options)

    client._client.send = counted  # type: ignore[method-assign]
    with pytest.raises(kind) as caught:
        await client.completions.create(model="fake/model", prompt="", extra_body=extra)
    return caught.value, len(tries)


@pytest.mark.parametrize(
    "code, extra",
    [
        ("continuation_index_out_of_range", {"continuation_of": "p", "continuation_at": 99}),
        ("continuation_choice_out_of_range", {"continuation_of": "p", "continuation_choice": 9}),
        ("continuation_mismatch", {"continuation_of": "p", "cache_salt": "x"}),
        ("invalid_value", {"retain": {"ttl": 10**9}}),
    ],
)
async def test_bad_requests_are_tried_once(front: Front, code: str, extra: Any) -> None:
    await front.post(COMPLETIONS, {"prompt": "abc", "request_id": "p"})
    error, tries = await tried(front, openai.BadRequestError, **extra)
    assert error.code == code and error.type == "invalid_request_error" and tries == 1


async def test_repeated_messages_with_the_official_client(front: Front) -> None:
    await front.post(CHAT, {"messages": HELLO, "request_id": "p"})
    with pytest.raises(openai.BadRequestError) as caught:
        await front.client().chat.completions.create(
            model="fake/model", messages=HELLO + MORE, extra_body={"continuation_of": "p"}
        )
    assert caught.value.code == "continuation_repeats_parent"


async def test_a_parent_that_is_not_there(front: Front) -> None:
    error, tries = await tried(front, openai.NotFoundError, continuation_of="cmpl-0123")
    assert (error.code, error.param, tries) == ("continuation_parent_not_found", "continuation_of", 1)
    assert error.type == "not_found_error"
    front.engine.expired["anonymous", "old"] = 1234.0
    error, tries = await tried(front, openai.NotFoundError, continuation_of="old")
    assert (error.code, error.param, tries) == ("continuation_parent_expired", "continuation_of", 1)
    assert error.body["details"] == {"expired_at": 1234}
    refusal = await refused(front, CHAT, {"messages": [], "continuation_of": "old"}, 404)
    assert refusal["code"] == "continuation_parent_expired"


async def test_a_parent_that_failed(front: Front) -> None:
    await front.post(COMPLETIONS, {"prompt": "abc", "request_id": "p"})
    front.engine.find("anonymous", "p").failed = True
    error, tries = await tried(front, openai.ConflictError, continuation_of="p")
    assert (error.code, tries) == ("continuation_parent_failed", 1)
    assert error.response.headers["x-should-retry"] == "false" and error.type == "conflict_error"
    assert ParentFailed.code == error.code


async def test_a_retained_name(front: Front) -> None:
    _, kept = await front.post(COMPLETIONS, {"prompt": "abc", "request_id": "p"})
    error, tries = await tried(front, openai.ConflictError, request_id="p")
    assert (error.code, error.param, tries) == (NameInUse.code, "request_id", 1)
    assert error.response.headers["x-should-retry"] == "false" and "Retry-After" not in error.response.headers
    assert error.body["details"] == {"id": kept["id"], "status": "retained"}


@pytest.mark.parametrize("seconds, wait", [(None, "60"), (-5, "1"), (0.2, "1"), (9.5, "10"), (59.7, "60"), (1e6, "60")])
async def test_a_full_budget(front: Front, seconds: float | None, wait: str) -> None:
    expiry = None if seconds is None else time.time() + seconds
    details = {"budget_blocks": 8, "used_blocks": 8, "needed_blocks": 2, "earliest_expiry": expiry}
    front.engine.refusal = InsufficientRetention("The budget is full.", field="retain", details=details)
    error, tries = await tried(front, openai.RateLimitError, retain=True)
    assert (error.code, error.param, tries) == ("insufficient_retention", "retain", 1)
    assert error.response.headers["x-should-retry"] == "false" and error.response.headers["Retry-After"] == wait
    assert error.body["details"] == details


async def test_more_than_the_whole_budget(front: Front) -> None:
    details = {"budget": 8, "needed": 9}
    front.engine.refusal = RetentionTooLarge("More than the budget.", field="retain", details=details)
    error, tries = await tried(front, openai.BadRequestError, retain=True)
    assert (error.code, tries) == ("retention_too_large", 1) and error.body["details"] == details


# --- tenants


async def test_another_tenants_records_are_unknown(start: Starter) -> None:
    """By id or by name, on every endpoint: the same answer as for what never was, to the byte."""
    front = await start(api_key=["a", "b"])
    ours, theirs = ({"Authorization": f"Bearer {key}"} for key in ("a", "b"))
    _, made = await front.post(COMPLETIONS, {"prompt": "abc", "request_id": "mine", "retain": True}, headers=ours)

    async def bodies(reference: str) -> list[tuple[int, str]]:
        found = []
        for path, body in (
            (COMPLETIONS, {"prompt": "x"}),
            (CHAT, {"messages": MORE}),
            (COMPLETIONS, {"prompt": "x", "continuation_at": 3}),
        ):
            answer, content = await front.post(path, {**body, "continuation_of": reference}, headers=theirs)
            found.append((answer.status, str(content).replace(reference, "?")))
        for method, options in (("GET", {}), ("DELETE", {}), ("PATCH", {"json": {"ttl": 5}})):
            url = f"{front.url}/v1/continuations/{reference}"
            async with front.http.request(method, url, headers=theirs, **options) as answer:
                found.append((answer.status, (await answer.text()).replace(reference, "?")))
        return found

    unknown = await bodies("cmpl-" + "0" * 32)
    assert {status for status, _ in unknown} == {404}
    assert await bodies(made["id"]) == unknown and await bodies("mine") == unknown
    answer, listed = await front.get("/v1/continuations", headers=theirs)
    assert listed["data"] == []
    answer, _ = await front.get(f"/v1/continuations?after={made['id']}", headers=theirs)
    assert answer.status == 400
    answer, _ = await front.post(COMPLETIONS, {"prompt": "abc", "request_id": "mine"}, headers=theirs)
    assert answer.status == 200, "names are one tenant's"
    answer, _ = await front.post(COMPLETIONS, {"prompt": "x", "continuation_of": made["id"]}, headers=ours)
    assert answer.status == 200


async def test_a_request_that_continues_itself_does_not_wait_for_its_own_end(front: Front) -> None:
    body = {"prompt": "x", "request_id": "me", "continuation_of": "me"}
    async with asyncio.timeout(10):
        error = await refused(front, COMPLETIONS, body, 404)
    assert error["code"] == "continuation_parent_not_found"


async def test_requests_in_a_circle_do_not_wait_for_each_other() -> None:
    coming = Coming()
    with coming.waiting("a", "one", "two"), coming.waiting("a", "two", "three"), coming.waiting("a", "three", "one"):
        assert not await coming.ended("a", "one", None)
        assert not await coming.ended("b", "one", None)
    assert not await coming.ended("a", "one", None)
