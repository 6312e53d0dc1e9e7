"""Ollama's API with the official `ollama` client, unmodified, streaming and not."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ollama
import pytest

from bequest.engine.errors import EngineDead
from bequest.engine.types import ChoiceDelta, Delta, OutputMode, Request, Usage
from bequest.engine.types.adapter import AdapterRef
from tests.server.conftest import Starter
from tests.server.fakes import EOS, PIECES, FakeText, seeing_engine
from tests.server.front import Front
from tests.tiny_seeing import encoded, picture

TEXT = "".join(PIECES)
MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class ThinkingText(FakeText):
    """A template by which a model is known to think, and to call tools as Hermes does."""

    def __init__(self) -> None:
        super().__init__()
        assert self.chat_template is not None
        source = "<think> enable_thinking <tool_call> tools </think>"
        self.chat_template.source = self.chat_template.tool_source = source  # type: ignore[misc]


def saying(*texts: str, end: str = "stop") -> Any:
    """A script that says these, each in a delta of its own."""

    def script(request: Request) -> Iterator[Delta]:
        usage = Usage(len(request.prompt_token_ids), len(texts), 0)
        if request.output is OutputMode.FINAL:
            choice = ChoiceDelta(0, "".join(texts), tuple(range(65, 65 + len(texts))), finish_reason=end)  # type: ignore[arg-type]
            yield Delta(request.id, (choice,), first=True, usage=usage)
            return
        for number, text in enumerate(texts):
            last = number == len(texts) - 1
            choice = ChoiceDelta(0, text, (65 + number,), finish_reason=end if last else None)  # type: ignore[arg-type]
            yield Delta(request.id, (choice,), first=number == 0, usage=usage if last else None)

    return script


@pytest.fixture
async def client(front: Front) -> ollama.AsyncClient:
    return client_of(front)


def client_of(front: Front, **options: Any) -> ollama.AsyncClient:
    client = ollama.AsyncClient(front.url, verify=False, **options)
    front.closers.append(client.close)
    return client


# --- answers -----------------------------------------------------------------------------------------------------


async def test_a_chat(front: Front, client: ollama.AsyncClient) -> None:
    whole = await client.chat("fake/model", MESSAGES)
    assert whole.message.role == "assistant" and whole.message.content == TEXT and whole.message.tool_calls is None
    assert whole.done and whole.done_reason == "stop" and whole.model == "fake/model"
    assert whole.prompt_eval_count and whole.eval_count == len(PIECES) and whole.total_duration
    assert whole.load_duration == 0 and whole.prompt_eval_duration is not None and whole.eval_duration is not None
    parts = [part async for part in await client.chat("fake/model", MESSAGES, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == TEXT
    assert [part.done for part in parts] == [False] * len(PIECES) + [True]
    assert parts[-1].done_reason == "stop" and parts[-1].eval_count == len(PIECES) and parts[0].done_reason is None
    assert parts[0].created_at and parts[0].created_at.endswith("Z")


async def test_a_stream_is_lines_of_json(front: Front) -> None:
    """It streams unless it is told not to."""
    answer, body = await front.post("/api/chat", {"model": "fake/model:latest", "messages": MESSAGES})
    assert answer.content_type == "application/x-ndjson" and answer.headers["X-Accel-Buffering"] == "no"
    lines = [json.loads(line) for line in body.splitlines()]
    assert len(lines) == len(PIECES) + 1 and body.endswith(b"\n") and lines[-1]["done"] is True


async def test_a_generation_goes_through_the_template(front: Front, client: ollama.AsyncClient) -> None:
    whole = await client.generate("fake/model", "Why?", system="Be brief.")
    assert whole.response == TEXT and whole.done_reason == "stop"
    prompt = bytes(front.engine.submitted[-1].prompt_token_ids).decode()
    assert prompt == "system: Be brief.\nuser: Why?\nassistant: "
    parts = [part async for part in await client.generate("fake/model", "Why?", stream=True)]
    assert "".join(part.response or "" for part in parts) == TEXT and parts[-1].context


async def test_a_raw_prompt_does_not(front: Front, client: ollama.AsyncClient) -> None:
    whole = await client.generate("fake/model", "Why?", raw=True)
    assert front.engine.submitted[-1].prompt_token_ids == (256, *b"Why?") and whole.context is None
    with pytest.raises(ollama.ResponseError, match="`system` cannot be used with `raw`"):
        await client.generate("fake/model", "Why?", raw=True, system="x")


async def test_context_continues(front: Front, client: ollama.AsyncClient) -> None:
    """The earlier tokens come first, as they were, without the end token; then what the template puts between."""

    def script(request: Request) -> Iterator[Delta]:
        choice = ChoiceDelta(0, "Hi", (72, 105, EOS), finish_reason="stop")
        yield Delta(request.id, (choice,), first=True, usage=Usage(1, 3, 0))

    front.engine.script = script
    first = await client.generate("fake/model", "One")
    assert bytes(first.context or ()).decode() == "user: One\nassistant: Hi"
    await client.generate("fake/model", "Two", context=first.context)
    prompt = bytes(front.engine.submitted[-1].prompt_token_ids).decode()
    assert prompt == "user: One\nassistant: Hi\nuser: Two\nassistant: "
    with pytest.raises(ollama.ResponseError, match="not a token id") as caught:
        await client.generate("fake/model", "Two", context=[100_000])
    assert caught.value.status_code == 400


async def test_a_model_without_a_template(front: Front, client: ollama.AsyncClient) -> None:
    """The prompt is taken as it is, behind the tokens of an earlier answer."""
    front.text.chat_template = None
    first = await client.generate("fake/model", "One")
    await client.generate("fake/model", " Two", context=first.context)
    before, after = (request.prompt_token_ids for request in front.engine.submitted)
    assert before == (256, *b"One") and first.context and after == (*first.context, *b" Two")
    with pytest.raises(ollama.ResponseError, match="`system` cannot be used here: this model has no chat template"):
        await client.generate("fake/model", "One", system="Be brief.")


async def test_a_last_message_of_the_assistant_goes_on(front: Front, client: ollama.AsyncClient) -> None:
    await client.chat("fake/model", [*MESSAGES, {"role": "assistant", "content": "Well"}])
    assert bytes(front.engine.submitted[-1].prompt_token_ids).decode() == "user: x\nassistant: Well"


async def test_loading(front: Front, client: ollama.AsyncClient) -> None:
    """By an empty request clients load a model, or unload it."""
    assert (await client.generate("fake/model", keep_alive="5m")).done_reason == "load"
    assert (await client.chat("fake/model", [], keep_alive=0)).done_reason == "load"
    assert [part.done async for part in await client.generate("fake/model", stream=True)] == [True]
    assert not front.engine.submitted


async def test_options(front: Front, client: ollama.AsyncClient) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 3,
        "stop": ["a", "b"],
        "num_predict": 4,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_thread": 2,
        "mirostat": 0,
    }
    await client.chat("fake/model", MESSAGES, options=options)
    params = front.engine.submitted[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.5, 0.25)
    assert params.seed == 3 and params.stop == ("a", "b") and params.max_tokens == 4
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.5, 0.25)
    await client.chat("fake/model", MESSAGES, options={"num_predict": -1, "num_ctx": 100})
    request = front.engine.submitted[-1]
    assert request.params.max_tokens == 100 - len(request.prompt_token_ids)
    await client.chat("fake/model", MESSAGES, options={"num_predict": 100_000})
    assert front.engine.submitted[-1].params.max_tokens == 512 - len(request.prompt_token_ids)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"stop": [""]}}, "options.stop[0]"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"num_ctx": 5}}, "options.num_ctx"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"temperature": 1}, "temperature"),
        ({"format": "xml"}, "format"),
        ({"think": True}, "think"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "no body", "content": "x"}]}, "messages[0].role"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"template": "{{ .Prompt }}", "prompt": "x"}, "template"),
        ({"messages": [{"role": "tool", "content": "x", "tool_name": "f", "name": "g"}]}, "messages[0].tool_name"),
    ],
)
async def test_wrong_fields_are_named(front: Front, fields: dict[str, Any], param: str) -> None:
    path = "/api/generate" if "prompt" in fields else "/api/chat"
    body = fields if "prompt" in fields else {"messages": MESSAGES, **fields}
    answer, told = await front.post(path, body)
    assert answer.status == 400 and told["param"] == param and param in told["error"] and told["code"]


async def test_what_nobody_reads_is_named(front: Front) -> None:
    answer, told = await front.post("/api/chat", {"messages": MESSAGES, "options": {"num_predicts": 4}})
    assert answer.status == 400 and "did you mean `num_predict`" in told["error"]
    answer, _ = await front.post("/api/chat", {"messages": MESSAGES, "options": {"repeat_last_n": 64}, "flavour": 1})
    assert answer.headers["X-Bequest-Ignored"] == "flavour, options.repeat_last_n"


async def test_logprobs(front: Front, client: ollama.AsyncClient) -> None:
    whole = await client.chat("fake/model", MESSAGES, logprobs=True, top_logprobs=2)
    assert whole.logprobs and len(whole.logprobs) == len(PIECES) and len(whole.logprobs[0].top_logprobs or ()) == 2
    parts = [part async for part in await client.generate("fake/model", "x", logprobs=True, stream=True)]
    assert sum(len(part.logprobs or ()) for part in parts) == len(PIECES)


# --- thoughts and tools ------------------------------------------------------------------------------------------


@pytest.fixture
async def thinker(start: Starter) -> Front:
    front: Front = await start(text=ThinkingText())
    return front


async def test_thoughts_stand_apart(thinker: Front) -> None:
    thinker.engine.script = saying("<think>", "hm", "</think>", "yes")
    client = client_of(thinker)
    whole = await client.chat("fake/model", MESSAGES, think=True)
    assert whole.message.thinking == "hm" and whole.message.content == "yes"
    assert thinker.text.chat_template is not None
    assert thinker.text.chat_template.seen[-1]["enable_thinking"] is True
    parts = [part async for part in await client.generate("fake/model", "x", think=False, stream=True)]
    assert "".join(part.thinking or "" for part in parts) == "hm"
    assert "".join(part.response or "" for part in parts) == "yes"
    assert thinker.text.chat_template.seen[-1]["enable_thinking"] is False


async def test_tools_are_called(thinker: Front) -> None:
    call = ('<tool_call>{"name": "add", "argu', 'ments": {"a": 1}}</tool_call>')
    thinker.engine.script = saying("Well. ", *call)
    client = client_of(thinker)
    whole = await client.chat("fake/model", MESSAGES, tools=[TOOL])
    assert whole.message.content == "Well." and whole.message.tool_calls
    assert whole.message.tool_calls[0].function.name == "add"
    assert whole.message.tool_calls[0].function.arguments == {"a": 1}
    parts = [part async for part in await client.chat("fake/model", MESSAGES, tools=[TOOL], stream=True)]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"a": 1}]
    back = [*MESSAGES, whole.message, {"role": "tool", "content": "2", "tool_name": "add"}]
    await client.chat("fake/model", back)
    assert thinker.text.chat_template is not None
    seen = thinker.text.chat_template.seen[-1]["messages"]
    assert seen[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}} and seen[2]["name"] == "add"


async def test_a_call_that_is_cut_off_is_text(thinker: Front) -> None:
    thinker.engine.script = saying('<tool_call>{"name": "add", "arguments": {"a"', end="length")
    whole = await client_of(thinker).chat("fake/model", MESSAGES, tools=[TOOL])
    assert whole.done_reason == "length" and not whole.message.tool_calls
    deep = f'<tool_call>{{"name": "add", "arguments": {"[" * 300}{"]" * 300}}}</tool_call>'
    thinker.engine.script = saying(deep)
    whole = await client_of(thinker).chat("fake/model", MESSAGES, tools=[TOOL])
    assert not whole.message.tool_calls and whole.message.content == f"add({'[' * 300}{']' * 300}"


# --- models ------------------------------------------------------------------------------------------------------


async def test_models(front: Front, client: ollama.AsyncClient) -> None:
    listed = (await client.list()).models
    assert [model.model for model in listed] == ["fake/model"] and listed[0].digest and listed[0].modified_at
    shown = await client.show("fake/model:latest")
    assert shown.modelinfo and shown.modelinfo["Fake.context_length"] == 512 and shown.details
    assert shown.capabilities == ["completion", "embedding"]
    loaded = (await client.ps()).models
    assert loaded[0].context_length == 512 and loaded[0].expires_at
    assert (await client.pull("fake/model")).status == "success"
    answer, body = await front.post("/api/show", {"model": "fake/model", "name": "fake/model:latest"})
    assert answer.status == 200, body
    answer, body = await front.post("/api/show", {"model": "fake/model", "name": "llama3"})
    assert answer.status == 400 and body["param"] == "model" and "`name` (llama3)" in body["error"]
    answer, body = await front.get("/api/version")
    assert answer.status == 200 and body["version"].count(".") == 2
    async with front.http.head(front.url + "/") as head:
        assert head.status == 200


@pytest.mark.parametrize(
    ("kept", "level"),
    [
        ({"float32": 8}, "F32"),
        ({"bfloat16": 8, "float32": 2}, "BF16"),
        ({"codes of 4 bits": 60, "codes of 8 bits": 30}, "Q4"),
        ({"int8 in groups of 32": 60, "bfloat16": 30}, "Q8"),
        ({"fp8_e4m3 in groups of 16": 9}, "FP8"),
        ({"mxfp4": 9}, "MXFP4"),
    ],
)
async def test_the_size_is_that_of_the_weights_as_they_are_kept(
    front: Front, client: ollama.AsyncClient, kept: dict[str, int], level: str
) -> None:
    info = front.engine.info
    front.engine.info = replace(info, numbers=replace(info.numbers, weight_bytes=kept, weight_files="gguf"))
    [listed], [loaded] = (await client.list()).models, (await client.ps()).models
    assert listed.size == loaded.size_vram == sum(kept.values())
    assert listed.details is not None
    assert (listed.details.quantization_level, listed.details.format) == (level, "gguf")


async def test_vectors(front: Front, client: ollama.AsyncClient) -> None:
    found = await client.embed("fake/model", ["a", "b"])
    assert len(found.embeddings) == 2 and found.prompt_eval_count == 4
    assert abs(sum(x * x for x in found.embeddings[0]) - 1) < 1e-5
    one = await client.embed("fake/model", "a", dimensions=2)
    assert len(one.embeddings) == 1 and len(one.embeddings[0]) == 2
    old = await client.embeddings("fake/model", "a")
    assert old.embedding == found.embeddings[0]
    assert (await client.embed("fake/model")).embeddings == [], "so clients load a model"
    long = "x" * 2000
    assert len((await client.embed("fake/model", long)).embeddings) == 1, "what is too long is cut"
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        await client.embed("fake/model", long, truncate=False)


async def test_adapters_are_models(front: Front, client: ollama.AsyncClient) -> None:
    front.engine.adapters.loaded = {"legal": AdapterRef("legal", 7, "d7", 1.7e9)}
    for found in ((await client.list()).models, (await client.ps()).models):
        assert [(one.model, one.details and one.details.parent_model) for one in found] == [
            ("fake/model", ""),
            ("legal", "fake/model"),
        ]
    listed = {one.model: one.modified_at for one in (await client.list()).models}
    assert listed["legal"] is not None and listed["legal"].timestamp() == 1.7e9
    shown = await client.show("legal:latest")
    assert shown.details is not None and shown.details.parent_model == "fake/model"
    assert (await client.chat("legal", MESSAGES)).model == "legal"


# --- faults ------------------------------------------------------------------------------------------------------


async def test_errors(front: Front, client: ollama.AsyncClient) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist here") as caught:
        await client.chat("llama3", MESSAGES)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="does not exist here"):
        async for _ in await client.chat("llama3", MESSAGES, stream=True):
            pass
    with pytest.raises(ollama.ResponseError, match="There is nothing at"):
        await client.copy("a", "b")


async def test_keys(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    front = await start(api_key=["secret"])
    with pytest.raises(ollama.ResponseError, match="API key") as caught:
        await client_of(front).chat("fake/model", MESSAGES)
    assert caught.value.status_code == 401
    client = client_of(front, headers={"Authorization": "Bearer secret"})
    assert (await client.chat("fake/model", MESSAGES)).message.content == TEXT
    assert front.engine.submitted[-1].tenant == "key-1"


async def test_a_failure_in_the_middle(front: Front, client: ollama.AsyncClient) -> None:
    def script(request: Request) -> Iterator[Delta]:
        yield Delta(request.id, (ChoiceDelta(0, "Hel", (1,)),), first=True)
        yield Delta(request.id, error=EngineDead("The engine has failed.", reason="died"))

    front.engine.script = script
    heard = []
    with pytest.raises(ollama.ResponseError, match="restarting"):
        async for part in await client.chat("fake/model", MESSAGES, stream=True):
            heard += [part.message.content]
    assert heard == ["Hel"]


async def test_a_client_that_leaves_stops_the_work(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"messages": MESSAGES}, "/api/chat")
    await front.until(lambda: bool(front.engine.runs))
    front.engine.advance()
    await raw.head()
    await raw.close()
    await front.until(lambda: not front.engine.runs)
    assert front.engine.aborted
    task = asyncio.create_task(front.post("/api/generate", {"prompt": "x", "stream": False}))
    await front.until(lambda: bool(front.engine.runs))
    task.cancel()
    await front.until(lambda: not front.engine.runs)


async def test_images(start: Starter) -> None:
    front = await start(engine=seeing_engine())
    image = base64.b64encode(encoded(picture(9, 7))).decode()
    message = {"role": "user", "content": "what?", "images": [image, image]}
    asked = {"prompt": "what?", "images": [image], "stream": False}
    for path, body in (("/api/chat", {"messages": [message], "stream": False}), ("/api/generate", asked)):
        answer, told = await front.post(path, body)
        assert answer.status == 200 and "context" not in told, told
    _, shown = await front.post("/api/show", {"model": "fake/model"})
    assert "vision" in shown["capabilities"]
    chat, generate = front.engine.submitted
    assert len(chat.images) == 1 and chat.prompt_token_ids.count(chat.images[0].first_id) == 2
    assert generate.images == chat.images
    for change, param in (
        ({"images": ["@@@"]}, "`images[0]`"),
        ({"images": ["aGk="]}, "`images[0]`"),
        ({"raw": True}, "`images`"),
        ({"context": [1, 2]}, "`images`"),
    ):
        answer, told = await front.post("/api/generate", asked | change)
        assert answer.status == 400 and param in told["error"], told
    answer, told = await front.post("/api/chat", {"messages": [{**message, "images": [5]}]})
    assert answer.status == 400 and "`messages[0].images`" in told["error"]
