"""Tool calls over HTTP, with an engine that plays scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from bequest.engine.dialects.events import Content
from bequest.engine.dialects.formats import FORMATS
from bequest.engine.dialects.reader import Dialect
from bequest.engine.types import ChoiceDelta, Delta, OutputMode, Request, Usage
from bequest.server.asks.tools import chat_tools
from tests.server.fakes import FakeEngine
from tests.server.front import Front

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "go")
]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
ASK: list[Any] = [{"role": "user", "content": "Where?"}]
TWO_CALLS = (
    'Let me see.\n\n<tool_call>\n{"name": "look", "arguments": {"at": "the \\"sea\\" 👋"}}\n</tool_call>\n'
    '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
)


def saying(text: str, step: int, reason: Any = "stop", by_byte: bool = False) -> Callable[[Request], Iterator[Delta]]:
    """A script of that text, `step` characters at a time, for every choice: a token each, or one for each byte."""

    def script(request: Request) -> Iterator[Delta]:
        cut = step if request.output is not OutputMode.FINAL else len(text)
        pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            tokens = tuple(piece.encode()) if by_byte else (65,) * bool(piece)
            choices = tuple(
                ChoiceDelta(i, piece, tokens, finish_reason=reason if last else None) for i in range(request.params.n)
            )
            yield Delta(request.id, choices, first=number == 0, usage=Usage(3, len(pieces), 0) if last else None)

    return script


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


async def chat(front: Front, text: str, step: int = 3, reason: str = "stop", **fields: Any) -> Any:
    front.engine.script = saying(text, step, reason)
    return await front.strict().chat.completions.create(model="fake/model", messages=ASK, **{"tools": TOOLS, **fields})


async def gathered(stream: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together by hand: strings and lists grow."""
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            whole = choices.setdefault(choice.index, {"content": None, "calls": [], "reason": None})
            if choice.delta.content is not None:
                whole["content"] = (whole["content"] or "") + choice.delta.content
            for call in choice.delta.tool_calls or []:
                if call.index == len(whole["calls"]):
                    assert call.id and call.type == "function" and call.function.arguments == ""
                    whole["calls"].append([call.function.name, ""])
                else:
                    assert call.id is None and call.type is None and call.function.name is None
                    whole["calls"][call.index][1] += call.function.arguments
            whole["reason"] = choice.finish_reason or whole["reason"]
    return [choices[index] for index in sorted(choices)]


def shown(choice: Any) -> dict[str, Any]:
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
    return {"content": choice.message.content, "calls": calls, "reason": choice.finish_reason}


CASES = {
    "calls": (TWO_CALLS, "Let me see.", [["look", '{"at": "the \\"sea\\" 👋"}'], ["go", "{}"]], "tool_calls"),
    "no call": ("It is <there>.", "It is <there>.", [], "stop"),
    "list": ('<tool_call>[{"name": "go", "arguments": {}}]</tool_call>', None, [["go", "{}"]], "tool_calls"),
    "no name": ('<tool_call>{"a": 1}</tool_call>', '{"a": 1}', [], "stop"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_streamed_and_whole_are_the_same(front: Front, case: str, step: int) -> None:
    text, content, calls, reason = CASES[case]
    whole = shown((await chat(front, text)).choices[0])
    assert whole == {"content": content, "calls": calls, "reason": reason}
    [streamed] = await gathered(await chat(front, text, step, stream=True))
    assert streamed == whole


async def test_every_choice_has_its_own_calls(front: Front) -> None:
    choices = await gathered(await chat(front, TWO_CALLS, 5, stream=True, n=3))
    assert len(choices) == 3 and all(choice == choices[0] for choice in choices)


async def test_a_call_that_is_cut_off(front: Front) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"at": "th'
    whole = shown((await chat(front, text, reason="length")).choices[0])
    assert whole == {"content": None, "calls": [["look", '{"at": "th']], "reason": "length"}
    assert await gathered(await chat(front, text, 2, "length", stream=True)) == [whole]


@pytest.mark.parametrize("text", ["<tool", '<tool_call>\n{"na'])
def test_the_beginning_of_a_call_is_no_content_where_calls_are_required(text: str) -> None:
    look: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
    for choice, content in (("required", []), (look, []), ("auto", [Content(text.removeprefix("<tool_call>\n"))])):
        reader = Dialect().reader(chat_tools(TOOLS, choice, None).call_terms())
        assert reader is not None and [*reader.feed(text), *reader.finish()] == content


async def test_no_more_than_one_call(front: Front) -> None:
    whole = shown((await chat(front, TWO_CALLS, parallel_tool_calls=False)).choices[0])
    assert [name for name, _ in whole["calls"]] == ["look"]


async def test_without_tools_or_with_none_the_text_is_text(front: Front) -> None:
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        answer = await chat(front, TWO_CALLS, **fields)
        assert answer.choices[0].message.content == TWO_CALLS and answer.choices[0].finish_reason == "stop"
    assert front.text.chat_template is not None
    assert [seen["tools"] for seen in front.text.chat_template.seen[-2:]] == [None, None]


async def test_the_template_gets_the_tools(front: Front) -> None:
    await chat(front, "x")
    assert front.text.chat_template is not None
    [seen] = front.text.chat_template.seen
    assert [tool["function"]["name"] for tool in seen["tools"]] == ["look", "go"]


def test_where_names_mark_calls_those_that_are_not_allowed_mark_none() -> None:
    nested = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "go"}}]}
    reader = Dialect(None, FORMATS["glm4"]).reader(
        chat_tools(TOOLS, {"type": "allowed_tools", "allowed_tools": nested}, None).call_terms()
    )
    assert reader is not None
    assert [*reader.feed("look\n{}"), *reader.finish()] == [Content("look\n{}")] and reader.num_calls == 0


def named(*names: str) -> list[Any]:
    return [{"type": "function", "function": {"name": name}} for name in names]


ALLOWED_WRONG: dict[str, Any] = {
    "allowed_tools": None,
    "allowed_tools.mode": {"mode": "none", "tools": named("go")},
    "allowed_tools.tools": {"mode": "auto", "tools": []},
    "allowed_tools.tools[1].function.name": {"mode": "auto", "tools": named("go", "jump")},
    "allowed_tools.tools[0].function": {"mode": "auto", "tools": [{"type": "function", "name": "go"}]},
    "allowed_tools.tools[0].type": {"mode": "auto", "tools": [{"type": "mcp"}]},
    "allowed_tools.tools[0]": {"mode": "auto", "tools": ["go"]},
}


@pytest.mark.parametrize("param", ALLOWED_WRONG)
async def test_what_cannot_be_allowed_is_named(front: Front, param: str) -> None:
    given: Any = {"type": "allowed_tools", "allowed_tools": ALLOWED_WRONG[param]}
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(front, "x", tool_choice=given)
    assert caught.value.param == f"tool_choice.{param}" and f"`tool_choice.{param}`" in str(caught.value)


@pytest.mark.parametrize(
    "param, given",
    [
        ("mode", {"tools": [{"type": "function", "name": "look"}]}),
        ("mode", {"mode": 1, "tools": [{"type": "function", "name": "look"}]}),
        ("tools", {"mode": "auto"}),
        ("tools", {"mode": "auto", "tools": {}}),
        ("tools[0].name", {"mode": "required", "tools": [{"type": "function", "name": "jump"}]}),
        ("tools[0].name", {"mode": "required", "tools": [{"type": "function"}]}),
    ],
)
async def test_what_a_response_cannot_be_allowed_is_named(front: Front, param: str, given: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await respond(front, "x", tool_choice={"type": "allowed_tools", **given})
    assert caught.value.param == f"tool_choice.{param}" and f"`tool_choice.{param}`" in str(caught.value)


async def test_the_helper_of_the_client_reads_the_stream(front: Front) -> None:
    front.engine.script = saying(TWO_CALLS, 4)
    async with front.strict().chat.completions.stream(model="fake/model", messages=ASK, tools=TOOLS) as stream:
        async for _ in stream:
            pass
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content == "Let me see." and message.tool_calls
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"at": 'the "sea" 👋'}, {}]


# --- responses ---------------------------------------------------------------------------------------------------


async def respond(front: Front, text: str, step: int = 4, **fields: Any) -> Any:
    front.engine.script = saying(text, step)
    defaults: dict[str, Any] = {"model": "fake/model", "input": "Where?", "tools": RESPONSE_TOOLS}
    return await front.strict().responses.create(**{**defaults, **fields})


async def test_calls_are_items_of_a_response(front: Front) -> None:
    response = await respond(front, TWO_CALLS)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert response.output_text == "Let me see." and response.status == "completed"
    assert [(item.name, item.arguments) for item in response.output[1:]] == [
        ("look", '{"at": "the \\"sea\\" 👋"}'),
        ("go", "{}"),
    ]
    assert [tool.name for tool in response.tools] == ["look"]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "42"} for item in response.output[1:]
    ]
    later = await respond(front, "Done.", previous_response_id=response.id, input=outputs)
    assert later.output_text == "Done."
    assert front.text.chat_template is not None
    roles = [message["role"] for message in front.text.chat_template.seen[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"]


async def test_an_output_of_no_call_is_refused(front: Front) -> None:
    """With the call in the chain or in the input it is taken, whichever response is continued."""
    response = await respond(front, TWO_CALLS)
    between = await respond(front, "Wait.", previous_response_id=response.id, input="Well?")
    answered = {"type": "function_call_output", "call_id": response.output[1].call_id, "output": "42"}
    assert (await respond(front, "Done.", previous_response_id=between.id, input=[answered])).output_text == "Done."
    given = [item.model_dump() for item in response.output]
    assert (await respond(front, "Done.", input=[*given, answered])).output_text == "Done."
    stray: Any = [{"role": "user", "content": "So?"}, {**answered, "call_id": "call_other"}]
    for fields in ({"previous_response_id": between.id, "input": stray}, {"input": [stray[0], answered]}):
        with pytest.raises(openai.BadRequestError, match="No tool call found for function call output") as caught:
            await respond(front, "Done.", **fields)
        assert (caught.value.param, caught.value.code) == ("input[1].call_id", "invalid_value")
    answer, body = await front.post("/v1/responses/input_tokens", {"input": stray})
    assert answer.status == 400 and body["error"]["param"] == "input[1].call_id"


def told(item: Any) -> tuple[str, ...]:
    """What an item says, whatever its ids are."""
    if item.type == "message":
        return (item.type, item.status, *(part.text for part in item.content))
    return (item.type, item.status, item.name, item.arguments)


@pytest.mark.parametrize("text", [TWO_CALLS, "Only text.", '<tool_call>{"name": "go"}</tool_call> bye'])
async def test_the_stream_of_a_response_and_its_replay(front: Front, text: str) -> None:
    front.engine.script = saying(text, 3)
    client = front.strict()
    async with client.responses.stream(model="fake/model", input="Where?", tools=RESPONSE_TOOLS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = await respond(front, text)
    assert list(map(told, final.output)) == list(map(told, whole.output))
    again = [event async for event in await client.responses.retrieve(final.id, stream=True)]
    assert [event.type for event in again] == [event.type for event in events]
    assert [event.sequence_number for event in again] == list(range(len(events)))
