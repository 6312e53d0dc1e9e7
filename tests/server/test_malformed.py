"""Bytes that are no request, or one whose body does not hold what its head says: told apart, and told why."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from codecs import BOM_UTF8

import orjson
import pytest

from tests.server.front import Front

BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
PACKED = gzip.compress(BODY, mtime=0)  # a time would be in the name of the test
OTHER_SUM = PACKED[:-8] + bytes(4) + PACKED[-4:]


async def everything(front: Front, data: bytes) -> tuple[int, dict[str, str]]:
    """Status and error of the answer; the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(data)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), orjson.loads(content).get("error", {})


def with_length(body: bytes, *headers: bytes) -> bytes:
    return HEAD + b"".join(header + b"\r\n" for header in headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "encoding, body",
    [
        (b"gzip", PACKED),
        (b"x-gzip", PACKED),
        (b"GZIP", PACKED),
        (b"deflate", zlib.compress(BODY)),
        (b"identity", BODY),
        (b"gzip", gzip.compress(BODY + b" " * 500_000, mtime=0)),
    ],
)
async def test_bodies_may_be_compressed(front: Front, encoding: bytes, body: bytes) -> None:
    status, error = await everything(front, with_length(body, b"Content-Encoding: " + encoding))
    assert status == 200, error


@pytest.mark.parametrize(
    "body",
    [PACKED[:-1], PACKED[:-4], PACKED[:-8], PACKED[:-12], PACKED[:3], PACKED + b"x", PACKED + PACKED, BODY, OTHER_SUM],
)
async def test_a_compressed_body_that_is_cut_short_or_wrong(front: Front, body: bytes) -> None:
    status, error = await everything(front, with_length(body, b"Content-Encoding: gzip"))
    assert status == 400 and error["code"] == "invalid_json" and not front.engine.submitted


async def test_what_a_few_bytes_become_is_bounded(front: Front) -> None:
    bomb = gzip.compress(bytes(40 << 20))
    status, error = await everything(front, with_length(bomb, b"Content-Encoding: gzip"))
    assert status == 413 and error["code"] == "request_too_large"


@pytest.mark.parametrize("size", [0, 20_000, 2_000_000], ids=["small", "large", "in pieces"])
@pytest.mark.parametrize("marks, taken", [(1, True), (2, False)])
async def test_a_body_may_begin_with_the_mark_of_utf_8(front: Front, size: int, marks: int, taken: bool) -> None:
    """Windows' programs write it; RFC 8259 lets whoever reads JSON pass over it."""
    body = json.dumps({"prompt": "a", "max_tokens": 2, "metadata": {"x": "😀" * (size // 12)}}).encode()
    status, error = await everything(front, with_length(BOM_UTF8 * marks + body))
    assert status == (200 if taken else 400), error
    assert taken or error["code"] == "invalid_json"


async def test_a_body_of_nothing_but_the_mark_is_empty(front: Front) -> None:
    status, error = await everything(front, with_length(BOM_UTF8))
    assert status == 400 and "is empty" in error["message"]


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress"])
async def test_encodings_that_are_not_read(front: Front, encoding: str) -> None:
    status, error = await everything(front, with_length(BODY, f"Content-Encoding: {encoding}".encode()))
    assert status == 415 and error["code"] == "unsupported_media_type" and encoding in error["message"]


@pytest.mark.parametrize(
    "data, status, words",
    [
        (HEAD + b"X-A: " + b"a" * 65536 + b"\r\n\r\n", 431, "longer than 8190 bytes"),
        (b"GET /" + b"a" * 65536 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, "longer than 8190 bytes"),
        (bytes.fromhex("16030100a5010000a1030352362c1012cf2362"), 400, "HTTPS traffic on an HTTP port"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not valid HTTP/1.1"),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "not valid HTTP/1.1"),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400, "not valid HTTP/1.1"),
        (HEAD + b"Content-Length: -2\r\n\r\n{}", 400, "not valid HTTP/1.1"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400, "not valid HTTP/1.1"),
        (HEAD + b"Bad Header: x\r\n\r\n", 400, "not valid HTTP/1.1: Invalid header token"),
    ],
)
async def test_what_is_no_request(front: Front, data: bytes, status: int, words: str) -> None:
    told, error = await everything(front, data)
    assert told == status and words in error["message"], error
    assert not front.engine.submitted


async def test_requests_behind_each_other_are_answered_in_their_order(front: Front) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    keep = HEAD.replace(b"Connection: close\r\n", b"")
    asked = [keep + b"X-Request-Id: r%d\r\nContent-Length: %d\r\n\r\n" % (i, len(BODY)) + BODY for i in range(5)]
    writer.write(b"".join(asked))
    for number in range(5):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"X-Request-Id: r%d\r\n" % number in head
        await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
    writer.close()
