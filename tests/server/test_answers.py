"""Answers, whole and streamed, as the official client sees them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest
import tokenizers
from tokenizers.models import WordLevel

from bequest.engine.text.tokenizer import SpecialTokens, Tokenizer
from bequest.server.answers.logprobs import Offsets, Spelling
from bequest.server.asks.messages import check_results
from bequest.server.wire.errors import ApiError
from tests.server.fakes import BOS, EOS, PIECES, ByteTokenizer
from tests.server.front import Front

WHOLE = "".join(PIECES)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_completion(front: Front) -> None:
    answer = await front.strict().completions.create(model="fake/model", prompt="abc")
    assert answer.id.startswith("cmpl-") and len(answer.id) == 37
    assert answer.choices[0].text == WHOLE
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens == 4 and answer.usage.total_tokens == 11
    assert answer._request_id == answer.id
    request = front.engine.submitted[0]
    assert request.prompt_token_ids == (BOS, *b"abc") and request.params.max_tokens == 16
    assert request.tenant == "anonymous" and request.id == answer.id


async def test_chat(front: Front) -> None:
    answer = await front.strict().chat.completions.create(model="fake/model", messages=HELLO)
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == WHOLE
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    request = front.engine.submitted[0]
    assert bytes(request.prompt_token_ids) == b"user: hello\nassistant: "
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)


async def test_chat_stream_helper(front: Front) -> None:
    """The SDK's accumulator fails on a repeated role, unordered choices and foreign fields in deltas."""
    async with front.strict().chat.completions.stream(
        model="fake/model", messages=HELLO, n=3, stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["".join(PIECES[i:]) for i in range(3)]
    assert final.usage is not None and final.usage.completion_tokens == 7 + 6 + 5


async def test_an_event_holds_one_choice(front: Front) -> None:
    """Some clients read no more than the first."""
    stream = await front.strict().chat.completions.create(model="fake/model", messages=HELLO, n=3, stream=True)
    events = [event async for event in stream]
    assert all(len(event.choices) == 1 for event in events)
    assert [(event.choices[0].index, event.choices[0].delta.role) for event in events[:3]] == [
        (0, "assistant"),
        (1, "assistant"),
        (2, "assistant"),
    ]
    assert all(choice.delta.role is None for event in events[3:] for choice in event.choices)
    reasons = {c.index: c.finish_reason for event in events for c in event.choices if c.finish_reason}
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("limit", [0, 1, 2, 7, 20])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "d", "ef"], [1, 2, 3], [[1, 2], [3]]])
async def test_stream_is_the_same_text(front: Front, prompt: Any, limit: int, n: int) -> None:
    client = front.client()
    whole = await client.completions.create(model="fake/model", prompt=prompt, n=n, max_tokens=limit)
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    usage = None
    stream = await client.completions.create(
        model="fake/model", prompt=prompt, n=n, max_tokens=limit, stream=True, stream_options={"include_usage": True}
    )
    async for event in stream:
        usage = event.usage
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert list(texts) == sorted(texts) or len(whole.choices) > n
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage


async def test_prompts_of_a_list_are_requests_of_their_own(front: Front) -> None:
    answer = await front.client().completions.create(model="fake/model", prompt=["a", "bc"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [WHOLE, WHOLE[3:]] * 2
    assert [request.id for request in front.engine.submitted] == [answer.id, f"{answer.id}-1"]
    assert answer.usage is not None and answer.usage.prompt_tokens == 2 + 3


async def test_completion_logprobs_with_echo(front: Front) -> None:
    answer = await front.client().completions.create(
        model="fake/model", prompt="ab", logprobs=1, echo=True, max_tokens=2, extra_body={"prompt_logprobs": 0}
    )
    choice = answer.choices[0]
    assert choice.text == "abHello"
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens == ["<s>", "a", "b", "H", "l"]
    assert logprobs.token_logprobs == [None, -1.5, -1.5, -0.5, -0.5]
    assert logprobs.top_logprobs == [None, {"B": -0.25, "a": -1.5}, {"B": -0.25, "b": -1.5}, {"H": -0.5}, {"l": -0.5}]
    assert logprobs.text_offset == [0, 0, 1, 2, 3]
    assert choice.prompt_logprobs[1] == {"97": {"logprob": -1.5, "rank": 7, "decoded_token": "a"}}  # type: ignore[attr-defined]
    assert choice.cumulative_logprob == -1.0  # type: ignore[attr-defined]


def test_offsets_are_those_of_characters_in_the_shown_text() -> None:
    tokenizer = ByteTokenizer()
    offsets = Offsets(tokenizer, shows_special=False)
    text = "é<s>b"
    assert offsets.of_prompt([BOS, *"é".encode(), BOS, ord("b")], text) == [0, 0, 0, 1, 4], "the sent BOS is text"
    euro, broken = "€".encode(), b"\xe2\x82"
    shown = len(text)
    assert offsets.of_answer([ord("x"), *euro[:2]]) == [shown, shown + 1, shown + 1], "half a character, and its rest:"
    assert offsets.of_answer([euro[2], EOS, *broken]) == [shown + 1, shown + 2, shown + 2, shown + 2]
    assert offsets.of_answer([ord("y"), ord("z")]) == [shown + 3, shown + 4], "behind U+FFFD"
    assert Offsets(tokenizer, shows_special=True).of_answer([EOS, ord("y")]) == [0, 4]


def test_offsets_of_words_that_blanks_part() -> None:
    """No token has the blank: it depends on what stands before."""
    backend = tokenizers.Tokenizer(WordLevel({"<s>": 0, "the": 1, "fox": 2}, unk_token="<s>"))
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend, SpecialTokens(bos=0), "words")
    text = "fox  the fox"
    offsets = Offsets(tokenizer, shows_special=False, prompt=[0, 2, 1, 2])
    assert offsets.of_prompt([0, 2, 1, 2], text) == [0, 0, 5, 9]
    assert tokenizer.decode([2, 1, 2, 0, 2, 1]) == "fox the fox fox the"
    assert offsets.of_answer([1, 0]) == [len(text) + 1, len(text) + 4]
    assert offsets.of_answer([2]) == [len(text) + 5]
    assert Offsets(tokenizer, shows_special=False, prompt=[0]).of_answer([1, 2]) == [0, 4], "the first one has no blank"


async def test_streamed_completion_logprobs_are_the_whole_ones(front: Front) -> None:
    options: Any = {"model": "fake/model", "prompt": "ab", "logprobs": 2, "echo": True}
    whole = await front.client().completions.create(**options)
    parts: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    async for event in await front.client().completions.create(**options, stream=True):
        for name, values in parts.items():
            values += getattr(event.choices[0].logprobs, name)
    assert whole.choices[0].logprobs is not None
    assert parts == whole.choices[0].logprobs.model_dump()
    assert -9999.0 in parts["top_logprobs"][-1].values()


async def test_no_alternatives_of_no_logprobs(front: Front) -> None:
    answer = await front.strict().chat.completions.create(model="fake/model", messages=HELLO, top_logprobs=0)
    assert answer.choices[0].logprobs is None


async def test_chat_logprobs(front: Front) -> None:
    options: Any = {"model": "fake/model", "messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    answer = await front.strict().chat.completions.create(**options)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(entry.token, entry.logprob, entry.bytes) for entry in logprobs.content] == [
        ("H", -0.5, [72]),
        ("l", -0.5, [108]),
    ]
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [("H", -0.5), ("A", -9999.0)]
    streamed = []
    async for event in await front.strict().chat.completions.create(**options, stream=True):
        streamed += event.choices[0].logprobs.content
    assert streamed == logprobs.content
    named = await front.client().chat.completions.create(**options, extra_body={"return_tokens_as_token_ids": True})
    assert named.choices[0].logprobs.content[0].token == "token_id:72"


async def test_prompt_logprobs_and_token_ids_of_chat(front: Front) -> None:
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    _, answer = await front.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, **extra})
    prompt = list(b"user: hello\nassistant: ")
    assert answer["prompt_token_ids"] == prompt and answer["choices"][0]["token_ids"] == [72, 108]
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["prompt_logprobs"][1]["66"] == {"logprob": -0.25, "rank": 1, "decoded_token": "B"}
    client = front.client()
    stream = await client.chat.completions.create(model="fake/model", messages=HELLO, stream=True, extra_body=extra)
    events: list[Any] = [event async for event in stream]
    assert events[0].prompt_token_ids == prompt and events[0].prompt_logprobs == answer["prompt_logprobs"]
    assert [i for event in events for i in event.choices[0].token_ids] == [piece.encode()[0] for piece in PIECES]


async def test_completion_token_ids(front: Front) -> None:
    _, answer = await front.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 1, "return_token_ids": True})
    assert answer["choices"][0]["prompt_token_ids"] == [5, 6] and answer["choices"][0]["token_ids"] == [72]


async def test_message_comes_back(front: Front) -> None:
    """What the server says, the client appends to the conversation."""
    client = front.client()
    first = await client.chat.completions.create(model="fake/model", messages=HELLO)
    messages = [*HELLO, first.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    await client.chat.completions.create(model="fake/model", messages=messages)
    assert bytes(front.engine.submitted[1].prompt_token_ids).decode() == (
        f"user: hello\nassistant: {WHOLE}\nuser: more\nassistant: "
    )


async def test_tool_messages_reach_the_template(front: Front) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann", "unknown": 5},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    answer, _ = await front.post("/v1/chat/completions", {"messages": messages})
    assert answer.status == 200
    assert front.text.chat_template is not None
    assert front.text.chat_template.seen[0]["messages"] == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]


def test_a_result_belongs_to_a_call_before_it() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "2", "tool_call_id": "1"}
    check_results([asked, result, result, asked, result], "messages")
    for before in ([result, asked], [asked, {**result, "tool_call_id": "2"}]):
        with pytest.raises(ApiError, match="of no call before it"):
            check_results(before, "messages")
    # Where ids are not used, or not by all, nobody can tell.
    check_results([{"role": "tool", "content": "2", "name": "f"}, {"role": "tool", "tool_call_id": ""}], "messages")
    check_results([{**asked, "tool_calls": [call, {**call, "id": None}]}, {**result, "tool_call_id": "2"}], "messages")


async def test_template_options(front: Front) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once"}]
    body = {"messages": messages, "continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    await front.post("/v1/chat/completions", body)
    assert bytes(front.engine.submitted[0].prompt_token_ids) == b"user: hello\nassistant: Once"
    assert front.text.chat_template is not None
    assert front.text.chat_template.seen[0]["enable_thinking"] is False
    own = "{{ messages[0].content }}{{ mood }}"
    body = {"messages": HELLO, "chat_template": own, "chat_template_kwargs": {"mood": "calm"}, "max_tokens": 3}
    await front.post("/v1/chat/completions", body)
    assert bytes(front.engine.submitted[1].prompt_token_ids) == b"hellocalm"
    await front.post("/v1/chat/completions", {"messages": HELLO, "add_special_tokens": True, "max_tokens": 3})
    assert front.engine.submitted[2].prompt_token_ids[0] == BOS


async def test_long_prompts_leave_the_loop(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    threads = []
    encode = front.text.tokenizer.encode

    def spy(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(text[:10], add_special_tokens)

    monkeypatch.setattr(front.text.tokenizer, "encode", spy)
    for length in (2000, 2001):
        await front.post("/v1/completions", {"prompt": "x" * length})
    assert threads == [True, False]


async def test_sync_client_in_a_thread(front: Front) -> None:
    """It closes the connection after [DONE]: five streams, five finished requests, no abort."""

    def run() -> list[str]:
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="x", max_retries=0) as client:
            answers = []
            for _ in range(5):
                stream = client.chat.completions.create(model="fake/model", messages=HELLO, stream=True)
                answers.append("".join(event.choices[0].delta.content or "" for event in stream))
            return answers

    assert await asyncio.to_thread(run) == [WHOLE] * 5
    await front.settle()
    assert front.engine.aborted == []


async def test_service_tier_is_echoed(front: Front) -> None:
    answer = await front.strict().chat.completions.create(
        model="fake/model", messages=HELLO, service_tier="flex", user="u", metadata={"a": "b"}, store=True
    )
    assert answer.service_tier == "flex"


@pytest.mark.parametrize("path, field", [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
async def test_large_answers_are_written_in_a_worker_thread(
    front: Front, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """Those of many log-probabilities, which would hold the others up; they say the same."""
    threads: list[str] = []
    shown = Spelling.token

    def token(spelling: Spelling, token_id: int) -> str:
        threads.append(threading.current_thread().name)
        return shown(spelling, token_id)

    monkeypatch.setattr(Spelling, "token", token)
    text = "a" * 400
    given: Any = text if field == "prompt" else [{"role": "user", "content": text}]
    body = {field: given, "max_tokens": 2, "logprobs": 1 if field == "prompt" else True, "n": 2}
    _, small = await front.post(path, body)
    assert set(threads) == {"MainThread"}
    threads.clear()
    _, large = await front.post(path, {**body, "prompt_logprobs": 1})
    assert threads and all(name.startswith("text") for name in threads)
    told = (
        [choice.pop("prompt_logprobs") for choice in large["choices"]]
        if field == "prompt"
        else [large.pop("prompt_logprobs")]
    )
    assert all(len(entries) == large["usage"]["prompt_tokens"] and entries == told[0] for entries in told)
    assert small["choices"] == large["choices"] and small["usage"] == large["usage"]
