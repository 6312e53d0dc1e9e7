"""POST /v1/responses with the official client, which raises for every missing or foreign value."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from bequest.engine.errors import DeadlineExceeded, InternalError
from bequest.server.doors.messages.body import CountTokensBody
from bequest.server.wire.bodies import ResponseBody
from tests.server.conftest import Starter
from tests.server.fakes import PIECES, FakeEngine, failing_script
from tests.server.front import Front

WHOLE = "".join(PIECES)
PATH = "/v1/responses"


def events(body: bytes) -> list[Any]:
    """The JSON of each event; asserts the form of the stream, its numbers and its end."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    seen = []
    for number, part in enumerate(parts):
        kind, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}" and data.startswith("data: {")
        assert event["sequence_number"] == number
        seen.append(event)
    return seen


async def streamed(front: Front, body: dict[str, Any]) -> list[Any]:
    async with front.http.post(front.url + PATH, json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return events(await answer.read())


async def test_a_whole_response(front: Front) -> None:
    response = await front.strict().responses.create(
        model="fake/model", input="hi", instructions="be brief", metadata={"a": "b"}, user="me", top_p=0
    )
    assert response.id.startswith("resp_") and response.object == "response" and response.status == "completed"
    assert response.output_text == WHOLE and response.error is None and response.incomplete_details is None
    [message] = response.output
    assert message.type == "message" and message.id.startswith("msg_") and message.status == "completed"
    assert response.instructions == "be brief" and response.metadata == {"a": "b"} and response.user == "me"
    assert response.temperature == 1.0 and response.top_p == 0.0 and response.truncation == "disabled"
    assert response.tools == [] and response.tool_choice == "auto" and response.parallel_tool_calls is True
    assert response.text is not None and response.text.format is not None and response.text.format.type == "text"
    assert response.max_output_tokens is None and response.previous_response_id is None
    usage = response.usage
    [request] = front.engine.submitted
    assert usage is not None and usage.input_tokens == len(request.prompt_token_ids)
    assert usage.output_tokens == len(PIECES) and usage.total_tokens == usage.input_tokens + len(PIECES)
    assert usage.input_tokens_details.cached_tokens == 1
    assert usage.input_tokens_details.cache_write_tokens == usage.input_tokens - 1
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert bytes(request.prompt_token_ids) == b"system: be brief\nuser: hi\nassistant: "
    assert request.id == response.id and request.terms.keep_record and request.terms.lineage is None
    _, body = await front.post(PATH, {"input": "hi"})
    assert isinstance(body["created_at"], int) and isinstance(body["completed_at"], int)


async def test_a_stream_is_the_same_response(front: Front) -> None:
    client = front.strict()
    seen = [event async for event in await client.responses.create(model="fake/model", input="hi", stream=True)]
    assert [event.type for event in seen] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(PIECES),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.delta for event in seen if event.type == "response.output_text.delta"] == list(PIECES)
    created, last = seen[0].response, seen[-1].response
    assert created.status == "in_progress" and created.output == [] and created.usage is None
    assert created.id == last.id == front.engine.submitted[0].id
    assert last.output_text == WHOLE and last.status == "completed" and last.usage is not None
    places = {event.item_id for event in seen if hasattr(event, "item_id")}
    assert places == {last.output[0].id} == {event.item.id for event in seen if hasattr(event, "item")}
    whole = await client.responses.create(model="fake/model", input="hi")
    unlike = {"id", "created_at", "completed_at", "output"}
    assert whole.model_dump(exclude=unlike) == last.model_dump(exclude=unlike)


async def test_the_helper_of_the_client(front: Front) -> None:
    async with front.strict().responses.stream(model="fake/model", input="hi") as stream:
        texts = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert texts[-1] == WHOLE == final.output_text and final.usage is not None


async def test_one_event_per_delivery_and_the_body_ends_with_the_last(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"input": "hi", "stream": True}, PATH)
    await front.settle()
    assert raw.reader._buffer == b"", "the status line waits for the first token"  # type: ignore[attr-defined]
    front.engine.advance()
    head = await raw.head()
    assert b"text/event-stream; charset=utf-8" in head and b"X-Request-Id: resp_" in head
    seen = await raw.chunk()
    assert seen.startswith(b"event: response.created\ndata: {") and b'"delta":"Hel"' in seen
    for piece in PIECES[1:-1]:
        front.engine.advance()
        chunk = await raw.chunk()
        assert chunk.count(b"event: ") == 1 and json.dumps(piece, ensure_ascii=False).encode() in chunk
        seen += chunk
    front.engine.advance()
    seen += await raw.chunk()
    assert await raw.chunk() == b"" and b"[DONE]" not in seen
    assert events(seen)[-1]["type"] == "response.completed"
    # The connection is ready for the next request.
    front.engine.held = False
    await raw.request({"input": "hi", "stream": True}, PATH)
    assert b"200 OK" in await raw.head()
    await raw.close()


async def test_leaving_after_the_last_event_is_no_abort(front: Front) -> None:
    raw = await front.connect({"input": "hi", "stream": True}, PATH)
    await raw.reader.readuntil(b"event: response.completed")
    await raw.reader.readuntil(b"\n\n")
    await raw.close()
    await front.settle()
    assert front.engine.aborted == []
    answer, _ = await front.get(f"{PATH}/{front.engine.submitted[0].id}")
    assert answer.status == 200


async def test_too_short_is_incomplete(front: Front) -> None:
    client = front.strict()
    response = await client.responses.create(model="fake/model", input="hi", max_output_tokens=2)
    assert response.status == "incomplete" and response.output_text == "Hello" and response.max_output_tokens == 2
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    stream = await client.responses.create(model="fake/model", input="hi", max_output_tokens=2, stream=True)
    seen = [event async for event in stream]
    assert seen[-1].type == "response.incomplete" and seen[-1].response.status == "incomplete"
    nothing = await client.responses.create(model="fake/model", input="hi", max_output_tokens=0)
    assert nothing.output_text == "" and nothing.status == "incomplete"


async def test_logprobs(front: Front) -> None:
    client = front.strict()
    options: dict[str, Any] = {"model": "fake/model", "input": "hi", "include": ["message.output_text.logprobs"]}
    response = await client.responses.create(**options, top_logprobs=1)
    [part] = response.output[0].content  # type: ignore[union-attr]
    assert part.type == "output_text" and part.logprobs is not None and len(part.logprobs) == len(PIECES)
    assert part.logprobs[0].logprob == -0.5 and len(part.logprobs[0].top_logprobs) == 1
    assert response.top_logprobs == 1
    seen = [event async for event in await client.responses.create(**options, stream=True)]
    deltas = [event for event in seen if event.type == "response.output_text.delta"]
    assert [len(event.logprobs) for event in deltas] == [1] * len(PIECES)
    [done] = [event for event in seen if event.type == "response.output_text.done"]
    assert [entry.token for entry in done.logprobs] == [entry.token for event in deltas for entry in event.logprobs]
    plain = await client.responses.create(model="fake/model", input="hi", top_logprobs=0)
    assert front.engine.submitted[-1].params.logprobs is None
    assert plain.output[0].content[0].logprobs == []  # type: ignore[union-attr]


async def test_bodies_of_coding_agents(front: Front) -> None:
    """As the known ones send them: everything set, most of it advisory, the history in the input."""
    body = {
        "model": "fake/model",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "permissions"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
            {"type": "function_call", "name": "shell", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "README"},
        ],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "prompt_cache_retention": "24h",
        "text": {"verbosity": "low"},
        "service_tier": None,
        "client_metadata": {"installation": "x"},
    }
    async with front.http.post(front.url + PATH, json=body) as answer:
        seen = events(await answer.read())
    assert answer.headers["X-Bequest-Ignored"] == "client_metadata"
    last = seen[-1]["response"]
    assert last["status"] == "completed" and last["store"] is False and last["parallel_tool_calls"] is False
    assert last["reasoning"] == {"effort": "medium", "summary": "auto"} and last["prompt_cache_key"] == "0199"
    assert last["prompt_cache_retention"] == "24h"
    assert last["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    messages = front.text.chat_template.seen[-1]["messages"]  # type: ignore[union-attr]
    assert [message["role"] for message in messages] == ["system", "developer", "user", "assistant", "tool"]
    [request] = front.engine.submitted
    assert not request.terms.keep_record
    answer, error = await front.get(f"{PATH}/{last['id']}")
    assert answer.status == 404 and error["error"]["code"] == "response_not_found"


async def test_bodies_full_of_nulls(front: Front) -> None:
    """As LangChain and others send what they leave unset."""
    names = (
        "instructions max_output_tokens previous_response_id temperature top_p tools tool_choice text reasoning "
        "include metadata store truncation user stream stream_options background top_logprobs retain request_id seed"
    )
    answer, body = await front.post(PATH, {"input": "hi", **dict.fromkeys(names.split())})
    assert answer.status == 200 and body["status"] == "completed" and body["store"] is True
    answer, _ = await front.post(PATH, {"input": "hi", "text": {"format": None}, "reasoning": {"effort": None}})
    assert answer.status == 200


async def test_sampling_fields_reach_the_engine(front: Front) -> None:
    body = {"input": "hi", "temperature": 0, "top_p": 0.5, "seed": 7, "top_k": 5, "min_p": 0.1, "stop": ["x"]}
    answer, _ = await front.post(PATH, {**body, "priority": 3, "timeout": 60, "cache_salt": "s"})
    assert answer.status == 200
    [request] = front.engine.submitted
    params = request.params
    assert (params.temperature, params.top_p, params.seed, params.top_k, params.min_p) == (0, 0.5, 7, 5, 0.1)
    assert params.stop == ("x",) and request.priority == 3 and request.deadline and request.cache_salt == "s"


@pytest.mark.parametrize("after", range(1, len(PIECES)))
async def test_failure_in_the_middle(start: Starter, after: int) -> None:
    front = await start(FakeEngine(failing_script(InternalError("The device returned NaN."), after)))
    seen = []
    with pytest.raises(openai.APIError) as caught:
        async for event in await front.strict().responses.create(model="fake/model", input="hi", stream=True):
            seen.append(event)  # noqa: PERF401 - those before the error count
    assert caught.value.code == "internal_error" and caught.value.type == "server_error"
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "".join(
        PIECES[:after]
    )
    assert seen[-1].type == "response.failed" and seen[-1].response.status == "failed"
    error = seen[-1].response.error
    assert error is not None and error.code == "server_error" and error.message == "The device returned NaN."
    raw = await streamed(front, {"input": "hi"})
    assert raw[-1]["type"] == "error" and raw[-1]["message"] == "The device returned NaN."
    assert raw[-1]["code"] == raw[-1]["error"]["code"] == "internal_error"
    answer, _ = await front.get(f"{PATH}/{raw[0]['response']['id']}")
    assert answer.status == 404, "what failed is not stored"


async def test_failure_before_the_first_token_is_an_http_error(start: Starter) -> None:
    late = DeadlineExceeded("The request was still queued at its timeout.", field="deadline")
    front = await start(FakeEngine(failing_script(late, 0)))
    for stream in (True, False):
        answer, body = await front.post(PATH, {"input": "hi", "stream": stream})
        assert answer.status == 504 and body["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("after", range(len(PIECES)))
async def test_leaving_aborts_and_nothing_is_stored(front: Front, after: int) -> None:
    front.engine.held = True
    raw = await front.connect({"input": "hi", "stream": True}, PATH)
    await front.settle()
    for number in range(after):
        front.engine.advance()
        if number == 0:
            await raw.head()
        await raw.chunk()
    await raw.close()
    await front.settle()
    [request] = front.engine.submitted
    assert front.engine.aborted == [request.id]
    answer, _ = await front.get(f"{PATH}/{request.id}")
    assert answer.status == 404


@pytest.mark.parametrize(
    "body, param, code",
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "missing_required_parameter"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "invalid_value"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [5]}, "input[0]", "invalid_type"),
        ({"input": "a", "instructions": ["x"]}, "instructions", "invalid_type"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens", "invalid_value"),
        ({"input": "a", "max_output_tokens": 100_000}, "input", "context_length_exceeded"),
        ({"input": "a" * 600}, "input", "context_length_exceeded"),
        ({"input": "a" * 600, "truncation": "auto"}, "input", "context_length_exceeded"),
        ({"input": "a" * 60_000}, "input", "context_length_exceeded"),
        ({"input": "a" * 60_000, "truncation": "auto"}, "input", "context_length_exceeded"),
        ({"input": "a", "max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"input": "a", "n": 2}, "n", "unsupported_parameter"),
        ({"input": "a", "truncation": "some"}, "truncation", "invalid_value"),
        ({"input": "a", "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"input": "a", "temperature": 3}, "temperature", "invalid_value"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"input": "a", "background": True, "store": False}, "background", "invalid_value"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"input": "a", "prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"input": "a", "continuation_of": "resp_1"}, "continuation_of", "unsupported_parameter"),
        ({"input": "a", "text": {"format": {"type": "json"}}}, "text.format.type", "invalid_value"),
        ({"input": "a", "text": {"format": "text"}}, "text.format", "invalid_type"),
        ({"input": "a", "stream_options": {}}, "stream_options", "invalid_value"),
        ({"input": "a", "previous_response": "x"}, "previous_response", "unknown_parameter"),
        ({"input": "a", "store": False, "retain": True}, "retain", "invalid_value"),
        ({"input": "a", "model": "gpt"}, "model", "model_not_found"),
        ({"input": "refuse me"}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "file"}]}]}, "input[0].content[0].type", "invalid_value"),
        ({"input": "a", "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "invalid_value"),
    ],
)  # fmt: skip
async def test_wrong_bodies(front: Front, body: dict[str, Any], param: str | None, code: str) -> None:
    answer, error = await front.post(PATH, body)
    assert (error["error"]["param"], error["error"]["code"]) == (param, code), error
    assert answer.status == (404 if code == "model_not_found" else 400)
    assert front.engine.submitted == []


async def test_fields_of_openai_are_no_near_misses(front: Front) -> None:
    names = "access_programs context_management image moderation personality prompt_cache_options max_tool_calls"
    answer, body = await front.post(PATH, {"input": "hi", **dict.fromkeys(names.split(), 1)})
    assert answer.status == 200, body


async def test_foreign_values_are_not_told_back(front: Front) -> None:
    """A client that checks types fails at those outside of OpenAI's lists."""
    client = front.strict()
    odd = {"service_tier": "mine", "text": {"verbosity": "mine"}, "extra_body": {"prompt_cache_retention": "mine"}}
    response = await client.responses.create(model="fake/model", input="hi", **odd)  # type: ignore[call-overload]
    assert (response.service_tier, response.prompt_cache_retention) == ("default", None)
    response = await client.responses.create(model="fake/model", input="hi", service_tier="fast")
    assert response.service_tier == "fast"


async def test_values_that_nothing_can_be_included_of(front: Front) -> None:
    answer, _ = await front.post(PATH, {"input": "hi", "include": ["web_search_call.results", "x.y"]})
    assert answer.status == 200 and answer.headers["X-Bequest-Ignored"] == "include[x.y]"


async def test_a_model_without_a_template(front: Front) -> None:
    front.text.chat_template = None
    answer, body = await front.post(PATH, {"input": "hi"})
    assert answer.status == 400 and "/v1/completions" in body["error"]["message"] and body["error"]["param"] == "input"


async def test_counting_tokens(front: Front) -> None:
    client = front.strict()
    counted = await client.responses.input_tokens.count(model="fake/model", input="hi", instructions="be brief")
    response = await client.responses.create(model="fake/model", input="hi", instructions="be brief")
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens
    child = await client.responses.input_tokens.count(previous_response_id=response.id, input="more")
    assert child.input_tokens > counted.input_tokens and len(front.engine.submitted) == 1
    assert (await front.post(f"{PATH}/input_tokens", {}))[0].status == 400


async def test_counting_more_tokens_than_the_model_takes(start: Starter) -> None:
    """Whoever counts wants to know by how many; only a text that would take too long to count is refused."""
    front = await start(max_tokenize_chars=100_000)
    client = front.strict()
    for num_chars in (600, 60_000):
        counted = await client.responses.input_tokens.count(model="fake/model", input="a" * num_chars)
        assert counted.input_tokens == len("user: \nassistant: ") + num_chars
    turns: Any = [{"role": "user", "content": "a" * 60_000}, {"role": "user", "content": "b"}]
    left = await client.responses.input_tokens.count(model="fake/model", input=turns, truncation="auto")
    assert left.input_tokens == len("user: b\nassistant: ")
    with pytest.raises(openai.BadRequestError, match=r"`input` has .* at most 100000") as caught:
        await client.responses.input_tokens.count(model="fake/model", input="a" * 100_000)
    assert caught.value.param == "input"


async def test_the_least_tokens_are_held_against_the_field_that_was_sent(front: Front) -> None:
    answer, told = await front.post(PATH, {"input": "a", "max_output_tokens": 2, "min_tokens": 9})
    assert answer.status == 400 and told["error"]["param"] == "min_tokens"
    assert "from 0 to `max_output_tokens` (2)" in told["error"]["message"]


WRONG: list[Any] = [5, -1, 1.5, "", "x", True, [5], ["x"], {"type": 5}, [{"type": 5}], [{"role": 5}]]
BODIES: list[tuple[str, type[Any], dict[str, Any]]] = [
    (PATH, ResponseBody, {"input": "a"}),
    (f"{PATH}/input_tokens", ResponseBody, {"input": "a"}),
    ("/v1/messages/count_tokens", CountTokensBody, {"messages": [{"role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize("path, kind, body", BODIES, ids=[path for path, _, _ in BODIES])
async def test_an_error_names_the_field_that_was_sent(
    front: Front, path: str, kind: type[Any], body: dict[str, Any]
) -> None:
    refused = set()
    for name in kind.__struct_fields__:
        for wrong in WRONG:
            answer, told = await front.post(path, {**body, name: wrong})
            if answer.status != 200:
                refused.add(name)
                error = told["error"]
                assert answer.status < 500 and re.fullmatch(rf"{name}([.\[].*)?", error["param"] or ""), told
                assert f"`{name}" in error["message"] or error["code"] != "invalid_type", told
    assert refused >= set(kind.__struct_fields__) - {"model"}


async def test_truncation_drops_the_oldest(front: Front) -> None:
    turns = [
        {"role": role, "content": f"{number} " + "x" * 50} for number in range(8) for role in ("user", "assistant")
    ]
    last = {"role": "user", "content": "the question"}
    body = {"instructions": "stay", "input": [*turns, last], "truncation": "auto", "max_output_tokens": 10}
    answer, seen = await front.post(PATH, body)
    assert answer.status == 200 and seen["truncation"] == "auto"
    text = bytes(front.engine.submitted[0].prompt_token_ids).decode()
    lines = [f"{turn['role']}: {turn['content']}\n" for turn in turns]
    kept = [line for line in lines if line in text]
    assert kept == lines[len(lines) - len(kept) :] and 0 < len(kept) < len(lines)
    assert text == "system: stay\n" + "".join(kept) + "user: the question\nassistant: "
    assert len(text) + 10 <= 512 < len(text) + 10 + len(lines[0]), "no more than needed was dropped"
    answer, body = await front.post(PATH, {**body, "truncation": "disabled"})
    assert answer.status == 400 and body["error"]["code"] == "context_length_exceeded"
