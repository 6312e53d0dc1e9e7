"""Anthropic's Messages, by their own client: text, tools, thoughts, streams, errors; and by hand what it cannot say."""

from __future__ import annotations

import base64
import json
from typing import Any

import anthropic
import pytest

from bequest.engine.errors import EngineDead, InsufficientRetention
from bequest.engine.types import ChoiceDelta, Delta, Request, Usage
from bequest.server.doors.messages.body import MessagesBody
from bequest.server.doors.messages.tools import message_tools
from tests.server.conftest import Starter
from tests.server.fakes import seeing_engine
from tests.server.front import Front
from tests.server.test_reasoning import thinking
from tests.server.test_tools import TWO_CALLS, saying
from tests.tiny_seeing import encoded, picture

ASK: list[Any] = [{"role": "user", "content": "Where?"}]
TOOLS: list[Any] = [
    {"name": name, "description": "Does it.", "input_schema": {"type": "object", "properties": {}}}
    for name in ("look", "go")
]
EPHEMERAL = {"type": "ephemeral"}
URL = {"type": "url", "url": "https://images.test/cat.png"}
PICTURE = {
    "type": "base64",
    "media_type": "image/png",
    "data": base64.b64encode(encoded(picture(9, 7))).decode(),
}


def client(front: Front, **options: Any) -> anthropic.AsyncAnthropic:
    transport = anthropic.DefaultAsyncHttpxClient(verify=False)
    defaults = {"base_url": front.url, "api_key": "any", "max_retries": 0, "http_client": transport}
    made = anthropic.AsyncAnthropic(**{**defaults, **options}, _strict_response_validation=True)
    front.closers.append(made.close)
    return made


async def create(front: Front, **fields: Any) -> anthropic.types.Message:
    return await client(front).messages.create(**{"model": "fake/model", "max_tokens": 99, "messages": ASK, **fields})


async def streamed(front: Front, **fields: Any) -> tuple[anthropic.types.Message, list[Any]]:
    options = {"model": "fake/model", "max_tokens": 99, "messages": ASK, **fields}
    async with client(front).messages.stream(**options) as stream:
        events = [event async for event in stream]
        return await stream.get_final_message(), events


def prompt(front: Front) -> str:
    """Of the last message that the engine got."""
    last = [request for request in front.engine.submitted if request.id.startswith("msg_")][-1]
    return bytes(last.prompt_token_ids).decode()


def cached(front: Front) -> list[Request]:
    return [request for request in front.engine.submitted if request.id.startswith("cache-")]


# --- answers -----------------------------------------------------------------------------------------------------


async def test_a_message(front: Front) -> None:
    more = {"temperature": 0.5, "top_k": 7}  # that newer clients have no arguments for
    answer = await create(front, system="Be brief.", metadata={"user_id": "u"}, extra_body=more)
    [block] = answer.content
    assert block.type == "text" and block.text == 'Hello wörld 👋"quoted"\nend'
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake/model")
    assert answer.stop_reason == "end_turn" and answer.id.startswith("msg_")
    assert answer._request_id == answer.id
    assert answer.usage.output_tokens > 0 and answer.usage.service_tier == "standard"
    assert prompt(front) == "system: Be brief.\nuser: Where?\nassistant: "
    params = front.engine.submitted[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 99)


async def test_a_stream_tells_the_same(front: Front) -> None:
    whole, (final, events) = await create(front), await streamed(front)
    assert final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    kinds = [event.type for event in events if event.type not in ("text", "content_block_delta")]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


async def test_the_bytes_of_a_stream(front: Front) -> None:
    body = {"model": "fake/model", "max_tokens": 9, "messages": ASK, "stream": True}
    _, content = await front.post("/v1/messages", body, headers={"anthropic-version": "2023-06-01"})
    events = [part.split("\n") for part in content.decode().strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert [json.loads(data.removeprefix("data: "))["type"] for _, data in events] == names


async def test_a_stream_begins_with_what_was_found_in_the_cache(front: Front) -> None:
    body = {"model": "fake/model", "max_tokens": 9, "messages": ASK, "stream": True}
    _, content = await front.post("/v1/messages", body)
    first, *_, delta, _ = [json.loads(part.split("data: ")[1]) for part in content.decode().strip().split("\n\n")]
    began, ended = first["message"]["usage"], delta["usage"]
    assert began["cache_read_input_tokens"] == ended["cache_read_input_tokens"] == 1  # as the fake engine says
    assert began["input_tokens"] == ended["input_tokens"] > 0


@pytest.mark.parametrize(
    "reason, stop, told",
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", 7, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("length", "deadline", ("max_tokens", None)),
    ],
)
async def test_why_it_ended(front: Front, reason: Any, stop: Any, told: tuple[Any, Any]) -> None:
    def script(request: Request) -> Any:
        yield Delta(request.id, (ChoiceDelta(0, "x", (65,), None, reason, stop),), first=True, usage=Usage(3, 1, 0))

    front.engine.script = script
    answer = await create(front, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == told
    final, _ = await streamed(front, stop_sequences=["END"])
    assert (final.stop_reason, final.stop_sequence) == told
    assert front.engine.submitted[-1].params.stop == ("END",)


async def test_more_tokens_than_the_window_has(front: Front) -> None:
    """Clients ask for the most that a model of Anthropic's has."""
    front.engine.script = saying("x" * 5, 1, "length")
    answer, _ = await streamed(front, max_tokens=64000)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert front.engine.submitted[-1].params.max_tokens < 512


async def test_an_answer_that_has_begun_goes_on(front: Front) -> None:
    await create(front, messages=[*ASK, {"role": "assistant", "content": "In the"}])
    assert prompt(front) == "user: Where?\nassistant: In the"


async def test_turns_of_one_role_are_one(front: Front) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "c"}}
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": [document]}]
    await create(front, messages=messages)
    assert prompt(front) == "user: a+b+T\nc\nassistant: "


# --- images ------------------------------------------------------------------------------------------------------


async def test_images(start: Starter) -> None:
    front = await start(engine=seeing_engine())
    image = {"type": "image", "source": PICTURE}
    content = [image, {"type": "text", "text": "Where?"}, {**image, "cache_control": EPHEMERAL}]
    ask = [{"role": "user", "content": content}]
    counted = await client(front).messages.count_tokens(model="fake/model", messages=ask)
    answer = await create(front, messages=ask)
    first, lease = front.engine.submitted
    [seen] = first.images
    rows = bytes(first.said_token_ids).decode(), first.prompt_token_ids.count(seen.first_id)
    assert rows == ("user: +Where?+\nassistant: ", 2), "the same file twice is one image"
    assert counted.input_tokens == len(first.prompt_token_ids)
    # The lease ends behind the second image, not in the middle of it.
    assert lease.images == (seen,) and lease.prompt_token_ids == first.prompt_token_ids[: -len("\nassistant: ")]
    assert lease.prompt_token_ids[-1] == seen.first_id + seen.num_rows - 1

    said = [*ask, {"role": "assistant", "content": [block.model_dump() for block in answer.content]}]
    await create(front, messages=[*said, *ASK])
    child = front.engine.submitted[-1]
    assert child.terms.lineage is not None and child.terms.lineage.parent == first.id
    assert child.images == (seen,) and child.terms.lineage.at > len(first.prompt_token_ids)


async def test_images_of_results(start: Starter) -> None:
    front = await start(engine=seeing_engine())
    calls = [{"type": "tool_use", "id": name, "name": "look", "input": {}} for name in ("a", "b")]
    image = {"type": "image", "source": PICTURE}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "here"}, image]},
        {"type": "tool_result", "tool_use_id": "b", "content": [image], "is_error": True},
    ]
    turns = [*ASK, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    await create(front, messages=turns, tools=TOOLS)
    request = front.engine.submitted[-1]
    assert bytes(request.said_token_ids).decode().endswith("tool: here+\ntool: Error+\nassistant: ")
    assert request.prompt_token_ids.count(request.images[0].first_id) == 2


@pytest.mark.parametrize(
    "source, param, message",
    [
        (None, "source", "an object"),
        ({}, "source.type", "missing"),
        ({"type": "file", "file_id": "f"}, "source.type", "'base64' or 'url'"),
        ({**PICTURE, "media_type": "image/tiff"}, "source.media_type", "image/webp"),
        ({**PICTURE, "data": "@@@"}, "source.data", "not valid base64"),
        ({**PICTURE, "data": "aGk="}, "source.data", "image"),
        (URL, "source.url", "--allow-image-hosts"),
    ],
)
async def test_images_that_are_none(start: Starter, source: Any, param: str, message: str) -> None:
    front = await start(engine=seeing_engine())
    ask = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    answer, told = await front.post("/v1/messages", {"model": "fake/model", "max_tokens": 9, "messages": ask})
    assert answer.status == 400 and told["error"]["param"] == f"messages[0].content[0].{param}", told
    assert message in told["error"]["message"] and not front.engine.submitted


# --- tools -------------------------------------------------------------------------------------------------------


async def test_calls(front: Front) -> None:
    front.engine.script = saying(TWO_CALLS, 3)
    answer = await create(front, tools=TOOLS)
    final, events = await streamed(front, tools=TOOLS)
    for message in (answer, final):
        text, look, go = message.content
        assert message.stop_reason == "tool_use" and text.type == "text" and text.text == "Let me see."
        assert look.type == go.type == "tool_use" and look.id.startswith("toolu_") and look.id != go.id
        assert (look.name, look.input, go.name, go.input) == ("look", {"at": 'the "sea" 👋'}, "go", {})
    assert any(event.type == "input_json" for event in events)
    assert len({event.index for event in events if event.type == "content_block_stop"}) == 3


@pytest.mark.parametrize("arguments", ['{"at": 1', f'{{"at": {"[" * 300}{"]" * 300}}}'])
async def test_broken_arguments(front: Front, arguments: str) -> None:
    """And those that are nested deeper than an answer can be."""
    front.engine.script = saying(f'<tool_call>{{"name": "look", "arguments": {arguments}', 3, "length")
    answer = await create(front, tools=TOOLS)
    assert answer.content[0].input == {"INVALID_JSON": arguments}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "choice, told",
    [
        (None, ("auto", None, True)),
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "go"}, ("required", {"go"}, False)),
        ({"type": "none"}, ("none", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
    ],
)
def test_tool_choice(choice: Any, told: tuple[Any, ...]) -> None:
    tools = message_tools(MessagesBody(tools=TOOLS, tool_choice=choice))
    assert (tools.choice, tools.allowed, tools.parallel) == told
    assert [function.parameters for function in tools.functions] == [tool["input_schema"] for tool in TOOLS]


async def test_one_call_at_a_time(front: Front) -> None:
    front.engine.script = saying(TWO_CALLS, 3)
    answer = await create(front, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert sum(block.type == "tool_use" for block in answer.content) == 1


async def test_the_choice_of_none(front: Front) -> None:
    front.engine.script = saying(TWO_CALLS, 3)
    answer = await create(front, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]


async def test_results_go_back(front: Front) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "A sea."}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "gone", "is_error": True}
    said = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "I look."}, call]
    messages = [
        *ASK,
        {"role": "assistant", "content": said},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "And?"}]},
    ]
    await create(front, tools=TOOLS, messages=messages)
    template = front.text.chat_template
    assert template is not None
    _, spoken, first, second, last = template.seen[-1]["messages"]
    assert spoken["content"] == "I look." and spoken["reasoning_content"] == "Hm."
    assert spoken["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 1}}
    assert first == {"role": "tool", "tool_call_id": "toolu_1", "name": "look", "content": "A sea."}
    assert second["content"] == "Error: gone" and last == {"role": "user", "content": "And?"}


# --- thoughts ----------------------------------------------------------------------------------------------------


async def test_thoughts_are_blocks(start: Starter) -> None:
    front = await thinking(start)
    answer = await create(front, thinking={"type": "adaptive"})
    final, events = await streamed(front, thinking={"type": "adaptive"})
    for message in (answer, final):
        thought, text = message.content
        assert thought.type == "thinking" and thought.thinking == "I weigh\nit 👋." and thought.signature == message.id
        assert text.type == "text" and text.text == "Yes."
        told = len("I weigh\nit 👋.\n</think>".encode())
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens == told
    assert [event.type for event in events].count("signature") == 1
    assert prompt(front).endswith("[assistant]<think>")


async def test_thoughts_that_nobody_asked_for(start: Starter) -> None:
    """Clients take the first block for the answer."""
    front = await thinking(start)
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        front.engine.script = saying("Yes.", 3)
        answer = await create(front, **fields)
        assert [block.type for block in answer.content] == ["text"]
        assert prompt(front).endswith("[assistant]<think></think>")


async def test_thoughts_whose_text_is_not_wanted(start: Starter) -> None:
    front = await thinking(start)
    answer = await create(front, thinking={"type": "adaptive", "display": "omitted"})
    thought, _ = answer.content
    assert thought.type == "thinking" and thought.thinking == "" and thought.signature


async def test_thinking_that_cannot_be(front: Front) -> None:
    with pytest.raises(anthropic.BadRequestError, match="marks no thoughts"):
        await create(front, thinking={"type": "enabled", "budget_tokens": 1024})
    with pytest.raises(anthropic.BadRequestError, match=r"`thinking\.type` must be one of"):
        await create(front, thinking={"type": "between_tools"})
    assert (await create(front, thinking={"type": "adaptive"})).content[0].type == "text"


async def test_a_budget_needs_an_end_of_one_token(start: Starter) -> None:
    front = await thinking(start)
    with pytest.raises(anthropic.BadRequestError, match="no single token"):
        await create(front, thinking={"type": "enabled", "budget_tokens": 1024})


# --- cache_control -----------------------------------------------------------------------------------------------


async def test_the_beginning_is_leased_up_to_its_mark(front: Front) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": EPHEMERAL}]
    for number, send in enumerate((create, streamed), 1):
        system[0]["text"] = f"Be brief {number}."
        await send(front, system=system)
        await front.until(lambda number=number: len(cached(front)) == number)
        lease = cached(front)[-1]
        assert bytes(lease.prompt_token_ids).decode() == f"system: Be brief {number}."
        assert lease.params.max_tokens == 0 and lease.terms.retain is not None and lease.terms.retain.ttl == 300
        assert lease.terms.lineage is not None and lease.terms.lineage.at == len(lease.prompt_token_ids)


async def test_usage_tells_what_was_read_and_written(front: Front) -> None:
    first = [{"role": "user", "content": [{"type": "text", "text": "Where?", "cache_control": EPHEMERAL}]}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {**EPHEMERAL, "ttl": "1h"}}]
    body = {"model": "fake/model", "max_tokens": 9, "messages": first, "system": system}
    _, told = await front.post("/v1/messages", body)
    usage, read = told["usage"], told["usage"]["cache_read_input_tokens"]
    assert read == 1  # as the fake engine says
    assert usage["cache_creation"] == {
        "ephemeral_1h_input_tokens": len("system: Be brief.") - read,
        "ephemeral_5m_input_tokens": len("\nuser: Where?"),
    }
    assert usage["cache_creation_input_tokens"] == len("system: Be brief.\nuser: Where?") - read
    assert {request.terms.retain.ttl for request in cached(front) if request.terms.retain} == {300, 3600}


async def test_the_same_beginning_is_leased_once(front: Front) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": EPHEMERAL}]
    await create(front, system=system)
    [lease] = cached(front)
    before = front.engine.record(lease.tenant, lease.id).expires_at
    await create(front, system=system)
    assert len(cached(front)) == 1
    after = front.engine.record(lease.tenant, lease.id).expires_at
    assert before is not None and after is not None and after >= before


async def test_a_lease_that_is_not_granted(front: Front) -> None:
    def script(request: Request) -> Any:
        front.engine.refusal = InsufficientRetention("no room")
        return saying("Yes.", 3)(request)

    front.engine.script = script
    answer = await create(front, cache_control=EPHEMERAL)
    assert answer.usage.cache_creation_input_tokens == 0 and answer.content[0].type == "text"


@pytest.mark.parametrize("place", ["tools", "tool_result", "tool_use", "top"])
async def test_marks_elsewhere(front: Front, place: str) -> None:
    tool, call = dict(TOOLS[0]), {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "A sea."}
    marked = {"tools": tool, "tool_result": result, "tool_use": call}.get(place)
    if marked is not None:
        marked["cache_control"] = EPHEMERAL
    more = {"cache_control": EPHEMERAL} if place == "top" else {}
    messages = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    await create(front, tools=[tool], messages=messages, **more)
    leases = [bytes(lease.prompt_token_ids).decode() for lease in cached(front)]
    # This template shows neither tools nor calls.
    shown = "user: Where?\nassistant: \ntool: A sea."
    assert leases == ([shown] if place in ("top", "tool_result") else [])


async def test_too_many_marks_and_wrong_ones(front: Front) -> None:
    blocks = [{"type": "text", "text": str(n), "cache_control": EPHEMERAL} for n in range(5)]
    with pytest.raises(anthropic.BadRequestError, match="At most 4 blocks"):
        await create(front, system=blocks)
    for given, what in (({"type": "lasting"}, "must be 'ephemeral'"), ({**EPHEMERAL, "ttl": "2d"}, "'5m' or '1h'")):
        with pytest.raises(anthropic.BadRequestError, match=what):
            await create(front, cache_control=given)


async def test_numbers_of_any_size(front: Front) -> None:
    """In what a client's own program made: a call's arguments, a template's variables."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 2**70}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    messages = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    await create(front, messages=messages, extra_body={"chat_template_kwargs": {"a": -(2**70)}})
    assert prompt(front).endswith("tool: x\nassistant: ")


async def test_a_conversation_goes_on_from_what_it_left(front: Front) -> None:
    """The next request inherits the tokens of the one before, its answer's as they were sampled."""
    front.engine.script = saying("Here.", 1, by_byte=True)
    await create(front, system="Be brief.")
    first = front.engine.submitted[-1]
    messages = [*ASK, {"role": "assistant", "content": "Here."}, {"role": "user", "content": "Sure?"}]
    await create(front, system="Be brief.", messages=messages)
    second = front.engine.submitted[-1]
    assert second.terms.lineage is not None and second.terms.lineage.parent == first.id
    assert second.terms.lineage.at == len(first.prompt_token_ids) + len("Here.")
    assert prompt(front) == "system: Be brief.\nuser: Where?\nassistant: Here.\nuser: Sure?\nassistant: "
    await create(front, system="Be long.", messages=messages)
    assert front.engine.submitted[-1].terms.lineage is None
    await create(front, system="Be brief.", messages=messages, extra_body={"cache_salt": "other"})
    assert front.engine.submitted[-1].terms.lineage is None


# --- counting, keys, errors --------------------------------------------------------------------------------------


async def test_counting(front: Front) -> None:
    count = await client(front).messages.count_tokens(model="fake/model", messages=ASK, system="Be brief.")
    assert count.input_tokens == len("system: Be brief.\nuser: Where?\nassistant: ")
    assert not front.engine.submitted


async def test_models(front: Front) -> None:
    models = [model async for model in client(front).models.list()]
    assert [(model.id, model.display_name, model.type) for model in models] == [("fake/model", "fake/model", "model")]


async def test_errors_elsewhere_are_in_the_form_of_the_client(start: Starter) -> None:
    """Anthropic's sends a header that OpenAI's does not; a path of another API has its own form for everybody."""
    front = await start(api_key=["k"])
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await client(front, api_key="x").models.list()
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client(front, api_key="k").models.retrieve("claude")
    body = unknown.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    _, told = await front.get("/v1/models")
    assert list(told) == ["error"]
    _, told = await front.get("/api/tags", headers={"anthropic-version": "2023-06-01"})
    assert isinstance(told["error"], str)


async def test_keys(start: Starter) -> None:
    front = await start(api_key=["k"])
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await create(front)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    for options in ({"api_key": "k"}, {"api_key": None, "auth_token": "k"}):
        made = client(front, **options)
        await made.messages.create(model="fake/model", max_tokens=9, messages=ASK)


RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "gone", "is_error": "false"}
CALLING = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]}


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least one block"),
        ({"messages": [*ASK, {"role": "user", "content": []}], "system": "x"}, "messages[1].content", "one block"),
        (
            {"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[0].content[0].type",
            "text, image, document and tool_result",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": URL}]}]},
            "messages[0].content[0].type",
            "reads text alone",
        ),
        (
            {"system": [{"type": "image", "source": URL}]},
            "system[0].type",
            "takes blocks of type text.",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type", "runs no tools of its own"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, "tool_choice.name", "not among"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "nothing to call"),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": "document", **block}]}]},
                f"messages[0].content[0].{field}",
                "must be a string",
            )
            for field, block in (
                ("source.data", {"source": {"type": "text", "data": ["some words"]}}),
                ("title", {"title": 1, "source": {"type": "text", "data": "x"}}),
                ("context", {"context": {}, "source": {"type": "text", "data": "x"}}),
            )
        ),
        (
            {"messages": [*ASK, CALLING, {"role": "user", "content": [RESULT]}]},
            "messages[2].content[0].is_error",
            "true or false",
        ),
        (
            {"messages": [*ASK, CALLING, {"role": "user", "content": [{**RESULT, "tool_use_id": "toolu_2"}]}]},
            "messages[2].content[0].tool_use_id",
            "no `tool_use` block before it",
        ),
        ({"tools": [{**TOOLS[0], "strict": "true"}]}, "tools[0].strict", "true or false"),
        ({"stop": "x"}, "stop", "stop_sequences"),
        ({"service_tier": "gold"}, "service_tier", "standard_only"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id", "string"),
        ({"output_config": {"effort": "huge"}, "thinking": {"type": "adaptive"}}, "output_config.effort", "one of"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "one of"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "1 to 1024"),
        ({"cache_control": {"type": "ephemeral", "ttl": ["5m"]}}, "cache_control.ttl", "'5m' or '1h'"),
        (
            {"tools": [{"name": "f", "input_schema": {"maximum": 2**70}}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
            "64 bits",
        ),
    ],
)
async def test_what_is_refused(front: Front, fields: Any, param: str, message: str) -> None:
    body = {"model": "fake/model", "max_tokens": 9, "messages": ASK, **fields}
    answer, told = await front.post("/v1/messages", body)
    assert answer.status == 400 and told["type"] == "error", told
    assert told["error"]["type"] == "invalid_request_error" and told["error"]["param"] == param
    assert message in told["error"]["message"]


async def test_errors_are_their_exceptions(start: Starter) -> None:
    front = await start(max_body_mb=0.001)
    with pytest.raises(anthropic.NotFoundError):
        await create(front, model="claude")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await create(front, messages=[{"role": "user", "content": "x" * 600}])
    with pytest.raises(anthropic.APIStatusError) as large:
        await create(front, messages=[{"role": "user", "content": "x" * 2000}])
    assert large.value.status_code == 413 and large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
    front.engine.full = True
    with pytest.raises(anthropic.RateLimitError):
        await create(front)
    front.engine.full = False
    front.engine.state = "draining"
    with pytest.raises(anthropic.InternalServerError) as busy:
        await create(front)
    assert busy.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    answer, told = await front.get("/v1/messages/x")
    assert answer.status == 404 and told["error"]["type"] == "not_found_error"
    answer, told = await front.get("/v1/messages")
    assert answer.status == 405 and told["type"] == "error"


async def test_a_full_queue_is_tried_again(front: Front) -> None:
    front.engine.full = True
    asked = []
    check = front.engine.check_room

    def empties(tenant: str) -> None:
        asked.append(tenant)
        front.engine.full = len(asked) < 2
        check(tenant)

    front.engine.check_room = empties  # type: ignore[method-assign]
    patient = client(front, max_retries=1)
    patient._calculate_retry_timeout = lambda *_: 0.0  # type: ignore[method-assign]
    answer = await patient.messages.create(model="fake/model", max_tokens=9, messages=ASK)
    assert answer.stop_reason and len(asked) == 2


async def test_a_stream_that_fails(front: Front) -> None:
    def script(request: Request) -> Any:
        yield next(saying("Yes, but", 3)(request))
        yield Delta(request.id, error=EngineDead("The engine has failed."))

    front.engine.script = script
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        await streamed(front)


async def test_a_client_that_leaves(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"max_tokens": 9, "messages": ASK, "stream": True}, "/v1/messages")
    await front.until(lambda: bool(front.engine.runs))
    await raw.close()
    await front.until(lambda: bool(front.engine.aborted))
