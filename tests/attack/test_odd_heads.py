"""Heads and numbers that are no text and no number anybody meant: each is an answer in JSON, and none a 500."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest

from bequest.server.access.auth import _is_loopback_name
from bequest.server.operation.logs import JsonFormatter, TextFormatter
from tests.attack.conftest import Victim


async def _raw(victim: Victim, request: bytes) -> tuple[int, dict[str, dict[str, str]]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", victim.server.port)
    writer.write(request)
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), orjson.loads(body)


@pytest.mark.parametrize(
    "line", [b"Content-Type: \xff\xfe", b"Content-Type: application/json\r\nContent-Encoding: \xff\xfe"]
)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize", b"/v1/responses"])
async def test_headers_that_are_no_text(fake: Victim, line: bytes, path: bytes) -> None:
    request = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\nContent-Length: 2\r\n\r\n{}"
    status, content = await _raw(fake, request)
    assert status == 415 and content["error"]["code"] == "unsupported_media_type", content
    assert "\\udcff" in content["error"]["message"]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs", "min_tokens", "n", "top_k", "seed", "priority"])
async def test_integers_of_any_length(fake: Victim, field: str) -> None:
    for digits in (30, 400, 4000):
        body = b'{"prompt":"a","%b":%b}' % (field.encode(), b"9" * digits)
        answer, content = await fake.front.post("/v1/completions", body)
        assert answer.status in (200, 400), content
        assert field == "top_k" or content["error"]["param"] == field, content


@pytest.mark.parametrize("host", ["localhost:80@evil.com", "localhost@evil.com", "127.0.0.1:1:2", "[::1]evil.com"])
def test_a_host_that_only_begins_like_ours(host: str) -> None:
    assert not _is_loopback_name(host)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:80", "a.localhost.", None])
def test_a_host_of_ours(host: str | None) -> None:
    assert _is_loopback_name(host)


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_line_of_the_log_is_one_line(formatter: TextFormatter | JsonFormatter) -> None:
    text = "refused\n12:00:00 I forged \x1b[31m\u2028\udcff"
    line = formatter.format(logging.makeLogRecord({"msg": "%s", "args": (text,), "levelname": "INFO"}))
    assert len(line.splitlines()) == 1 and "\x1b" not in line


async def test_a_client_that_closes_its_side_at_once(fake: Victim) -> None:
    """On the product's own event loop, which tells of the end of a stream in its own way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", fake.server.port)
    body = b'{"prompt":"a","max_tokens":1}'
    head = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head + body)
    writer.write_eof()
    async with asyncio.timeout(20):
        answer = await reader.read()
    assert b"HTTP/1.1 200 OK" in answer and b'"finish_reason"' in answer
    writer.close()
