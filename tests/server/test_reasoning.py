"""Thoughts over HTTP, with an engine that plays scripted answers and templates that mark thoughts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bequest.engine.text.chat import ChatTemplate
from tests.server.conftest import Starter
from tests.server.fakes import FakeEngine, FakeText
from tests.server.front import Front
from tests.server.test_tools import ASK, TOOLS, saying

OPENED = (
    "{# reasoning_effort #}{% if tools %}<tool_call>{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}{% endif %}"
)
ANSWER = "I weigh\nit 👋.\n</think>\n\nYes."
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


async def thinking(start: Starter, text: str = ANSWER, reason: str = "stop", step: int = 3, **config: Any) -> Front:
    """A server of a model whose template opens the thoughts; each delta has a token for each byte."""
    front = await start(FakeEngine(), FakeText(chat_template=ChatTemplate(OPENED)), **config)  # type: ignore[arg-type]
    front.engine.script = saying(text, step, reason, by_byte=True)
    return front


async def chat(front: Front, **fields: Any) -> Any:
    return await front.strict().chat.completions.create(model="fake/model", messages=ASK, **fields)


async def streamed(front: Front, **fields: Any) -> dict[str, Any]:
    """The first choice of a stream, put together by hand."""
    whole: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "reason": None, "usage": None}
    options = {"stream_options": {"include_usage": True}, **fields}
    async for chunk in await chat(front, stream=True, **options):
        whole["usage"] = chunk.usage or whole["usage"]
        for choice in (choice for choice in chunk.choices if choice.index == 0):
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            whole["reasoning"] += extra.get("reasoning") or ""
            whole["content"] += choice.delta.content or ""
            whole["calls"] += [call.function.name for call in choice.delta.tool_calls or [] if call.function.name]
            whole["reason"] = choice.finish_reason or whole["reason"]
    return whole


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
async def test_thoughts_stand_beside_the_content(start: Starter, step: int) -> None:
    front = await thinking(start, step=step)
    answer = await chat(front, n=2)
    for choice in answer.choices:
        assert choice.message.content == "Yes."
        assert choice.message.reasoning_content == choice.message.reasoning == "I weigh\nit 👋."
    told = len("I weigh\nit 👋.\n</think>".encode())
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * told
    whole = await streamed(front)
    assert (whole["reasoning"], whole["content"], whole["reason"]) == ("I weigh\nit 👋.", "Yes.", "stop")
    assert whole["usage"].completion_tokens_details.reasoning_tokens == told


async def test_an_answer_that_is_cut_in_its_thoughts(start: Starter) -> None:
    front = await thinking(start, "I weigh it, and", "length")
    answer = await chat(front)
    message = answer.choices[0].message
    assert (message.content, message.reasoning, answer.choices[0].finish_reason) == ("", "I weigh it, and", "length")
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("I weigh it, and")


async def test_calls_after_thoughts(start: Starter) -> None:
    front = await thinking(start, f"I look.</think>\n{CALL}")
    answer = await chat(front, tools=TOOLS)
    message = answer.choices[0].message
    assert message.content is None and message.reasoning == "I look."
    assert [call.function.arguments for call in message.tool_calls] == ['{"at": 1}']
    assert answer.choices[0].finish_reason == "tool_calls"
    whole = await streamed(front, tools=TOOLS)
    assert (whole["reasoning"], whole["content"], whole["calls"]) == ("I look.", "", ["look"])


async def test_a_prompt_that_closes_the_thoughts(start: Starter) -> None:
    front = await thinking(start, "Yes </think>.")
    for fields in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        answer = await chat(front, **fields)
        assert answer.choices[0].message.content == "Yes </think>."
        assert "reasoning" not in answer.choices[0].message.model_extra
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0


async def test_thoughts_can_be_left_out(start: Starter) -> None:
    front = await thinking(start)
    answer = await chat(front, extra_body={"include_reasoning": False})
    assert answer.choices[0].message.content == "Yes." and "reasoning" not in answer.choices[0].message.model_extra
    assert (await streamed(front, extra_body={"include_reasoning": False}))["reasoning"] == ""


async def test_without_a_parser_thoughts_are_content(start: Starter) -> None:
    front = await thinking(start, reasoning_parser="none")
    answer = await chat(front)
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.completion_tokens_details is None


async def test_thoughts_that_are_sent_back_reach_the_template(start: Starter) -> None:
    front = await thinking(start)
    for name in ("reasoning_content", "reasoning"):
        told = {"role": "assistant", "content": "Yes.", name: "I weighed it."}
        body = {"messages": [*ASK, told, {"role": "user", "content": "Sure?"}]}
        await front.post("/v1/chat/completions", body)
        prompt = bytes(front.engine.submitted[-1].prompt_token_ids).decode()
        assert "[assistant]<think>I weighed it.</think>Yes." in prompt


async def test_an_unknown_effort_is_refused(start: Starter) -> None:
    front = await thinking(start)
    answer, body = await front.post("/v1/chat/completions", {"messages": ASK, "reasoning_effort": "huge"})
    assert (
        answer.status == 400 and body["error"]["param"] == "reasoning_effort" and "minimal" in body["error"]["message"]
    )
    answer, body = await front.post("/v1/responses", {"input": "Where?", "reasoning": {"effort": "huge"}})
    assert answer.status == 400 and body["error"]["param"] == "reasoning.effort"


async def test_two_names_of_one_effort(start: Starter) -> None:
    """In responses, which know both: one would be ignored."""
    front = await start()
    both = {"input": "Where?", "reasoning": {"effort": "low"}}
    answer, body = await front.post("/v1/responses", {**both, "reasoning_effort": "high"})
    assert answer.status == 400 and body["error"]["param"] == "reasoning.effort"
    assert "`reasoning_effort` (high)" in body["error"]["message"]
    answer, body = await front.post("/v1/responses", {**both, "reasoning_effort": "low"})
    assert answer.status == 200, body


async def test_logprobs_tell_of_all_tokens(start: Starter) -> None:
    front = await thinking(start)
    _, body = await front.post("/v1/chat/completions", {"messages": ASK, "return_token_ids": True})
    assert bytes(body["choices"][0]["token_ids"]).decode() == ANSWER


# --- responses ---------------------------------------------------------------------------------------------------


async def test_a_response_thinks_in_an_item(start: Starter) -> None:
    front = await thinking(start, f"I look.\n</think>\n\nOne moment.\n{CALL}")
    tools: list[Any] = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    client = front.strict()
    response = await client.responses.create(model="fake/model", input="Where?", tools=tools)
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call"]
    assert response.output[0].content[0].text == "I look." and response.output[0].summary == []  # type: ignore[union-attr]
    assert response.output_text == "One moment."
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens == 16
    async with client.responses.stream(model="fake/model", input="Where?", tools=tools) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == kinds
    told = [event.type for event in events if event.type.startswith("response.reasoning")]
    assert set(told[:-1]) == {"response.reasoning_text.delta"} and told[-1] == "response.reasoning_text.done"
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "I look." and len(deltas) > 1


async def test_a_streamed_response_is_told_again_as_it_was(start: Starter) -> None:
    front = await thinking(start)
    async with front.http.post(front.url + "/v1/responses", json={"input": "Where?", "stream": True}) as answer:
        first = await answer.text()
    events = [json.loads(line[6:]) for line in first.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    async with front.http.get(f"{front.url}/v1/responses/{events[0]['response']['id']}?stream=true") as answer:
        assert await answer.text() == first


async def test_what_a_response_thought_goes_back_into_the_prompt(start: Starter) -> None:
    front = await thinking(start)
    _, first = await front.post("/v1/responses", {"input": "Where?"})
    await front.post("/v1/responses", {"input": [*first["output"], {"role": "user", "content": "Sure?"}]})
    prompt = bytes(front.engine.submitted[-1].prompt_token_ids).decode()
    assert "[assistant]<think>I weigh\nit 👋.</think>Yes.\n[user]Sure?" in prompt


# --- continuation ------------------------------------------------------------------------------------------------

DROPS = OPENED.replace("{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}", "")


async def last_prompt(front: Front, **body: Any) -> str:
    answer, _ = await front.post("/v1/chat/completions", body)
    assert answer.status == 200
    return bytes(front.engine.submitted[-1].prompt_token_ids).decode()


@pytest.mark.parametrize("template", [OPENED, DROPS])
async def test_a_child_goes_on_behind_all_that_its_parent_thought(start: Starter, template: str) -> None:
    front = await thinking(start)
    front.text.chat_template = ChatTemplate(template)  # type: ignore[assignment]
    first = await last_prompt(front, messages=ASK, request_id="first")
    sure = [{"role": "user", "content": "Sure?"}]
    second = await last_prompt(front, messages=sure, continuation_of="first", request_id="second")
    assert second == f"{first}{ANSWER}\n[user]Sure?\n[assistant]<think>"
    lineage = front.engine.submitted[-1].terms.lineage
    assert lineage is not None and lineage.at == len((first + ANSWER).encode())
    third = await last_prompt(front, messages=[{"role": "user", "content": "Really?"}], continuation_of="second")
    assert third == f"{second}{ANSWER}\n[user]Really?\n[assistant]<think>"


async def test_an_answer_that_goes_on_in_its_thoughts(start: Starter) -> None:
    front = await thinking(start, "I weigh", "length")
    await last_prompt(front, messages=ASK, request_id="cut")
    front.engine.script = saying(" it.</think>Yes.", 3, by_byte=True)
    _, body = await front.post("/v1/chat/completions", {"messages": [], "continuation_of": "cut", "request_id": "more"})
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" it.", "Yes.")
    front.engine.script = saying(" Or </think> no.", 3, by_byte=True)
    _, body = await front.post("/v1/chat/completions", {"messages": [], "continuation_of": "more"})
    assert body["choices"][0]["message"]["content"] == " Or </think> no."


async def test_a_last_message_that_goes_on(start: Starter) -> None:
    front = await thinking(start, " it.</think>Yes.")
    begun = [*ASK, {"role": "assistant", "content": "<think>I weigh"}]
    _, body = await front.post("/v1/chat/completions", {"messages": begun, "continue_final_message": True})
    assert body["choices"][0]["message"]["reasoning"] == " it."
    begun = [*ASK, {"role": "assistant", "content": "I"}]
    _, body = await front.post("/v1/chat/completions", {"messages": begun, "continue_final_message": True})
    assert body["choices"][0]["message"]["content"] == " it.</think>Yes."
