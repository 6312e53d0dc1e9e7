"""Streams as bytes: framing, backpressure, failures, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from bequest.engine.errors import DeadlineExceeded, InternalError
from bequest.engine.types import ChoiceDelta, Delta, Request, Usage
from bequest.server.answers.chunks import Chunks
from tests.server.conftest import Starter
from tests.server.fakes import PIECES, FakeEngine, failing_script
from tests.server.front import Front, RawConnection

STREAM: dict[str, Any] = {"prompt": "abc", "stream": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
WHOLE = "".join(PIECES)


def events(body: bytes) -> list[Any]:
    """The JSON of each event; asserts the form of the stream and its end."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == "" and parts[-1] == "data: [DONE]"
    assert all(part.startswith("data: {") and "\n" not in part for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


async def test_bytes_of_a_stream(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect(STREAM)
    await front.settle()
    assert raw.reader._buffer == b"", "the status line waits for the first event"  # type: ignore[attr-defined]
    chunks = []
    for piece in PIECES[:-1]:
        front.engine.advance()
        if not chunks:
            head = await raw.head()
        chunk = await raw.chunk()
        chunks.append(chunk)
        assert json.dumps(piece, ensure_ascii=False).encode() in chunk, "one event per delivery"
    front.engine.advance()
    last = await raw.chunk()
    assert last.endswith(b'"finish_reason":"stop","stop_reason":null}]}\n\ndata: [DONE]\n\n')
    assert await raw.chunk() == b"", "the body ends with [DONE]"
    shown = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in head.decode().split("\r\n")}
    assert shown["content-type"] == "text/event-stream; charset=utf-8"
    assert shown["cache-control"] == "no-cache" and shown["x-accel-buffering"] == "no"
    assert shown["server"] == "bequest" and shown["x-request-id"].startswith("cmpl-")
    assert "".join(e["choices"][0]["text"] for e in events(b"".join([*chunks, last]))) == WHOLE
    # The connection is ready for the next request.
    front.engine.held = False
    await raw.request({"prompt": "x"}, "/v1/completions")
    assert b"200 OK" in await raw.head()
    await raw.close()
    assert front.engine.aborted == []


async def test_http_1_0_ends_with_the_connection(front: Front) -> None:
    raw = RawConnection(*await asyncio.open_connection("127.0.0.1", front.port))
    await raw.request(STREAM, "/v1/completions", version="1.0")
    head, _, body = (await raw.reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head and len(events(body)) == len(PIECES)
    await raw.close()


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("path, body", [("/v1/completions", STREAM), ("/v1/chat/completions", CHAT)])
async def test_usage_is_the_last_chunk(front: Front, path: str, body: dict[str, Any], usage: bool) -> None:
    async with front.http.post(front.url + path, json={**body, "stream_options": {"include_usage": usage}}) as answer:
        seen = events(await answer.read())
    if usage:
        last = seen.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(PIECES)
    assert all(event.get("usage", "absent") == (None if usage else "absent") for event in seen)
    assert len({event["id"] for event in seen}) == 1 and len(seen) == len(PIECES)


@pytest.mark.parametrize("after", range(len(PIECES)))
@pytest.mark.parametrize("path, body", [("/v1/completions", STREAM), ("/v1/chat/completions", CHAT)])
async def test_leaving_at_every_chunk_aborts_once(front: Front, path: str, body: dict[str, Any], after: int) -> None:
    front.engine.held = True
    raw = await front.connect(body, path)
    await front.settle()
    for number in range(after):
        front.engine.advance()
        if number == 0:
            await raw.head()
        await raw.chunk()
    await raw.close()
    await front.settle()
    assert front.engine.aborted == [front.engine.submitted[0].id]
    assert not front.engine.runs


@pytest.mark.parametrize("path, body", [("/v1/completions", STREAM), ("/v1/chat/completions", CHAT)])
async def test_leaving_a_whole_answer_aborts_it(front: Front, path: str, body: dict[str, Any]) -> None:
    front.engine.held = True
    raw = await front.connect({**body, "stream": False}, path)
    await front.settle()
    assert len(front.engine.runs) == 1
    await raw.close()
    await front.settle()
    assert front.engine.aborted == [front.engine.submitted[0].id]


async def test_leaving_aborts_every_prompt_of_a_list(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"prompt": ["a", "b", "c"], "stream": True})
    await front.settle()
    front.engine.advance(front.engine.submitted[1].id)
    await raw.head()
    await raw.close()
    await front.settle()
    assert sorted(front.engine.aborted) == sorted(request.id for request in front.engine.submitted)


async def test_closing_after_done_is_no_abort(front: Front) -> None:
    raw = await front.connect(STREAM)
    await raw.reader.readuntil(b"[DONE]\n\n")
    await raw.close()
    await front.settle()
    assert front.engine.aborted == []


async def test_an_abandoned_name_is_free_at_once(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({**STREAM, "request_id": "mine"})
    await front.settle()
    await raw.close()
    await front.settle()
    front.engine.held = False
    answer, _ = await front.post("/v1/completions", {"prompt": "a", "request_id": "mine"})
    assert answer.status == 200


def flood(pieces: int) -> Any:
    """Much text, in many pieces."""

    def script(request: Request) -> Iterator[Delta]:
        for number in range(pieces):
            last = number == pieces - 1
            choice = ChoiceDelta(0, f"{number:>999},", (65,), finish_reason="length" if last else None)
            usage = Usage(1, pieces, 0) if last else None
            yield Delta(request.id, (choice,), first=number == 0, usage=usage)

    return script


@pytest.mark.parametrize("path, body", [("/v1/completions", STREAM), ("/v1/chat/completions", CHAT)])
async def test_a_slow_reader_gets_merged_events(start: Starter, path: str, body: dict[str, Any]) -> None:
    pieces = 6000
    front = await start(FakeEngine(flood(pieces)))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", front.port))
    raw = RawConnection(*await asyncio.open_connection(sock=client, limit=4096))
    await raw.request(body, path)
    # Nobody reads, and the engine runs to its end all the same.
    await front.until(lambda: bool(front.engine.submitted) and not front.engine.runs)
    await raw.head()
    chunks = []
    while chunk := await raw.chunk():
        chunks.append(chunk)
    seen = events(b"".join(chunks))
    assert len(seen) < pieces, "events were merged"
    parts = [event["choices"][0] for event in seen]
    text = "".join(part.get("text") or part.get("delta", {}).get("content", "") for part in parts)
    assert [int(number) for number in text.split(",")[:-1]] == list(range(pieces))
    assert [part["finish_reason"] for part in parts][-1] == "length"
    await raw.close()
    assert front.engine.aborted == []


async def test_a_slow_reader_that_leaves_aborts(start: Starter) -> None:
    front = await start(FakeEngine(flood(10**9)))
    raw = await front.connect(STREAM, limit=4096)
    await front.until(lambda: bool(front.engine.submitted))
    await asyncio.sleep(0.05)
    assert front.engine.aborted == []
    raw.writer.transport.abort()
    await front.settle()
    assert front.engine.aborted == [front.engine.submitted[0].id]


@pytest.mark.parametrize("after", range(1, len(PIECES)))
async def test_failure_in_the_middle(start: Starter, after: int) -> None:
    front = await start(FakeEngine(failing_script(InternalError("The device returned NaN."), after)))
    texts = []
    with pytest.raises(openai.APIError) as caught:
        stream = await front.strict().chat.completions.create(
            model="fake/model", messages=CHAT["messages"], stream=True
        )
        async for event in stream:
            texts.append(event.choices[0].delta.content)  # noqa: PERF401 - those before the error count
    assert caught.value.code == "internal_error" and caught.value.type == "server_error"
    assert "".join(map(str, texts)) == "".join(PIECES[:after])
    raw = await front.connect(STREAM)
    await raw.head()
    body = await raw.reader.readuntil(b"\n0\r\n\r\n")
    assert b'data: {"error":{"message":"The device returned NaN."' in body and b"data: [DONE]\n\n" in body
    await raw.close()
    assert front.engine.aborted == []


async def test_failure_before_the_first_event_is_an_http_error(start: Starter) -> None:
    late = DeadlineExceeded("The request was still queued at its timeout.", field="deadline")
    front = await start(FakeEngine(failing_script(late, 0)))
    answer, body = await front.post("/v1/completions", STREAM)
    assert answer.status == 504 and body["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"


async def test_one_prompts_failure_ends_the_stream_and_the_others(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"prompt": ["a", "b"], "stream": True})
    await front.settle()
    first, second = (request.id for request in front.engine.submitted)
    front.engine.advance(first)
    await raw.head()
    await raw.chunk()
    run = front.engine.runs.pop(second)
    run.sink(Delta(second, error=InternalError("broken")))
    assert b'"error"' in await raw.chunk() and await raw.chunk() == b""
    await front.settle()
    assert front.engine.aborted == [first]
    await raw.close()


async def test_keep_alive_comments(start: Starter) -> None:
    front = await start(sse_keep_alive_interval=0.02)
    front.engine.held = True
    raw = await front.connect(STREAM)
    await front.until(lambda: bool(front.engine.runs))
    front.engine.advance()
    await raw.head()
    while await raw.chunk() == b": keep-alive\n\n":  # before the first event, which an event ends
        pass
    assert await raw.chunk() == b": keep-alive\n\n"
    while front.engine.advance():
        pass
    rest = await raw.reader.readuntil(b"\n0\r\n\r\n")
    assert b"[DONE]" in rest
    await raw.close()


RESPONSE: dict[str, Any] = {"input": "abc", "stream": True}
STREAMS = {"/v1/completions": STREAM, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}


@pytest.mark.parametrize("path", STREAMS)
async def test_keep_alive_comments_before_the_first_event(start: Starter, path: str) -> None:
    """A long prefill must not look dead to a proxy."""
    front = await start(sse_keep_alive_interval=0.02)
    front.engine.held = True
    raw = await front.connect(STREAMS[path], path)
    assert b"200 OK" in await raw.head()
    for _ in range(3):
        assert await raw.chunk() == b": keep-alive\n\n"
    while front.engine.advance():
        pass
    rest = (await raw.reader.readuntil(b"\n0\r\n\r\n")).decode()
    assert (rest.count("response.created") == 2) if path == "/v1/responses" else ("[DONE]" in rest)
    await raw.close()
    assert front.engine.aborted == []


@pytest.mark.parametrize("path", STREAMS)
async def test_failure_after_a_comment_and_before_the_first_event(start: Starter, path: str) -> None:
    front = await start(sse_keep_alive_interval=0.02)
    front.engine.held = True
    client = front.strict()

    async def texts() -> None:
        if path == "/v1/responses":
            stream: Any = await client.responses.create(model="fake/model", input="abc", stream=True)
        elif path == "/v1/chat/completions":
            stream = await client.chat.completions.create(model="fake/model", **CHAT)
        else:
            stream = await client.completions.create(model="fake/model", **STREAM)
        kinds = [event.type async for event in stream if path == "/v1/responses"]
        raise AssertionError(kinds)

    call = asyncio.create_task(texts())
    await front.until(lambda: len(front.engine.runs) == 1)
    await asyncio.sleep(0.1)
    [request] = front.engine.submitted
    front.engine.runs.pop(request.id).sink(Delta(request.id, error=DeadlineExceeded("Too late.", field="deadline")))
    with pytest.raises(openai.APIError) as caught:
        await call
    assert caught.value.code == "deadline_exceeded" and not isinstance(caught.value, openai.APIStatusError)


# The child of a parent, by the parent's name.
CHILDREN: dict[str, dict[str, Any]] = {
    "/v1/completions": {**STREAM, "continuation_of": "parent"},
    "/v1/chat/completions": {**CHAT, "continuation_of": "parent", "messages": [{"role": "user", "content": "more"}]},
    "/v1/responses": {**RESPONSE, "previous_response_id": "parent"},
}


async def waiting_child(start: Starter, path: str, **fields: Any) -> tuple[Front, RawConnection, RawConnection]:
    """A parent that runs, and its child, who has waited for some time."""
    front: Front = await start(sse_keep_alive_interval=0.02)
    front.engine.held = True
    parent = await front.connect({**STREAMS[path], "stream": False, "request_id": "parent"}, path)
    await front.until(lambda: len(front.engine.runs) == 1)
    child = await front.connect({**CHILDREN[path], "nothing_of_ours": 1, **fields}, path)
    head = await child.head()
    assert b"200 OK" in head and b"event-stream" in head and b"x-bequest-ignored: nothing_of_ours" in head.lower()
    for _ in range(3):
        assert await child.chunk() == b": keep-alive\n\n"
    assert len(front.engine.submitted) == 1
    return front, parent, child


@pytest.mark.parametrize("path", STREAMS)
async def test_keep_alive_comments_while_a_parent_runs(start: Starter, path: str) -> None:
    front, parent, child = await waiting_child(start, path)
    front.engine.held = False
    while front.engine.advance():
        pass
    rest = (await child.reader.readuntil(b"\n0\r\n\r\n")).decode()
    assert (rest.count("response.created") == 2) if path == "/v1/responses" else ("[DONE]" in rest)
    assert '"error":{' not in rest and '"continuation":{' in rest
    await parent.close()
    await child.request({**STREAMS[path], "stream": False}, path)
    assert b"200 OK" in await child.head(), "the connection serves on"
    await child.close()


@pytest.mark.parametrize("path", STREAMS)
async def test_a_parent_that_runs_too_long_for_a_child_with_comments(start: Starter, path: str) -> None:
    front, parent, child = await waiting_child(start, path, timeout=0.3)
    rest = (await child.reader.readuntil(b"\n0\r\n\r\n")).decode()
    assert '"code":"deadline_exceeded"' in rest and len(front.engine.submitted) == 1
    if path == "/v1/responses":
        events = [line.removeprefix("event: ") for line in rest.splitlines() if line.startswith("event: ")]
        assert events == ["response.created", "response.in_progress", "response.failed", "error"]
    else:
        assert rest.count("data: ") == 2 and "data: [DONE]" in rest
    await parent.close()
    await child.close()


async def test_a_child_that_leaves_while_it_waits(start: Starter) -> None:
    front, parent, child = await waiting_child(start, "/v1/completions")
    await child.close()
    await front.settle()
    while front.engine.advance():
        pass
    await front.settle()
    assert len(front.engine.submitted) == 1
    await parent.close()


async def test_an_engine_that_dies_fails_what_is_open(front: Front) -> None:
    front.engine.held = True
    streaming, waiting = await front.connect(STREAM), await front.connect({**STREAM, "stream": False})
    await front.settle()
    front.engine.advance(front.engine.submitted[0].id)
    await streaming.head()
    await streaming.chunk()
    front.engine.die()
    assert b'"code":"engine_dead"' in await streaming.chunk()
    assert b"503" in await waiting.head()
    answer, body = await front.get("/health")
    assert answer.status == 503 and body["error"]["code"] == "engine_dead" and answer.headers["Retry-After"] == "1"
    await streaming.close()
    await waiting.close()
    assert front.engine.aborted == []


async def test_a_fault_in_the_last_event_ends_the_stream(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error: nobody waits for an end that does not come."""
    event = Chunks.event

    def failing(
        self: Chunks, choices: Sequence[ChoiceDelta], opening: Delta | None = None, ending: Delta | None = None
    ) -> bytes:
        if ending is not None:
            raise TypeError("it cannot be written")
        return event(self, choices, opening, ending)

    monkeypatch.setattr(Chunks, "event", failing)
    async with asyncio.timeout(10):
        answer, body = await front.post("/v1/completions", STREAM)
    assert answer.status == 200 and events(body)[-1]["error"]["code"] == "internal_error"
