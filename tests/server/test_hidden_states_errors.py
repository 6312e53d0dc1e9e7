"""What can go wrong with hidden states: fields out of range, too much of them, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

import aiohttp
import openai
import pytest

from bequest.engine.errors import DeadlineExceeded, EngineError, InternalError, InvalidRequest, QueueFull
from bequest.engine.scheduling.limits import ExtractionLimits
from bequest.engine.types import Delta
from bequest.engine.types.states import ChoiceStates
from bequest.server.stores.room import Room
from bequest.server.transport import sending
from tests.server.conftest import Starter
from tests.server.fake_states import HIDDEN, NUM_LAYERS
from tests.server.fakes import FakeEngine, failing_script
from tests.server.front import Front, RawConnection
from tests.server.test_errors import refused

STATES, EMBEDDINGS, COMPLETIONS = "/v1/hidden_states", "/v1/embeddings", "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "body, param, code",
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [[]]}, "input[0]", "invalid_value"),
        ({"input": [258]}, "input[0]", "invalid_value"),
        ({"input": ["a", [1, -1]]}, "input[1][1]", "invalid_value"),
        ({"input": {"a": 1}}, "input.a", "unknown_parameter"),
        ({"input": {"encoder_prompt": "a"}}, "input.encoder_prompt", "invalid_value"),
        ({"stack": "encoder"}, "stack", "invalid_value"),
        ({"stack": "both"}, "stack", "invalid_value"),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
        ({"layers": [0, NUM_LAYERS + 1]}, "layers", "invalid_value"),
        ({"layers": [-NUM_LAYERS - 2]}, "layers", "invalid_value"),
        ({"layers": [10**30]}, "layers", "invalid_value"),
        ({"layers": []}, "layers", "invalid_value"),
        ({"layers": [0] * 1025}, "layers", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"layers": "first"}, "layers", "invalid_value"),
        ({"layers": 3}, "layers", "invalid_type"),
        ({"layers": [1, True]}, "layers[1]", "invalid_type"),
        ({"positions": [0, 4]}, "positions", "invalid_value"),
        ({"positions": [-5]}, "positions", "invalid_value"),
        ({"positions": [10**30]}, "positions", "invalid_value"),
        ({"positions": []}, "positions", "invalid_value"),
        ({"positions": "first"}, "positions", "invalid_value"),
        ({"positions": {"start": 4}}, "positions", "invalid_value"),
        ({"positions": {"start": 3, "end": 3}}, "positions", "invalid_value"),
        ({"positions": {"start": "a"}}, "positions.start", "invalid_type"),
        ({"positions": {"begin": 1}}, "positions.begin", "unknown_parameter"),
        ({"pooling": "max"}, "pooling", "invalid_value"),
        ({"dtype": "float64"}, "dtype", "invalid_value"),
        ({"encoding_format": "npy"}, "encoding_format", "invalid_value"),
        ({"model": "another"}, "model", "model_not_found"),
        ({"timeout": 0}, "timeout", "invalid_value"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"prompt": "a"}, "prompt", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "unsupported_parameter"),
        ({"dimensions": 3}, "dimensions", "unsupported_parameter"),
        ({"include_prompt": True}, "include_prompt", "unsupported_parameter"),
        ({"layer": [1]}, "layer", "unknown_parameter"),
        ({"position": [1]}, "position", "unknown_parameter"),
        ({"encodingFormat": "float"}, "encodingFormat", "unknown_parameter"),
        ({"continuation_at": 3}, "continuation_at", "invalid_value"),
        ({"continuation_suffix": "a"}, "continuation_suffix", "invalid_value"),
        ({"continuation_of": "x", "input": ["a", "b"]}, "input", "invalid_value"),
        ({"continuation_of": "x", "continuation_suffix": "b"}, "continuation_suffix", "invalid_value"),
        ({"continuation_of": "x", "input": "", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "invalid_value"),
        ({"continuation_of": "x", "input": ""}, "continuation_of", "continuation_parent_not_found"),
        ({"input": ["a", "b"], "retain": True}, "retain", "invalid_value"),
    ],
)
async def test_refused_extractions(front: Front, body: dict[str, Any], param: str | None, code: str) -> None:
    status = 404 if code.endswith("not_found") else 400
    error = await refused(front, body if body in ({},) else {"input": "abc", **body}, STATES, status)
    assert (error["param"], error["code"]) == (param, code), error


@pytest.mark.parametrize(
    "body, param, code",
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "invalid_value"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"dimensions": HIDDEN + 1}, "dimensions", "invalid_value"),
        ({"dimensions": 2.5}, "dimensions", "invalid_type"),
        ({"encoding_format": "safetensors"}, "encoding_format", "invalid_value"),
        ({"pooling": "none"}, "pooling", "invalid_value"),
        ({"normalise": True}, "normalise", "unknown_parameter"),
        ({"layers": [1]}, "layers", "unsupported_parameter"),
        ({"continuation_of": "x"}, "continuation_of", "unsupported_parameter"),
        ({"retain": True}, "retain", "unsupported_parameter"),
    ],
)
async def test_refused_embeddings(front: Front, body: dict[str, Any], param: str, code: str) -> None:
    special = {"add_special_tokens": False}
    error = await refused(
        front, {**special, **body} if "input" in body or not body else {"input": "a", **body}, EMBEDDINGS
    )
    assert (error["param"], error["code"]) == (param, code), error


async def test_foreign_token_ids_come_with_the_way_out(front: Front) -> None:
    error = await refused(front, {"input": [[100264, 1]]}, EMBEDDINGS)
    assert error["param"] == "input[0][0]" and "check_embedding_ctx_length=False" in error["message"]


@pytest.mark.parametrize(
    "given, param, code",
    [
        ({"layers": [5]}, "layers", "invalid_value"),
        ({"layers": []}, "layers", "invalid_value"),
        ({"positions": [3]}, "positions", "invalid_value"),
        ({"positions": [-4]}, "positions", "invalid_value"),
        ({"positions": [10], "include_prompt": True}, "positions", "invalid_value"),
        ({"encoding_format": "safetensors"}, "encoding_format", "invalid_value"),
        ({"pooling": "sum"}, "pooling", "invalid_value"),
        ({"layers": [1.5]}, "layers[0]", "invalid_type"),
        ({"layer": [1]}, "layer", "unknown_parameter"),
        ({"include_prompt": "yes"}, "include_prompt", "invalid_type"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_refused_with_a_completion(front: Front, path: str, given: Any, param: str, code: str) -> None:
    what: dict[str, Any] = (
        {"prompt": "abcdef"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": ""}]}
    )
    if path == CHAT and given.get("include_prompt") is True:
        given = {**given, "positions": [100]}
    error = await refused(front, {**what, "max_tokens": 3, "return_hidden_states": given}, path)
    assert (error["param"], error["code"]) == (f"return_hidden_states.{param}", code), error


async def test_responses_refuse_it(front: Front) -> None:
    error = await refused(front, {"input": "a", "return_hidden_states": True}, "/v1/responses")
    assert error["code"] == "unsupported_parameter" and error["param"] == "return_hidden_states"
    answer, _ = await front.post("/v1/responses", {"input": "a", "return_hidden_states": False})
    assert answer.status == 200


# --- too much


def limited(engine: FakeEngine, **limits: Any) -> FakeEngine:
    engine.extraction_limits = dataclasses.replace(ExtractionLimits(), **limits)
    return engine


ROW = HIDDEN * 4


@pytest.mark.parametrize(
    "fields, rows",
    [
        ({"positions": "all"}, 7),
        ({"positions": "all", "layers": [0, 1, 0]}, 21),
        ({"positions": [1] * 30}, 30),  # computed once, but sent thirty times
        ({"positions": {"start": 1}, "layers": "all"}, 30),
        ({"positions": "all", "input": ["abcdef", "abc"]}, 11),
        ({"positions": "all", "pooling": "mean", "layers": [1, 2]}, 14),  # what is pooled has to be held
        ({"pooling": "last", "input": [[1]] * 9}, 9),
    ],
)
async def test_an_answer_over_the_limit(start: Starter, fields: dict[str, Any], rows: int) -> None:
    front = await start(limited(FakeEngine(), max_request_bytes=rows * ROW - 1))
    error = await refused(front, {"input": "abcdef", **fields}, STATES)
    assert error["code"] == "answer_too_large"
    assert error["details"] == {"budget": rows * ROW - 1, "needed": rows * ROW}
    limited(front.engine, max_request_bytes=rows * ROW)
    answer, _ = await front.post(STATES, {"input": "abcdef", **fields})
    assert answer.status == 200


async def test_the_official_client_is_told_at_once(start: Starter) -> None:
    front = await start(limited(FakeEngine(), max_request_bytes=ROW))
    client, body = front.client(max_retries=2), {"input": "abc", "positions": "all"}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post("/hidden_states", body=body, cast_to=object)
    assert caught.value.code == "answer_too_large" and "max-extraction-mb" in str(caught.value)
    found: Any = await client.post("/hidden_states", body={"input": "abc"}, cast_to=object)
    assert found["data"][0]["positions"] == [3]


async def test_pooled_inputs_are_held_one_by_one(start: Starter) -> None:
    front = await start(limited(FakeEngine(), max_request_bytes=7 * ROW))
    answer, _ = await front.post(STATES, {"input": ["abcdef"] * 7, "positions": "all", "pooling": "mean"})
    assert answer.status == 200
    answer, _ = await front.post(EMBEDDINGS, {"input": ["abcdef"] * 7, "pooling": "mean"})
    assert answer.status == 200
    assert (await refused_again(front, {"input": ["abcdef"] * 7, "positions": "all"}))["code"] == "answer_too_large"


async def refused_again(front: Front, body: dict[str, Any], path: str = STATES) -> Any:
    front.engine.submitted.clear()
    return await refused(front, body, path)


async def test_completions_over_the_limit(start: Starter) -> None:
    front = await start(limited(FakeEngine(), max_request_bytes=3 * ROW))
    for fields in (
        {"max_tokens": 4, "return_hidden_states": {"positions": "all"}},
        {"max_tokens": 2, "n": 2, "return_hidden_states": {"positions": "all"}},
        {"max_tokens": 2, "prompt": ["a", "b"], "return_hidden_states": {"positions": "all"}},
        {"max_tokens": 1, "return_hidden_states": {"positions": "all", "include_prompt": True}},
    ):
        error = await refused(front, {"prompt": "abc", **fields})
        assert error["code"] == "answer_too_large" and error["param"] == "return_hidden_states.positions"
    fields = {"prompt": "abc", "max_tokens": 3, "return_hidden_states": {"positions": "all"}}
    assert (await front.post(COMPLETIONS, fields))[0].status == 200


@pytest.mark.parametrize("path", [STATES, EMBEDDINGS])
async def test_a_full_queue_and_the_official_client(front: Front, path: str) -> None:
    front.engine.refusal = QueueFull("The server's queue is full; try again later.")
    client = front.client(max_retries=0)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.post(path.removeprefix("/v1"), body={"input": "a"}, cast_to=object)
    assert caught.value.code == "queue_full" and caught.value.response.headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    "error, status",
    [(DeadlineExceeded("Late."), 504), (InternalError("A bug."), 500), (InvalidRequest("No.", field="positions"), 400)],
)
async def test_one_failure_ends_all_inputs(front: Front, error: EngineError, status: int) -> None:
    front.engine.script = failing_script(error, 0)
    answer, content = await front.post(STATES, {"input": ["a", "b", "c"]})
    assert answer.status == status and content["error"]["message"] == error.message
    assert not front.engine.runs


async def test_what_had_come_is_given_back_when_another_input_fails(front: Front) -> None:
    front.engine.held = True
    pending = asyncio.create_task(front.post(STATES, {"input": ["a", "b"]}))
    await front.until(lambda: len(front.engine.runs) == 2)
    first, second = front.engine.submitted
    front.engine.advance(first.id)
    await front.settle()
    assert front.engine.states.held == 1
    run = front.engine.runs.pop(second.id)
    run.sink(Delta(second.id, error=InternalError("A bug.")))
    answer, _ = await pending
    assert answer.status == 500 and front.engine.states.held == 0


# --- clients that leave, and clients that do not read


@pytest.mark.parametrize("path", [STATES, EMBEDDINGS])
async def test_a_client_that_leaves(front: Front, path: str) -> None:
    front.engine.held = True
    connection = await front.connect({"input": ["a", "b", "c"]}, path)
    await front.until(lambda: len(front.engine.runs) == 3)
    first = front.engine.submitted[0]
    front.engine.advance(first.id)
    await connection.close()
    await front.until(lambda: not front.engine.runs)
    assert len(front.engine.aborted) == 2 and first.id not in front.engine.aborted
    await front.until(lambda: front.engine.states.held == 0)


def enlarge(engine: FakeEngine) -> FakeEngine:
    """Answers that no socket buffer holds."""
    engine.info = engine.states.info = dataclasses.replace(engine.info, hidden_size=10_000)
    return engine


LARGE = {"input": [[1] * 100], "layers": "all", "positions": "all"}  # 20 MB
LARGE_STREAM = {
    "prompt": [1] * 100,
    "stream": True,
    "return_hidden_states": {"positions": "all", "layers": "all", "include_prompt": True, "encoding_format": "base64"},
}


@pytest.mark.parametrize(
    "body, path",
    [
        ({**LARGE, "encoding_format": "safetensors"}, STATES),
        ({**LARGE, "encoding_format": "base64"}, STATES),
        ({**LARGE, "encoding_format": "float"}, STATES),
        (LARGE_STREAM, COMPLETIONS),
        ({**LARGE_STREAM, "stream": False}, COMPLETIONS),
    ],
)
async def test_a_reader_that_stops_is_dropped(
    start: Starter, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], path: str
) -> None:
    monkeypatch.setattr(sending, "READER_PATIENCE", 0.3)
    front = await start(enlarge(FakeEngine()))
    connection = await front.connect(body, path, limit=1024)
    assert b"200 OK" in await connection.head()
    await front.until(lambda: front.engine.states.held == 1)
    small, began = 0, time.monotonic()
    while front.engine.states.held:  # meanwhile others are served
        answer, _ = await front.post(STATES, {"input": [[1]], "encoding_format": "base64"})
        assert answer.status == 200 and time.monotonic() - began < 20
        small += 1
    assert small > 1
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        while True:
            await connection.reader.readexactly(1 << 16)
    await close_quietly(connection)
    assert 'bequest:dropped_readers_total{model_name="fake/model"} 1.0' in front.metrics.exposition()[0].decode()


async def test_a_slow_reader_is_not_dropped(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "READER_PATIENCE", 0.2)
    front = await start(enlarge(FakeEngine()))
    connection = await front.connect({**LARGE, "encoding_format": "safetensors"}, STATES, limit=1 << 20)
    head = await connection.head()
    left = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    while left:
        data = await connection.reader.read(1 << 22)
        assert data, "it was dropped"
        left -= len(data)
        await asyncio.sleep(0.02)
    await front.until(lambda: front.engine.states.held == 0)
    await close_quietly(connection)


@pytest.mark.parametrize("body, path", [(LARGE, STATES), (LARGE_STREAM, COMPLETIONS)])
async def test_a_client_that_leaves_in_the_middle_of_its_answer(start: Starter, body: Any, path: str) -> None:
    front = await start(enlarge(FakeEngine()))
    connection = await front.connect(body, path)
    await connection.head()
    await front.until(lambda: front.engine.states.held == 1)
    connection.writer.transport.abort()
    await front.until(lambda: front.engine.states.held == 0)


@pytest.mark.parametrize("encoding", ["safetensors", "base64", "float"])
async def test_a_failure_in_the_middle_cuts_the_answer_off(
    start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, encoding: str
) -> None:
    """Nobody may take half an answer, or an error in the middle of it, for the whole."""
    front = await start(enlarge(FakeEngine()))
    assemble, calls = ChoiceStates.assemble, []

    def failing(states: ChoiceStates) -> Any:
        calls.append(states)
        if len(calls) == 2:
            raise MemoryError("too little")
        return assemble(states)

    monkeypatch.setattr(ChoiceStates, "assemble", failing)
    body = {"input": [[1] * 20] * 2, "layers": "all", "positions": "all", "encoding_format": encoding}
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
        await front.post(STATES, body)
    await front.until(lambda: front.engine.states.held == 0)
    assert "MemoryError" in caplog.text


async def test_a_client_that_leaves_while_it_waits_for_room(start: Starter) -> None:
    front = await start(limited(FakeEngine(), max_bytes=14 * ROW))
    front.engine.held = True
    body = {"input": ["abcdef"] * 2, "positions": "all"}
    connections = [await front.connect(body, STATES) for _ in range(3)]
    await front.until(lambda: len(front.engine.submitted) == 2)
    for connection in connections:
        await connection.close()
    await front.until(lambda: not front.engine.runs)
    front.engine.held = False
    assert (await front.post(STATES, body))[0].status == 200


async def close_quietly(connection: RawConnection) -> None:
    connection.writer.close()
    with contextlib.suppress(ConnectionError):
        await connection.writer.wait_closed()


# --- room for several inputs


async def test_requests_of_several_inputs_do_not_wait_for_each_other(start: Starter) -> None:
    """Each would hold the states of its first input while it waits for memory for the second."""
    front = await start(limited(FakeEngine(), max_bytes=5 * 7 * ROW, max_request_bytes=4 * 7 * ROW))
    front.engine.held = True
    body = {"input": ["abcdef"] * 2, "positions": "all"}
    answers = [asyncio.create_task(front.post(STATES, body)) for _ in range(4)]
    await front.until(lambda: len(front.engine.runs) == 4)
    await front.settle()
    assert len(front.engine.submitted) == 4, "two of them wait, and hold nothing"
    single = asyncio.create_task(front.post(STATES, {"input": "abcdef", "positions": "all"}))
    await front.until(lambda: len(front.engine.submitted) == 5)
    while not all(task.done() for task in answers):
        front.engine.advance()
        await asyncio.sleep(0.001)
    assert [(await task)[0].status for task in (*answers, single)] == [200] * 5


async def test_room_is_given_in_order_and_back_whatever_happens() -> None:
    room, order = Room(10, most_waiting=3), []

    async def use(name: str, num_bytes: int, deadline: float | None = None) -> None:
        async with room.taken(num_bytes, deadline):
            order.append(name)
            await gates[name].wait()

    gates = {name: asyncio.Event() for name in "abcde"}
    tasks = {name: asyncio.create_task(use(name, size)) for name, size in zip("abcd", (6, 8, 2, 10), strict=True)}
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a"], "c would fit, but came after b"
    with pytest.raises(QueueFull):
        await use("e", 1)
    async with room.taken(0, None):
        pass  # needs no room, waits for none
    tasks["b"].cancel()
    await asyncio.wait([tasks["b"]])
    await asyncio.sleep(0)
    assert order == ["a", "c"]
    with pytest.raises(DeadlineExceeded):
        await use("e", 1, deadline=time.monotonic() + 0.01)
    gates["a"].set()
    gates["c"].set()
    gates["d"].set()
    await asyncio.gather(tasks["a"], tasks["c"], tasks["d"])
    assert order == ["a", "c", "d"]
    async with room.taken(10, None):
        pass
