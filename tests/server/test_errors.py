"""Every error a client can cause: class, code, param, tries of the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import openai
import orjson
import pytest

from bequest.engine.errors import EngineDead, EngineDraining, EngineError, InternalError, QueueFull
from bequest.engine.types import Delta
from bequest.server.wire import bodies
from tests.server.conftest import Starter
from tests.server.front import Front

HELLO = [{"role": "user", "content": "hi"}]
COMPLETION: dict[str, Any] = {"prompt": "abc"}
CHAT: dict[str, Any] = {"messages": HELLO}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BASES = {"/v1/completions": (COMPLETION, bodies.CompletionBody), "/v1/chat/completions": (CHAT, bodies.ChatBody)}


async def refused(front: Front, body: Any, path: str = "/v1/completions", status: int = 400) -> dict[str, Any]:
    """The error object of a request that must fail, with its form checked."""
    answer, content = await front.post(path, body)
    assert answer.status == status, content
    assert answer.headers["Content-Type"].startswith("application/json") and answer.headers["X-Request-Id"]
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code", "details"}
    assert front.engine.submitted == []
    error: dict[str, Any] = content["error"]
    return error


@pytest.mark.parametrize(
    "body, param, code",
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt[0]", "invalid_value"),
        ({"prompt": "", "add_special_tokens": False}, "prompt", "invalid_value"),
        ({"prompt": [1, "a"]}, "prompt[0]", "invalid_type"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "invalid_type"),
        ({"prompt": [258]}, "prompt[0]", "invalid_value"),
        ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
        ({"prompt": ["a", [3, 10**30]]}, "prompt[1][1]", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2**31}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 2**70}, "max_tokens", "invalid_value"),
        ({"max_tokens": 509}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 600}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 60000}, "prompt", "context_length_exceeded"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"bad_words": ["a"] * 1025}, "bad_words", "invalid_value"),
        ({"bad_words": ["a", "b" * 1025]}, "bad_words[1]", "invalid_value"),
        ({"min_tokens": 17}, "min_tokens", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        ({"stop": ["a"] * 65}, "stop", "invalid_value"),
        ({"stop_token_ids": [1, 999]}, "stop_token_ids[1]", "invalid_value"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids[0]", "invalid_value"),
        ({"bad_words": ["a", " "]}, "bad_words[1]", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
        ({"logit_bias": {"999": 1}}, "logit_bias.999", "invalid_value"),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias.05", "invalid_value"),
        ({"logit_bias": {"-5": 1}}, "logit_bias.-5", "invalid_value"),
        ({"logit_bias": {"٥": 1}}, "logit_bias.٥", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
        ({"logit_bias": {"4": 1, "5": "1"}}, "logit_bias.5", "invalid_type"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": -1}, "logprobs", "invalid_value"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"timeout": 0}, "timeout", "invalid_value"),
        ({"priority": 2**40}, "priority", "invalid_value"),
        ({"seed": 2**64}, "seed", "invalid_value"),
        ({"request_id": "no spaces"}, "request_id", "invalid_value"),
        ({"request_id": "cmpl-1"}, "request_id", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
        ({"stop": ["a", 5]}, "stop[1]", "invalid_type"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json", "unsupported_parameter"),  # of this tokenizer
        ({"response_format": {"type": "json"}}, "response_format.type", "invalid_value"),
        ({"tools": [{}]}, "tools", "unsupported_parameter"),
        ({"messages": HELLO}, "messages", "unsupported_parameter"),
        ({"catalog": "x"}, "catalog", "unknown_parameter"),
        ({"continuationOf": "x"}, "continuationOf", "unknown_parameter"),
        ({"guided_json": {}}, "guided_json", "unknown_parameter"),
        ({"maxTokens": 5}, "maxTokens", "unknown_parameter"),
        ({"max-tokens": 5}, "max-tokens", "unknown_parameter"),
        ({"temprature": 0.5}, "temprature", "unknown_parameter"),
        ({"stops": ["a"]}, "stops", "unknown_parameter"),
        ({"hidden_states": True}, "hidden_states", "unknown_parameter"),
        ({"output_hidden_states": True}, "output_hidden_states", "unknown_parameter"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unknown_parameter"),
        ({"structured_outputs": {"regex": "a", "flags": "i"}}, "structured_outputs.flags", "unknown_parameter"),
        ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend", "unknown_parameter"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "invalid_value",
        ),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "unsupported_parameter"),
        ({"truncation_side": "top"}, "truncation_side", "invalid_value"),
        ({"grammar": "root ::= x", "json_schema": {"type": "object"}}, "grammar", "invalid_value"),
        (
            {"stream": True, "stream_options": {"includeUsage": True}},
            "stream_options.includeUsage",
            "unknown_parameter",
        ),
    ],
)
async def test_refused_completions(front: Front, body: dict[str, Any], param: str | None, code: str) -> None:
    error = await refused(front, {**COMPLETION, **body} if body else body)
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error" and error["message"].endswith((".", "?"))


@pytest.mark.parametrize(
    "body, param, code",
    [
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [*HELLO, "hi"]}, "messages[1]", "invalid_type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "a robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "invalid_type"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}]},
            "messages[1].content[0].type",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls", "invalid_type"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [5]}]},
            "messages[0].tool_calls[0].function",
            "invalid_type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": [5], "function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].id",
            "invalid_type",
        ),
        (
            {"messages": [*HELLO, {"role": "tool", "tool_call_id": "c", "content": "of no call"}]},
            "messages[1].tool_call_id",
            "invalid_value",
        ),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "invalid_value"),
        ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_value",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": 3}, "logprobs", "invalid_type"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"prompt": "x"}, "prompt", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_type"),
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "g", "parameter": {"type": "object"}}}]},
            "tools[1].function.parameter",
            "unknown_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stict": True}}},
            "response_format.json_schema.stict",
            "unknown_parameter",
        ),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"functions": [{}]}, "functions", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"audio": {}}, "audio", "unsupported_parameter"),
        ({"prediction": {}}, "prediction", "unsupported_parameter"),
        ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
        ({"max_completion_tokens": 9, "max_tokens": 8}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 512}, "messages", "context_length_exceeded"),
    ],
)
async def test_refused_chats(front: Front, body: dict[str, Any], param: str | None, code: str) -> None:
    error = await refused(front, {**CHAT, **body}, "/v1/chat/completions")
    assert (error["code"], error["param"]) == (code, param)


def fields_of(kind: type[msgspec.Struct]) -> list[msgspec.inspect.Field]:
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    return list(described.fields)


EVERY_FIELD = [(path, field) for path, (_, kind) in BASES.items() for field in fields_of(kind)]
IDS = [f"{path.rpartition('/')[0][-4:]}-{field.name}" for path, field in EVERY_FIELD]


@pytest.mark.parametrize("path", BASES)
async def test_null_is_absent_for_every_field(front: Front, path: str) -> None:
    base, kind = BASES[path]
    nulls = {field.name: None for field in fields_of(kind)}
    refusable = ("tools", "response_format", "best_of", "retain", "audio", "suffix", "unheard_of", "catalog")
    answer, content = await front.post(path, {**nulls, **dict.fromkeys(refusable), **base})
    assert answer.status == 200, content
    assert "X-Bequest-Ignored" not in answer.headers


@pytest.mark.parametrize("path, field", EVERY_FIELD, ids=IDS)
async def test_wrong_type_of_every_field(front: Front, path: str, field: msgspec.inspect.Field) -> None:
    """Every JSON type but the field's own is a 400 that names the field, and never a 500."""
    base, kind = BASES[path]
    accepted = 0
    for value in (True, 1.5, 7, "text", ["x"], [[True]], {"a": "x"}):
        answer, content = await front.post(path, {**base, field.name: value})
        try:
            msgspec.convert({field.name: value}, kind)
            accepted += 1
        except msgspec.ValidationError:
            assert answer.status == 400
            assert content["error"]["code"] == "invalid_type", content
            assert content["error"]["param"].startswith(field.name)
        assert answer.status < 500, content
    assert accepted < 6


@pytest.mark.parametrize(
    "path, field, way_out",
    [
        ("/v1/completions", "tools", "/v1/chat/completions"),
        ("/v1/completions", "tool_choice", "/v1/chat/completions"),
        ("/v1/completions", "prediction", "/v1/chat/completions"),
        ("/v1/completions", "background", "/v1/responses"),
        ("/v1/chat/completions", "background", "/v1/responses"),
        ("/v1/chat/completions", "functions", "`tools`"),
        ("/v1/chat/completions", "function_call", "`tool_choice`"),
        ("/v1/responses", "functions", "`tools`"),
        ("/v1/responses", "prediction", "/v1/chat/completions"),
        ("/v1/embeddings", "prediction", "/v1/chat/completions"),
    ],
)
async def test_a_refusal_says_where_to_go(front: Front, path: str, field: str, way_out: str) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": HELLO} if "chat" in path else {"input": "a"}
    error = await refused(front, {**body, field: ["x"]}, path)
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert way_out in error["message"]


async def test_idle_values_of_refused_fields(front: Front) -> None:
    idle: dict[str, Any] = {
        "use_beam_search": False,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "functions": [],
        "function_call": "auto",
        "background": False,
        "modalities": ["text"],
        "best_of": 2,
        "n": 2,
        "length_penalty": 1,
        "parallel_tool_calls": True,
        "retain": False,
        "echo": False,
    }
    answer, content = await front.post("/v1/chat/completions", {**CHAT, **idle})
    assert answer.status == 200, content
    assert "X-Bequest-Ignored" not in answer.headers


@pytest.mark.parametrize("path", BASES)
async def test_two_names_of_one_length(front: Front, path: str) -> None:
    """Neither is ignored: they agree, or the client is told."""
    for lengths in ({"max_tokens": 0, "max_completion_tokens": 4}, {"max_tokens": 4, "max_completion_tokens": 0}):
        error = await refused(front, {**BASES[path][0], **lengths}, path)
        assert (error["code"], error["param"]) == ("invalid_value", "max_completion_tokens")
        assert "`max_tokens`" in error["message"] and "(4)" in error["message"] and "(0)" in error["message"]
    for asked in (0, 4):
        lengths = {"max_tokens": asked, "max_completion_tokens": asked}
        answer, content = await front.post(path, {**BASES[path][0], **lengths})
        assert answer.status == 200, content
        assert front.engine.submitted[-1].params.max_tokens == asked


async def test_unknown_stream_options_are_named(front: Front) -> None:
    options = {"include_usage": None, "usage_in_words": True}
    answer, _ = await front.post("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": options})
    assert answer.headers["X-Bequest-Ignored"] == "stream_options.usage_in_words"


async def test_unknown_names_inside_of_objects_are_named(front: Front) -> None:
    """A schema's own names, and a property's, are the client's."""
    schema = {"type": "object", "properties": {"parameter": {"title": "x"}}, "x-mine": 1}
    function = {"name": "g", "parameters": schema, "strict": None, "cost": 3, "nothing": None}
    fields = {
        "response_format": {"type": "text", "examples": []},
        "tools": [TOOL, {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": "none",
    }
    answer, content = await front.post("/v1/chat/completions", {**CHAT, **fields})
    assert answer.status == 200, content
    named = answer.headers["X-Bequest-Ignored"]
    assert named == "response_format.examples, tools[1].function.cost, tools[1].cache_control"
    flat = {"type": "function", "name": "f", "parameters": schema, "cost": 3}
    body = {"input": "x", "tools": [flat], "tool_choice": "none", "text": {"format": {"type": "text"}, "colour": 1}}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        answer, content = await front.post(path, body)
        assert answer.status == 200, content
        assert answer.headers["X-Bequest-Ignored"] == "text.colour, tools[0].cost"


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize(
    "value", [{"type": 2**64}, {"maximum": -(2**63) - 1}, nested(300)], ids=["big", "small", "deep"]
)
async def test_what_we_could_not_write_is_refused(front: Front, value: Any) -> None:
    tool = {"type": "function", "name": "f", "parameters": value}
    chat = {"type": "function", "function": {"name": "f", "parameters": value}}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/responses", {"input": "a", "tools": [tool], "tool_choice": "none"}, "tools[0].parameters"),
        ("/v1/responses", {"input": "a", "metadata": value}, "metadata"),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": value}}, "reasoning"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "name": value}}}, "text.format"),
        ("/v1/responses", {"input": "a", "max_tool_calls": 2**64}, "max_tool_calls"),
        ("/v1/responses", {"input": [{"role": "user", "content": "a", "status": value}]}, "input[0].status"),
        ("/v1/chat/completions", {**CHAT, "tools": [chat], "tool_choice": "required"}, "tools[0].function.parameters"),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": {"json": value}}, "structured_outputs.json"),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": value}}},
            "response_format.json_schema.schema",
        ),
    ]
    schemas = ("parameters", "json", "schema")
    for path, body, param in cases:
        error = await refused(front, body, path)
        no_schema = "grammar_too_large" if "a" in value else "invalid_json_schema"
        assert error["code"] == (no_schema if param.endswith(schemas) else "invalid_value"), body
        assert error["param"] == param


async def test_many_unknown_names_are_not_compared_with_ours(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comparison takes a quarter of a millisecond, in which nobody else is served."""
    compared = []
    monkeypatch.setattr("difflib.get_close_matches", lambda word, *_, **__: compared.append(word) or [])
    for path, body in (
        ("/v1/completions", {**COMPLETION, **{f"x{i}": 1 for i in range(5000)}}),
        ("/v1/chat/completions", {**CHAT, "tools": [{**TOOL, **{f"x{i}": 1 for i in range(5000)}}]}),
    ):
        compared.clear()
        answer, content = await front.post(path, body)
        assert answer.status == 200, content
        assert len(compared) == 16 and answer.headers["X-Bequest-Ignored"].endswith("and-4968-more")
    error = await refused_later(front, {**COMPLETION, **{f"x{i}": 1 for i in range(5000)}, "maxTokens": 5})
    assert (error["code"], error["param"]) == ("unknown_parameter", "maxTokens")


async def refused_later(front: Front, body: dict[str, Any]) -> dict[str, Any]:
    """Of a server that has answered others."""
    answer, content = await front.post("/v1/completions", body)
    assert answer.status == 400, content
    error: dict[str, Any] = content["error"]
    return error


async def test_more_prompts_than_can_wait(front: Front) -> None:
    error = await refused(front, {"prompt": ["a"] * 4097})
    assert (error["code"], error["param"]) == ("invalid_value", "prompt")


async def test_what_is_not_written_may_be_anything(front: Front) -> None:
    """Nothing of it is read, kept or told back."""
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(300)}}
    item = {"role": "user", "content": [{"type": "input_text", "text": "a", "extra": 2**64}], "more": nested(300)}
    for path, body in (
        ("/v1/responses", {"input": [item]}),
        ("/v1/chat/completions", {**CHAT, "metadata": {"a": 2**64}}),
        ("/v1/chat/completions", {**CHAT, "tools": [tool], "tool_choice": "none"}),
    ):
        answer, content = await front.post(path, body)
        assert answer.status == 200, content


async def test_one_prompts_failure_ends_the_others(front: Front) -> None:
    front.engine.held = True
    call = asyncio.create_task(front.post("/v1/completions", {"prompt": ["a", "b", "c"]}))
    await front.until(lambda: len(front.engine.runs) == 3)
    first, second, third = (request.id for request in front.engine.submitted)
    front.engine.advance(third)
    front.engine.runs.pop(second).sink(Delta(second, error=InternalError("broken")))
    answer, _ = await call
    assert answer.status == 500 and front.engine.aborted == [first]


async def test_unknown_fields_are_named(front: Front) -> None:
    body = {**COMPLETION, "top_a": 0.5, "mirostat": 2, "a,b\r\nX: 1": 1, "ünï": True, "nothing": None}
    for stream in (False, True):
        async with front.http.post(front.url + "/v1/completions", json={**body, "stream": stream}) as answer:
            assert answer.status == 200
            assert answer.headers["X-Bequest-Ignored"] == "top_a, mirostat, a%2Cb%0D%0AX:%201, %C3%BCn%C3%AF"
    answer, _ = await front.post("/v1/completions", {**COMPLETION, **{f"qqq{i}": i for i in range(1000)}})
    assert answer.headers["X-Bequest-Ignored"].endswith("qqq31, and-968-more")


@pytest.mark.parametrize(
    "data, code",
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{}x", "invalid_json"),
        (b"[1]", "invalid_type"),
        (b'"x"', "invalid_type"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"prompt": "\\ud800x"}', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"prompt":' + b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b"\x00", "invalid_json"),
    ],
)
async def test_malformed_bodies(front: Front, data: bytes, code: str) -> None:
    assert (await refused(front, data))["code"] == code


async def test_context_length_sentence(front: Front) -> None:
    error = await refused(front, {"prompt": "x" * 510, "max_tokens": 2})
    assert error["message"] == (
        "This model's maximum context length is 512 tokens; the prompt is too long: 511 tokens, "
        "with 2 for the completion makes 513."
    )
    assert error["details"] == {"max_model_len": 512, "prompt_tokens": 511, "max_tokens": 2}


async def test_a_text_that_must_be_too_long_is_not_counted(front: Front) -> None:
    error = await refused(front, {"prompt": "x" * 60000})
    assert "the prompt is too long: " in error["message"] and "at least as many" in error["message"]


async def test_the_same_sentence_tells_a_short_prompt_how_much_room_there_is(front: Front) -> None:
    """Clients match its halves, whichever number is at fault."""
    error = await refused(front, {"prompt": "a", "max_tokens": 50000})
    assert error["code"] == "context_length_exceeded" and error["details"]["prompt_tokens"] == 2
    assert error["message"] == (
        "This model's maximum context length is 512 tokens; the prompt is too long: 2 tokens, "
        "with 50000 for the completion makes 50002. Behind it there is room for 510: ask for no more, or leave their "
        "number out."
    )


async def test_unknown_model(front: Front) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await front.client().completions.create(model="gpt-5", prompt="a")
    assert caught.value.code == "model_not_found" and "'fake/model'" in str(caught.value)


@pytest.mark.parametrize(
    "refusal, kind, code, tries, header",
    [
        (QueueFull("The queue is full."), openai.RateLimitError, "queue_full", 2, ("Retry-After", "1")),
        (
            QueueFull("The queue is full.", details={"retry_after": 3}),
            openai.RateLimitError,
            "queue_full",
            2,
            ("Retry-After", "3"),
        ),
        (EngineDraining("Going down."), openai.InternalServerError, "draining", 2, ("Retry-After", "1")),
        (EngineDead("The engine failed."), openai.InternalServerError, "engine_dead", 2, ("Retry-After", "1")),
        (InternalError("A fault."), openai.InternalServerError, "internal_error", 2, None),
    ],
)
async def test_engine_errors_and_tries(
    start: Starter, refusal: EngineError, kind: type[openai.APIStatusError], code: str, tries: int, header: Any
) -> None:
    front = await start()
    front.engine.refusal = refusal
    counted = []
    submit = front.engine.submit
    front.engine.submit = lambda *args, **more: (counted.append(1), submit(*args, **more))
    client = front.client(max_retries=1)
    client._calculate_retry_timeout = lambda *_: 0.0  # type: ignore[method-assign]
    with pytest.raises(kind) as caught:
        await client.completions.create(model="fake/model", prompt="a")
    assert caught.value.code == code and len(counted) == tries
    if header:
        assert caught.value.response.headers[header[0]] == header[1]


@pytest.mark.parametrize(
    "path, prompt",
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_where_the_queue_is_full_nothing_is_tokenised(
    front: Front, monkeypatch: pytest.MonkeyPatch, path: str, prompt: dict[str, Any]
) -> None:
    tokenised: list[str] = []
    encode = front.text.tokenizer.encode

    def seen(text: str, add_special_tokens: bool = True) -> list[int]:
        tokenised.append(text)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(front.text.tokenizer, "encode", seen)
    front.engine.full = True
    answer, body = await front.post(path, prompt)
    assert answer.status == 429 and answer.headers["Retry-After"] == "1"
    assert body["error"]["code"] == "queue_full" and not tokenised
    front.engine.full = False
    answer, _ = await front.post(path, prompt)
    assert answer.status == 200 and tokenised


async def test_a_running_requests_name_is_a_conflict(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"prompt": "a", "request_id": "mine"})
    await front.until(lambda: bool(front.engine.submitted))
    client = front.client(max_retries=1)
    client._calculate_retry_timeout = lambda *_: 0.0  # type: ignore[method-assign]
    tries = []
    submit = front.engine.submit
    front.engine.submit = lambda *args, **more: (tries.append(1), submit(*args, **more))  # type: ignore[assignment]
    with pytest.raises(openai.ConflictError) as caught:
        await client.completions.create(model="fake/model", prompt="a", extra_body={"request_id": "mine"})
    assert caught.value.code == "request_id_in_use" and caught.value.response.headers["Retry-After"] == "1"
    assert caught.value.body["details"] == {"id": front.engine.submitted[0].id, "status": "running"}  # type: ignore[index]
    assert len(tries) == 2 and len(front.engine.submitted) == 1
    await raw.close()
    await front.settle()
    front.engine.held = False
    answer, _ = await front.post("/v1/completions", {"prompt": "a", "request_id": "mine"})
    assert answer.status == 200, "an abandoned request gives its name back"


async def test_a_bug_is_a_500_with_an_id(front: Front, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret path /etc")

    monkeypatch.setattr(front.text.tokenizer, "encode", broken)
    answer, content = await front.post("/v1/completions", COMPLETION)
    assert answer.status == 500 and content["error"]["code"] == "internal_error"
    assert "secret" not in orjson.dumps(content).decode()
    assert answer.headers["X-Request-Id"] in content["error"]["message"]
    assert answer.headers["X-Request-Id"] in caplog.text and "secret path" in caplog.text


async def test_a_bug_in_a_stream_ends_it_with_an_error(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**CHAT, "stream": True, "logprobs": True}
    front.engine.held = True
    raw = await front.connect(body, "/v1/chat/completions")
    await front.settle()
    front.engine.advance()
    await raw.head()
    await raw.chunk()
    monkeypatch.setattr(front.text.tokenizer, "token_bytes", lambda _: 1 / 0)
    front.engine.advance()
    assert b'"code":"internal_error"' in await raw.chunk() and await raw.chunk() == b""
    await front.settle()
    assert front.engine.aborted == [front.engine.submitted[0].id]
    await raw.close()


async def test_submitting_the_second_prompt_fails(front: Front) -> None:
    submit = front.engine.submit

    def once(request: Any, sink: Any, **more: Any) -> None:
        if front.engine.submitted:
            raise QueueFull("The queue is full.")
        submit(request, sink, **more)

    front.engine.submit = once  # type: ignore[method-assign]
    answer, _ = await front.post("/v1/completions", {"prompt": ["a", "b"]})
    assert answer.status == 429
    assert front.engine.aborted == [front.engine.submitted[0].id]
