"""Structured outputs and tools with the embedded model and the official client in strict mode."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from enum import Enum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field, SecretStr, StringConstraints

from tests.test_end_to_end import Server

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def server(embedded_server: Server) -> Server:
    return embedded_server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def at_once(asking: Callable[[Any], Any], each: Iterable[Any]) -> list[Any]:
    """The answers to several requests: a step of all of them takes hardly longer than one of one."""
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(asking, each))


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Wheel(BaseModel):
    size: int = Field(ge=1, le=40)


class Car(BaseModel):
    name: str = Field(max_length=10)
    colour: Colour
    wheels: list[Wheel] = Field(max_length=2)
    electric: bool | None
    kind: Literal["van", "bus"]


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "Describe a car."}], response_format=Car, n=3, seed=1
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Car) and choice.finish_reason == "stop"


def test_streamed_parse(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=ASK, response_format=Car, seed=2) as stream:
        for _ in stream:
            pass
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Car)


def test_json_object(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Reply with a short JSON object."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=100,
        frequency_penalty=1.0,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    "wanted, check",
    [
        ({"regex": r"\d{3}-[a-f]+x"}, re.compile(r"\d{3}-[a-f]+x").fullmatch),
        ({"choice": ["yes", 'a "quoted" no', "größer"]}, ["yes", 'a "quoted" no', "größer"].__contains__),
        ({"grammar": 'start: "(" start ")" | "x"'}, re.compile(r"\(*x\)*").fullmatch),
        ({"grammar": 'root ::= ("a" | "b") "c"'}, re.compile("[ab]c").fullmatch),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 20}}, lambda text: 10 <= int(text) <= 20),
        ({"json": '{"enum": [1, "x"]}'}, lambda text: json.loads(text) in (1, "x")),
        ({"json": {"const": {"a": [1, 2]}}, "disable_any_whitespace": True}, '{"a":[1,2]}'.__eq__),
    ],
)
def test_kinds_of_grammars(client: openai.OpenAI, model: str, wanted: dict[str, Any], check: Any) -> None:
    def ask(seed: int) -> Any:
        answer = client.completions.create(
            model=model,
            prompt="The answer:",
            max_tokens=60,
            seed=seed,
            logprobs=1,
            extra_body={"structured_outputs": wanted, "ignore_eos": True},
        )
        return answer.choices[0]

    for choice in at_once(ask, range(3)):
        if choice.finish_reason == "stop":
            assert check(choice.text), choice.text
            assert choice.stop_reason is None  # type: ignore[attr-defined]


# Of a model that may think: the template closes the thoughts, opens them, or leaves that to the model.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% elif enable_thinking %}<think>{% endif %}{# </think> #}"
)


@pytest.mark.parametrize(
    "wanted, check",
    [
        ({"json": {"type": "integer", "minimum": 10, "maximum": 20}}, lambda text: 10 <= int(text) <= 20),
        ({"regex": r"\d{3}/[a-f]x"}, re.compile(r"\d{3}/[a-f]x").fullmatch),
        ({"choice": ["yes", 'a "quoted" no']}, ["yes", 'a "quoted" no'].__contains__),
        ({"grammar": 'root ::= ("a" | "b") "c"'}, re.compile("[ab]c").fullmatch),
    ],
)
def test_a_grammar_begins_after_the_thoughts(
    client: openai.OpenAI, model: str, wanted: dict[str, Any], check: Any
) -> None:
    def ask(kwargs: dict[str, bool]) -> Any:
        body = {"structured_outputs": wanted, "chat_template": THINKS, "chat_template_kwargs": kwargs}
        answer = client.chat.completions.create(
            model=model, messages=ASK, extra_body=body, max_tokens=30, seed=1, temperature=1
        )
        return answer.choices[0]

    left, closed, opened = at_once(ask, ({}, {"enable_thinking": False}, {"enable_thinking": True}))
    for choice in (left, closed):
        if choice.finish_reason == "stop":
            assert check(choice.message.content), choice.message.content
        else:
            assert choice.message.reasoning_content and not choice.message.content
    assert closed.finish_reason == "stop"
    assert opened.message.reasoning_content
    assert check(opened.message.content) if opened.finish_reason == "stop" else not opened.message.content


def named(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


@pytest.mark.parametrize(
    "fields, code, param",
    [
        (named({"type": "thing"}), "invalid_json_schema", "response_format.json_schema.schema"),
        (named(None), "missing_required_parameter", "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"structured_outputs": {"regex": "(a"}}, "invalid_value", "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "invalid_value", "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {}}, "missing_required_parameter", "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "grammar_too_large", "structured_outputs.regex"),
    ],
)
def test_errors_tell_the_field(client: openai.OpenAI, model: str, fields: Any, code: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=ASK, extra_body=fields)
    assert (caught.value.code, caught.value.param) == (code, param)
    if code == "invalid_json_schema":
        assert "Invalid schema for response_format 'n'" in str(caught.value)


@pytest.mark.parametrize(
    "bomb",
    [
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}},
        {"json": {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(5, 18)]}},
        {"regex": "(a?){2000}a{2000}"},
    ],
)
def test_a_grammar_bomb_is_refused(client: openai.OpenAI, model: str, bomb: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", extra_body={"structured_outputs": bomb})
    assert caught.value.code == "grammar_too_large"


# Compiles at once, and grows with each letter that is written.
GROWING = {"type": "string", "pattern": "^(.*a.{15}b.*)$", "maxLength": 100_000}
CALL = {"name": "f", "parameters": {"type": "object", "properties": {"x": GROWING}, "required": ["x"]}}
TOLD = {"type": "json_schema", "name": "n", "schema": GROWING}


@pytest.mark.parametrize(
    "path, fields, param",
    [
        ("chat/completions", named(GROWING), "response_format.json_schema.schema"),
        ("chat/completions", {"structured_outputs": {"json": GROWING}}, "structured_outputs.json"),
        ("chat/completions", {"json_schema": GROWING}, "json_schema"),
        ("chat/completions", {"tools": [{"type": "function", "function": CALL}], "tool_choice": "required"}, "tools"),
        ("completions", {"response_format": {"type": "json_object", "schema": GROWING}}, "response_format.schema"),
        ("responses", {"text": {"format": TOLD}}, "text.format.schema"),
        ("responses", {"structured_outputs": {"json": GROWING}}, "structured_outputs.json"),
        ("messages", {"output_config": {"format": TOLD}}, "output_config.format.schema"),
    ],
)
def test_a_grammar_that_grows_is_called_by_its_field(
    client: openai.OpenAI, model: str, path: str, fields: Any, param: str
) -> None:
    asked: Any = {"messages": ASK, "max_tokens": 300}
    asked = {"completions": {"prompt": "x", "max_tokens": 300}, "responses": {"input": "x"}}.get(path, asked)
    with pytest.raises(openai.BadRequestError, match=f"grammar in `{re.escape(param)}` became too large") as caught:
        client.post(f"/{path}", body={"model": model, "seed": 1, **asked, **fields}, cast_to=object)
    if path != "messages":  # whose errors have neither
        assert (caught.value.code, caught.value.param) == ("grammar_too_large", param)


def arguments_of(call: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])  # type: ignore[index]
    return arguments


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_calls_that_must_be(client: openai.OpenAI, model: str, choice: Any) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ASK, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, temperature=0
    )
    [only] = answer.choices
    assert only.finish_reason == "tool_calls" and only.message.content is None and only.message.tool_calls
    [call] = only.message.tool_calls
    assert call.id.startswith("call_") and call.function.name == "get_weather" and arguments_of(call)
    # What came back is sent again, with the result.
    messages = [*ASK, only.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    later = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], max_tokens=20, seed=1)
    assert later.choices[0].message.role == "assistant"


def test_streamed_calls_are_the_whole_ones(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "messages": ASK, "tools": [WEATHER, CLOCK], "tool_choice": "required"}
    fields |= {"temperature": 0, "max_tokens": 80}
    whole = client.chat.completions.create(**fields).choices[0]
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in client.chat.completions.create(**fields, stream=True):
        [choice] = chunk.choices
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.index not in calls:
                assert call.id and call.type == "function" and call.function.arguments == ""
                calls[call.index] = {"name": call.function.name or "", "arguments": ""}
            else:
                assert call.id is None and call.function.name is None
            calls[call.index]["arguments"] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    assert reason == whole.finish_reason and whole.message.tool_calls
    assert list(calls.values()) == [
        {"name": call.function.name, "arguments": call.function.arguments} for call in whole.message.tool_calls
    ]


def test_calls_of_what_is_allowed(client: openai.OpenAI, model: str) -> None:
    """The model is begged for the other one. The prompt is that of all tools, which is in the cache."""
    asked: list[Any] = [{"role": "user", "content": "Call get_weather for Paris."}]
    clock: Any = {"type": "function", "function": {"name": "clock"}}
    fields: dict[str, Any] = {"model": model, "messages": asked, "tools": [WEATHER, CLOCK], "temperature": 0}
    client.chat.completions.create(**fields, max_tokens=1)
    for mode in ("required", "auto"):
        allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [clock]}}
        answer = client.chat.completions.create(**fields, tool_choice=allowed, max_tokens=60)
        calls = answer.choices[0].message.tool_calls or []
        assert {call.function.name for call in calls if call.type == "function"} <= {"clock"}
        assert calls or mode == "auto"
        assert answer.usage and answer.usage.prompt_tokens_details
        assert answer.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 16


def test_the_helper_for_streams_parses_arguments(client: openai.OpenAI, model: str) -> None:
    tool = openai.pydantic_function_tool(Wheel)
    choice: Any = {"type": "function", "function": {"name": "Wheel"}}
    with client.chat.completions.stream(model=model, messages=ASK, tools=[tool], tool_choice=choice) as stream:
        for _ in stream:
            pass
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Wheel)


def test_auto_is_text_or_calls(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=ASK, tools=[WEATHER], n=4, max_tokens=60, seed=3)
    for choice in answer.choices:
        for call in choice.message.tool_calls or []:
            if choice.finish_reason == "tool_calls":
                arguments_of(call)
        assert choice.message.content or choice.message.tool_calls


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_refused_tools(client: openai.OpenAI, model: str, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=ASK, extra_body=fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "choice, answer, param, complaint",
    [
        ("required", None, "tools[1].function.parameters", "Invalid schema for function 'f': Invalid type: nothing."),
        ("auto", {"type": "object"}, "tools[1].function.parameters", "Invalid schema for function 'f': "),
        (
            "auto",
            {"not": {}},
            "response_format.json_schema.schema",
            "Invalid schema for response_format 'n': `not` cannot be followed: leave it out.",
        ),
    ],
)
def test_the_schema_at_fault_is_named(
    client: openai.OpenAI, model: str, choice: Any, answer: Any, param: str, complaint: str
) -> None:
    """Among those of several functions, and that of the answer."""
    kind = "nothing" if param.startswith("tools") else "object"
    functions: Any = [CLOCK, {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    fields = {} if answer is None else named(answer)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=ASK, tools=functions, tool_choice=choice, **fields)
    assert complaint in str(caught.value)
    assert caught.value.code == "invalid_json_schema" and caught.value.param == param


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=1, le=9)


class Leaf(BaseModel):
    kind: Literal["leaf"] = "leaf"
    value: Literal[1, 2]


class Odd(BaseModel):
    """What Pydantic writes in ways of its own."""

    secret: SecretStr = Field(max_length=3)
    path: Path = Field(json_schema_extra={"maxLength": 3})
    raw: bytes = Field(max_length=3)
    address: IPv4Address
    id: UUID
    day: date
    pair: tuple[Literal["x"], Annotated[int, Field(ge=0, le=9)]]
    number: Annotated[int, Field(ge=0, le=20, multiple_of=4)]
    text: Annotated[str, StringConstraints(pattern="^[a-c]{2}$")]
    counts: dict[Colour, Literal[1, 2]]
    tag: set[Colour] = Field(max_length=1)
    one: Annotated[Cat | Leaf, Field(discriminator="kind")]
    leaf: Leaf | None


def test_what_pydantic_writes_is_followed(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "temperature": 0}
    answer = client.chat.completions.parse(messages=ASK, response_format=Odd, **fields)
    said = client.responses.parse(input="Invent one.", text_format=Odd, **fields)
    assert isinstance(answer.choices[0].message.parsed, Odd) and isinstance(said.output_parsed, Odd)


class Numbers(BaseModel):
    all: list[int]
    different: set[int]


class Holder(BaseModel):
    numbers: Numbers


def test_a_set_is_refused_by_its_name(client: openai.OpenAI, model: str) -> None:
    """No grammar can keep items apart."""
    complaint = "`$defs.Numbers.properties.different`: `uniqueItems` cannot be followed"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.parse(model=model, messages=ASK, response_format=Holder)
    assert complaint in str(caught.value) and caught.value.param == "response_format.json_schema.schema"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.parse(model=model, input="x", text_format=Holder)
    assert complaint in str(caught.value) and caught.value.param == "text.format.schema"
    tools: Any = [openai.pydantic_function_tool(Holder)]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=ASK, tools=tools, tool_choice="required")
    assert complaint in str(caught.value) and caught.value.param == "tools[0].function.parameters"


def test_a_bad_schema_is_called_by_its_field(client: openai.OpenAI, model: str) -> None:
    bad = {"type": "thing"}
    with pytest.raises(openai.BadRequestError, match="Invalid schema for structured_outputs 'json': Invalid type"):
        client.completions.create(model=model, prompt="x", extra_body={"structured_outputs": {"json": bad}})
    form: Any = {"type": "json_schema", "name": "n", "schema": bad}
    with pytest.raises(openai.BadRequestError, match="Invalid schema for response_format 'n': Invalid type"):
        client.responses.create(model=model, input="x", text={"format": form})
    claude = anthropic.Anthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key="none")
    config: Any = {"format": {"type": "json_schema", "schema": bad}}
    with pytest.raises(anthropic.BadRequestError, match=r"Invalid schema for output_config\.format 'json_schema'"):
        claude.messages.create(model=model, max_tokens=5, messages=ASK, output_config=config)


def test_calls_with_formats_that_nobody_knows(client: openai.OpenAI, model: str) -> None:
    class Login(BaseModel):
        secret: SecretStr = Field(max_length=3)
        pet: Annotated[Cat | Leaf, Field(discriminator="kind")]

    tools: Any = [openai.pydantic_function_tool(Login)]
    answer = client.chat.completions.parse(
        model=model, messages=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Login)


# --- responses ---------------------------------------------------------------------------------------------------


def test_a_response_is_parsed(client: openai.OpenAI, model: str) -> None:
    response = client.responses.parse(model=model, input="Describe a car.", text_format=Car)
    assert isinstance(response.output_parsed, Car)
    with client.responses.stream(model=model, input="Describe a car.", text_format=Car) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Car)


def test_a_response_calls_and_gets_the_result(client: openai.OpenAI, model: str) -> None:
    function: Any = WEATHER["function"]
    tools: Any = [{"type": "function", **function}]
    first = client.responses.create(
        model=model, input="Weather?", tools=tools, tool_choice="required", temperature=0, parallel_tool_calls=False
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and first.status == "completed"
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), function["parameters"])
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    later = client.responses.create(
        model=model, input=results, previous_response_id=first.id, tools=tools, max_output_tokens=16, tool_choice="none"
    )
    assert later.output_text


def test_an_unknown_format_of_a_response(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            model=model, input="x", text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "thing"}}}
        )
    assert caught.value.code == "invalid_json_schema" and caught.value.param == "text.format.schema"


def test_a_response_calls_what_is_allowed(client: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]  # type: ignore[dict-item]
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    response = client.responses.create(
        model=model, input="Call get_weather for Paris.", tools=tools, tool_choice=allowed, max_output_tokens=40
    )
    assert {item.name for item in response.output if item.type == "function_call"} == {"clock"}
    assert response.tool_choice.model_dump() == allowed and len(response.tools) == 2  # type: ignore[union-attr]
