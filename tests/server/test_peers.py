"""What the tests of other servers ask for: fields that vLLM's and llama.cpp's clients send."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from bequest.engine.text.chat import ChatTemplate
from bequest.server.asks.constraints import constraint_of
from bequest.server.asks.tools import chat_tools
from bequest.server.wire.bodies import ChatBody, CompletionBody
from bequest.server.wire.errors import ApiError
from tests.server.conftest import Starter
from tests.server.fakes import PIECES, FakeEngine, FakeText
from tests.server.front import Front
from tests.server.test_tools import TOOLS

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def events(front: Front, path: str, body: dict[str, Any]) -> list[Any]:
    _, content = await front.post(path, {**body, "stream": True})
    lines = [part.removeprefix("data: ") for part in content.decode().strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    "path, body", [("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})]
)
@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
async def test_usage_on_every_chunk(front: Front, path: str, body: dict[str, Any], options: dict[str, Any]) -> None:
    told = await events(front, path, {**body, "stream_options": {"continuous_usage_stats": True, **options}})
    counts = [event["usage"]["completion_tokens"] for event in told]
    assert counts[: len(PIECES)] == list(range(1, len(PIECES) + 1))
    prompt = len(front.engine.submitted[-1].prompt_token_ids)
    first = told[0]["usage"]
    assert first["prompt_tokens"] == prompt and first["total_tokens"] == prompt + 1
    assert ("choices" in told[-1] and told[-1]["choices"] == []) == bool(options)


async def test_chunks_of_several_choices_come_in_one_write(front: Front) -> None:
    raw = await front.connect({"prompt": "x", "n": 3, "stream": True})
    await raw.head()
    first = (await raw.chunk()).decode().strip().split("\n\n")
    choices = [orjson.loads(line.removeprefix("data: "))["choices"] for line in first]
    assert [[choice["index"] for choice in one] for one in choices] == [[0], [1], [2]]
    await raw.close()


@pytest.mark.parametrize(
    "path, body", [("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})]
)
async def test_a_fingerprint_of_what_answers(front: Front, path: str, body: dict[str, Any]) -> None:
    _, whole = await front.post(path, body)
    assert whole["system_fingerprint"].startswith("fp_")
    told = await events(front, path, body)
    assert {event["system_fingerprint"] for event in told} == {whole["system_fingerprint"]}


@pytest.mark.parametrize("side, kept", [(None, b"cde"), ("left", b"cde"), ("right", b"abc")])
async def test_the_side_that_is_cut(front: Front, side: str | None, kept: bytes) -> None:
    cut = {"truncate_prompt_tokens": 3, "add_special_tokens": False, "truncation_side": side}
    await front.post("/v1/completions", {"prompt": "abcde", **cut})
    assert bytes(front.engine.submitted[-1].prompt_token_ids) == kept
    await front.post("/v1/embeddings", {"input": "abcde", **cut})
    assert bytes(front.engine.submitted[-1].prompt_token_ids) == kept
    await front.post("/v1/completions", {"prompt": "abcde", **cut, "truncate_prompt_tokens": None})
    assert bytes(front.engine.submitted[-1].prompt_token_ids) == b"abcde"


def test_schemas_and_grammars_at_the_top() -> None:
    held = constraint_of(CompletionBody(json_schema=SCHEMA))
    assert held is not None and (held.source.kind, held.param) == ("json_schema", "json_schema")
    assert orjson.loads(held.source.text) == SCHEMA
    held = constraint_of(ChatBody(grammar='root ::= "yes"'))
    assert held is not None and (held.source.kind, held.param, held.source.text) == ("any", "grammar", 'root ::= "yes"')
    with pytest.raises(ApiError, match="both say"):
        constraint_of(ChatBody(grammar="x", structured_outputs={"regex": "x"}))
    with pytest.raises(ApiError, match="both say"):
        constraint_of(ChatBody(grammar="x", json_schema={}))
    with pytest.raises(ApiError, match="both say"):
        constraint_of(ChatBody(response_format={"type": "json_object"}, json_schema={}))
    held = constraint_of(ChatBody(grammar="", json_schema={}))
    assert held is not None and held.source.text == "{}"


async def test_they_are_not_dropped_elsewhere(front: Front) -> None:
    for path, body in (("/v1/responses", {"input": "x"}), ("/v1/messages", {"messages": HELLO, "max_tokens": 9})):
        for more in ({"grammar": 'root ::= "a"'}, {"json_schema": SCHEMA}):
            answer, told = await front.post(path, {**body, **more})
            assert answer.status == 400 and told["error"]["code"] == "unsupported_parameter", told


def test_a_schema_beside_the_type() -> None:
    held = constraint_of(ChatBody(response_format={"type": "json_object", "schema": SCHEMA}))
    assert held is not None and orjson.loads(held.source.text) == SCHEMA and held.param == "response_format.schema"
    held = constraint_of(ChatBody(response_format={"type": "json_schema", "schema": SCHEMA}))
    assert held is not None and orjson.loads(held.source.text) == SCHEMA


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_a_schema_in_both_of_its_places(kind: str) -> None:
    """One of them would not be looked at."""
    form = {"type": kind, "schema": SCHEMA, "json_schema": {"name": "n", "schema": {"type": "array"}}}
    with pytest.raises(ApiError, match="both `json_schema` and `schema`") as caught:
        constraint_of(ChatBody(response_format=form))
    assert (caught.value.status, caught.value.param) == (400, "response_format.schema")
    held = constraint_of(ChatBody(response_format={**form, "json_schema": None}))
    assert held is not None and orjson.loads(held.source.text) == SCHEMA


@pytest.mark.parametrize(
    ("form", "unread"),
    [
        ({"type": "text", "schema": SCHEMA}, "schema"),
        ({"type": "text", "json_schema": {"name": "n", "schema": SCHEMA}}, "json_schema"),
        ({"type": "json_object", "json_schema": {"name": "n", "schema": SCHEMA}}, "json_schema"),
    ],
)
def test_a_schema_where_none_is_read(form: dict[str, Any], unread: str) -> None:
    with pytest.raises(ApiError, match="is read where") as caught:
        constraint_of(ChatBody(response_format=form))
    assert caught.value.param == f"response_format.{unread}"
    assert constraint_of(ChatBody(response_format={"type": "text", "schema": None})) is None


def test_a_format_beside_calls_that_must_come() -> None:
    """It says what text looks like, and there is none."""
    from bequest.engine.dialects.formats import FORMATS

    form = constraint_of(ChatBody(response_format={"type": "json_object"}))
    held = chat_tools(TOOLS, "required", None).constraint(FORMATS["hermes"], {}, form)
    assert held is not None and held.param == "tools"


async def test_roles_that_the_template_takes(start: Starter) -> None:
    said = [*HELLO, {"role": "critic", "content": "Too short. "}]
    front = await start()
    answer, _ = await front.post("/v1/chat/completions", {"messages": said})
    assert answer.status == 200
    assert bytes(front.engine.submitted[-1].prompt_token_ids).startswith(b"user: hello\ncritic: Too short.")
    narrow = ChatTemplate("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    front = await start(FakeEngine(), FakeText(chat_template=narrow))  # type: ignore[arg-type]
    answer, told = await front.post("/v1/chat/completions", {"messages": said})
    assert answer.status == 400 and told["error"]["param"] == "messages[1].role"
    assert "does not show" in told["error"]["message"]


async def test_the_tokenizer(front: Front) -> None:
    _, told = await front.get("/tokenizer_info")
    assert told["model_max_length"] == 512 and told["vocab_size"] == 258
    assert told["special_tokens"] == {"256": "<s>", "257": "</s>"} and told["chat_template"] == ""
