"""Clients that are slow, silent, many, greedy or random; and a process that is told to end in the middle of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import resource
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import orjson
import pytest
from yarl import URL

from bequest.server.app import ROUTES
from bequest.server.transport import intake, protocol
from bequest.server.transport.decoding import Decoder
from bequest.server.wire.bodies import ChatBody, CompletionBody, ResponseBody
from tests.forked import Forked
from tests.server.conftest import Starter
from tests.server.fakes import PIECES
from tests.server.front import Front

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def everything(front: Front, *pieces: bytes, pause: float = 0.0) -> bytes:
    """What the server answers until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


# --- slow and silent ---------------------------------------------------------------------------------------------


async def test_a_head_that_never_ends(start: Starter) -> None:
    front = await start(client_timeout=0.1)
    answer = await everything(front, *(bytes([byte]) for byte in HEAD[:8]), pause=0.005)
    assert answer.startswith(b"HTTP/1.1 408 ") and orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
    assert await everything(front) == b"", "who says nothing hears nothing"


async def test_a_second_head_that_never_ends(start: Starter) -> None:
    front = await start(client_timeout=0.1)
    first = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = await everything(front, first, HEAD, pause=0.02)
    assert answer.count(b"HTTP/1.1") == 2 and b"408" in answer


async def test_a_body_that_never_ends(start: Starter) -> None:
    front = await start(client_timeout=0.1)
    head = HEAD + b"Content-Length: 1000\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    for piece in (head, *[b" "] * 8):
        writer.write(piece)
        await asyncio.sleep(0.005)
    assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
    assert b'"request_timeout"' in await reader.readuntil(b"}}")
    writer.close()
    assert not front.engine.submitted


class StandingClock:
    """The loop's clock, which goes on only when it is told to: how long a machine takes for anything is no matter."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._now = loop.time()

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
async def clock(start: Starter, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StandingClock]:
    """Stands still while the test runs, and no longer: what `start` ends takes real time."""
    loop = asyncio.get_running_loop()
    clock = StandingClock(loop)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "time", clock.time)
        yield clock


class ReadBytes:
    """How much the server has taken of the bodies that it reads piece by piece."""

    def __init__(self) -> None:
        self._count = 0
        self._grew = asyncio.Event()

    def add(self, count: int) -> None:
        self._count += count
        self._grew.set()

    async def reach(self, count: int) -> None:
        while self._count < count:
            self._grew.clear()
            await self._grew.wait()


@pytest.fixture
async def read_bytes(monkeypatch: pytest.MonkeyPatch) -> ReadBytes:
    read = ReadBytes()

    class Counted(Decoder):
        def feed(self, data: bytes) -> Iterator[bytes]:
            read.add(len(data))
            return super().feed(data)

    monkeypatch.setattr(intake, "Decoder", Counted)
    return read


PATIENCE = 10.0


async def send_slowly(
    front: Front, clock: StandingClock, read_bytes: ReadBytes, pauses: list[float]
) -> tuple[bytes, float]:
    """Sends a body with a pause whenever a part of it was read; a part is large enough to buy another --client-timeout.
    The first line of the answer, and how long it all took by the clock."""
    size = 20_000
    body = json.dumps({"prompt": "a", "user": "x" * size * len(pauses)}).encode().rjust(size * (len(pauses) + 1))
    began = clock.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    for end, pause in enumerate(pauses, 1):
        writer.write(body[(end - 1) * size : end * size])
        await read_bytes.reach(end * size)
        clock.advance(pause)
    writer.write(body[len(pauses) * size :])
    answer = await reader.readline()
    writer.close()
    return answer, clock.time() - began


async def test_a_slow_but_steady_body_arrives(start: Starter, clock: StandingClock, read_bytes: ReadBytes) -> None:
    front = await start(client_timeout=PATIENCE)
    answer, took = await send_slowly(front, clock, read_bytes, [0.9 * PATIENCE] * 10)
    assert answer.startswith(b"HTTP/1.1 200 ") and took == pytest.approx(9 * PATIENCE)


async def test_a_body_that_stands_still_once_is_too_slow(
    start: Starter, clock: StandingClock, read_bytes: ReadBytes
) -> None:
    front = await start(client_timeout=PATIENCE)
    answer, _ = await send_slowly(front, clock, read_bytes, [0.9 * PATIENCE] * 3 + [1.1 * PATIENCE])
    assert answer.startswith(b"HTTP/1.1 408 ") and not front.engine.submitted


async def refused_early(front: Front) -> asyncio.StreamWriter:
    """Announces a body that is refused before it is sent, and reads the answer to the end of what the server says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n{" % 2**30)
    async with asyncio.timeout(5):  # less than the ten seconds for which what is left of a body is read
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 413 ") and answer.endswith(b"}}")
    return writer


async def test_whoever_is_refused_early_sees_the_end_at_once(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_SILENT", 0.1)
    writer = await refused_early(front)
    async with asyncio.timeout(5):
        with pytest.raises(ConnectionError):  # after a silence the connection is gone
            while True:
                await asyncio.sleep(0.3)
                writer.write(b" ")
                await writer.drain()
    writer.close()


async def test_whoever_is_refused_early_may_go_on_sending(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that read nothing before they have sent everything would not see an answer that comes with a reset."""
    monkeypatch.setattr(protocol, "_SILENT", 3.0)
    writer = await refused_early(front)
    for _ in range(50):
        writer.write(b" " * 100_000)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_never_reads_is_one_that_left(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same option of the kernel's ends connections whose client vanished without a word."""
    monkeypatch.setattr(protocol, "_UNREAD", 0.3)
    front = await start()
    front.engine.held = True
    raw = await front.connect({"prompt": "a", "max_tokens": 7, "stream": True, "n": 100, "logprobs": 5}, limit=2**12)
    raw.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    await front.until(lambda: len(front.engine.runs) == 1)
    request_id = next(iter(front.engine.runs))
    run = front.engine.runs[request_id]
    run.deltas = itertools.repeat(next(run.deltas))
    for _ in range(400):
        front.engine.advance()
        await asyncio.sleep(0.005)
        if not front.engine.runs:
            break
    await front.until(lambda: request_id in front.engine.aborted)
    await raw.close()


# --- many and greedy ---------------------------------------------------------------------------------------------


async def test_a_thousand_streams_at_once(start: Starter) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    front = await start()
    front.engine.held = True
    streams = [await front.connect({"prompt": "a", "stream": True}) for _ in range(1000)]
    await front.until(lambda: len(front.engine.runs) == 1000)
    for _ in PIECES:
        front.engine.advance()
        await asyncio.sleep(0)
    text = "".join(PIECES)
    for stream in streams:
        body = await stream.reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        events = re.findall(rb"data: (\{.*\})", body)
        assert "".join(orjson.loads(event)["choices"][0]["text"] for event in events) == text
    for stream in streams:
        await stream.close()
    await front.settle()
    assert not front.engine.aborted
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_body_of_100_mb(front: Front) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(HEAD + b"Content-Length: 104857600\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 413 Request Entity Too Large\r\n", "without reading it"
    writer.close()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(2**20)

    headers = {"Content-Type": "application/json"}
    try:
        async with front.http.post(front.url + "/v1/completions", data=chunks(), headers=headers) as answer:
            assert answer.status == 413
    except ConnectionError:
        pass  # it was answered and closed while the rest was on its way
    assert (await front.post("/v1/completions", {"prompt": "a"}))[0].status == 200


async def test_choices_and_logprobs_at_their_caps(front: Front) -> None:
    most = {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 7, "return_token_ids": True}
    answer, body = await front.post("/v1/completions", most)
    assert answer.status == 200 and len(body["choices"]) == 128
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 7
    for field, value in (("n", 129), ("logprobs", 21)):
        answer, body = await front.post("/v1/completions", {**most, field: value})
        assert answer.status == 400 and body["error"]["param"] == field
    prompts = {**most, "prompt": ["a"] * 200, "max_tokens": 500}
    answer, body = await front.post("/v1/completions", prompts)
    assert answer.status == 400 and body["error"]["code"] == "answer_too_large"
    # The prompts' own count too, and in each choice.
    long = {"prompt": ["a" * 500] * 128, "n": 8, "max_tokens": 1, "prompt_logprobs": 20}
    for fields, param in (
        ({}, "prompt_logprobs"),
        ({"prompt_logprobs": None, "echo": True, "logprobs": 20}, "logprobs"),
    ):
        answer, body = await front.post("/v1/completions", {**long, **fields})
        assert answer.status == 400 and body["error"]["code"] == "answer_too_large"
        assert body["error"]["param"] == param
    answer, _ = await front.post("/v1/completions", {**long, "prompt": "a" * 500})
    assert answer.status == 200


# --- random ------------------------------------------------------------------------------------------------------


class Bodies:
    """Random JSON, of names and values that are nearly right."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        shapes = (CompletionBody, ChatBody, ResponseBody)
        self.names = sorted({name for shape in shapes for name in shape.__struct_fields__})
        self.names += [
            "items",
            "name",
            "tokens",
            "ttl",
            "input",
            "messages",
            "role",
            "content",
            "type",
            "text",
            "schema",
        ]

    def value(self, depth: int = 0) -> Any:
        draw = self.draw
        plain = [
            None, True, False, 0, 1, -1, 2**31, 2**64, -(2**70), 0.5, -0.0, 1e308, 1e-300, "", "a", "user", "auto",
            "last", "\x00", "\ud7ff😀", "x" * 300, "json_object", "function", "fake/model", [], {}, [1, 2, 3],
            ["a", "b"],
            [257, 258], [{"role": "user", "content": "hi"}], [{"role": "tool", "content": None}],
            {"type": "text", "text": "t"},
        ]  # fmt: skip
        kind = draw.random()
        if depth > 2 or kind < 0.7:
            return draw.choice(plain)
        if kind < 0.85:
            return [self.value(depth + 1) for _ in range(draw.randrange(4))]
        return {draw.choice(self.names): self.value(depth + 1) for _ in range(draw.randrange(4))}

    def body(self, path: str) -> Any:
        """Often a valid one with a few fields changed, so that more than the first check is met."""
        if self.draw.random() < 0.1:
            return self.value()
        body: dict[str, Any] = {"max_tokens": 2}
        if self.draw.random() < 0.8:
            body["messages" if "chat" in path else "input" if "responses" in path else "prompt"] = (
                [{"role": "user", "content": "hi"}] if "chat" in path else "hi"
            )
        body.update({self.draw.choice(self.names): self.value() for _ in range(self.draw.choice([1, 1, 2, 4]))})
        return body


@pytest.mark.parametrize("seed", range(3))
async def test_random_bodies_are_never_our_fault(front: Front, seed: int) -> None:
    bodies = Bodies(seed)
    posts = sorted({path for method, path, _ in ROUTES if method in ("POST", "PATCH") and "audio" not in path})
    seen: dict[int, int] = {}
    for number in range(250):
        path = posts[number % len(posts)].replace("{id}", "x").replace("{id:.+}", "x")
        method = "PATCH" if "continuations" in path else "POST"
        body = bodies.body(path)
        headers = {"Content-Type": "application/json"}
        async with front.http.request(method, front.url + path, data=orjson_or_json(body), headers=headers) as answer:
            content = await answer.read()
        seen[answer.status] = seen.get(answer.status, 0) + 1
        assert answer.status < 500, (path, body, content)
        if answer.status >= 400:
            error = orjson.loads(content)["error"]
            assert error if path.startswith("/api/") else error["message"], (path, body)
    assert seen.get(200, 0) > 5 and seen.get(400, 0) > 50, seen


WEIRD = [
    "",
    "x",
    "0",
    "-1",
    "1e9",
    "abc",
    "true",
    "%00",
    "%ff",
    "..%2f..",
    "%F0%9F%98%80",
    "a" * 300,
    "resp_" + "0" * 32,
]


@pytest.mark.parametrize("seed", range(2))
async def test_random_paths_queries_and_forms_are_never_our_fault(front: Front, seed: int) -> None:
    """On every route that takes no JSON; together with the bodies above no route is left out."""
    draw = random.Random(seed)
    others = [(method, path) for method, path, _ in ROUTES if method not in ("POST", "PATCH") or "audio" in path]
    names = ["limit", "after", "order", "stream", "starting_after", "name", "width", "replace", "x"]
    for method, path in others * 6:
        place = re.sub(r"\{\w+(:[^}]*)?\}", lambda _: draw.choice(WEIRD[1:]), path)
        query = "&".join(f"{draw.choice(names)}={draw.choice(WEIRD)}" for _ in range(draw.randrange(3)))
        url = URL(f"{front.url}{place}?{query}", encoded=True)
        form = None
        if method == "POST":
            form = aiohttp.FormData(default_to_multipart=True)
            for _ in range(draw.randrange(4)):
                fields = ["file", "model", "language", "temperature", "stream", "timestamp_granularities[]", "x"]
                form.add_field(draw.choice(fields), draw.choice(WEIRD))
        async with front.http.request(method, url, data=form) as answer:
            content = await answer.read()
        assert answer.status < 500, (method, place, query, content)
        if answer.status >= 400:
            assert orjson.loads(content)["error"]["message"], (method, place)


def orjson_or_json(body: Any) -> bytes:
    """Python's own writes integers of any size."""
    return json.dumps(body).encode()


async def test_random_bytes_are_never_our_fault(front: Front) -> None:
    draw = random.Random(5)
    valid = orjson.dumps({"prompt": "hello", "max_tokens": 2, "stop": ["a"], "temperature": 0.5})
    for _ in range(200):
        data = bytearray(valid)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        answer, _ = await front.post("/v1/completions", bytes(data))
        assert answer.status < 500, bytes(data)


# --- the end of the process --------------------------------------------------------------------------------------


class Talker:
    """A process of tests/server/fake_process.py, and a stream that it is in the middle of."""

    def __init__(self, num_words: int) -> None:
        self.process = Forked(["tests.server.fake_process"])
        line = next(line for line in self.process.stderr if "ready on" in line)
        body = json.dumps({"prompt": "a", "max_tokens": num_words, "stream": True}).encode()
        url = line.split("ready on ")[1].split()[0]
        asked = urllib.request.Request(f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"})
        self.stream = urllib.request.urlopen(asked, timeout=30)
        assert b"word1 " in self.stream.readline()

    def rest(self) -> bytes:
        try:
            return bytes(self.stream.read())
        except OSError:
            return b"cut off"
        except Exception as error:  # http.client.IncompleteRead is no OSError
            return f"cut off: {error!r}".encode()

    def end(self) -> int:
        code = self.process.wait(20)
        self.stream.close()
        self.process.stderr.close()
        return code


def test_sigterm_in_mid_stream_lets_it_finish() -> None:
    talker = Talker(10)
    talker.process.send_signal(signal.SIGTERM)
    rest = talker.rest()
    assert b"word10 " in rest and rest.endswith(b"data: [DONE]\n\n")
    assert talker.end() == 0


def test_a_second_sigterm_in_mid_stream_ends_it_with_an_error() -> None:
    talker = Talker(400)
    talker.process.send_signal(signal.SIGTERM)
    assert talker.stream.readline() and talker.stream.readline()
    talker.process.send_signal(signal.SIGTERM)
    rest = talker.rest()
    assert b'"code":"draining"' in rest and rest.endswith(b"data: [DONE]\n\n"), rest[-300:]
    assert talker.end() == 128 + signal.SIGTERM


def test_sigkill_in_mid_stream_cannot_be_taken_for_an_end() -> None:
    talker = Talker(400)
    talker.process.send_signal(signal.SIGKILL)
    rest = talker.rest()
    assert rest.startswith(b"cut off") and b"[DONE]" not in rest
    assert talker.end() == -signal.SIGKILL


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_side_gets_its_answer(front: Front, stream: bool) -> None:
    front.engine.held = True
    reader, writer = await _asking(front, {"prompt": "a", "max_tokens": 1, "stream": stream})
    writer.write_eof()
    await asyncio.sleep(0.1)
    assert len(front.engine.runs) == 1
    await front.until(lambda: not front.engine.advance())
    async with asyncio.timeout(10):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"), "and the connection ends"
    writer.close()


async def test_a_client_that_left_is_told_from_one_that_closed_its_side(front: Front) -> None:
    front.engine.held = True
    _, writer = await _asking(front, {"prompt": "a", "max_tokens": 1})
    writer.close()
    await front.until(lambda: not front.engine.runs)


async def _asking(front: Front, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    data = orjson.dumps(body)
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + data)
    await front.until(lambda: len(front.engine.runs) == 1)
    return reader, writer
