"""Parts of stored files: what clients send that go on with a broken download, and what they send by mistake."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from tests.server.conftest import Starter
from tests.server.front import Front

CONTENT = b"0123456789"


@pytest.fixture
async def front(start: Starter, tmp_path: Path) -> Front:
    front: Front = await start(files_dir=str(tmp_path / "files"))
    return front


async def fetch(front: Front, **headers: str) -> tuple[aiohttp.ClientResponse, bytes]:
    file = await front.strict().files.create(file=("x.jsonl", CONTENT), purpose="batch")
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{front.url}/v1/files/{file.id}/content", headers=sent) as answer,
    ):
        return answer, await answer.read()


@pytest.mark.parametrize(
    "asked, told, part",
    [
        ("bytes=0-3", "bytes 0-3/10", b"0123"),
        ("Bytes=8-", "bytes 8-9/10", b"89"),
        ("bytes=-3", "bytes 7-9/10", b"789"),
        ("bytes=-30", "bytes 0-9/10", CONTENT),
        ("bytes=9-999", "bytes 9-9/10", b"9"),
    ],
)
async def test_a_part(front: Front, asked: str, told: str, part: bytes) -> None:
    answer, content = await fetch(front, Range=asked)
    assert (answer.status, answer.headers["Content-Range"], content) == (206, told, part)
    assert answer.headers["X-Request-Id"] and "attachment" in answer.headers["Content-Disposition"]


@pytest.mark.parametrize(
    "asked", ["lines=0-3", "bytes=5-3", "bytes=-", "bytes=0-1,4-5", "bytes=x", "0-3", "", "bytes=²-"]
)
async def test_what_is_no_range_gives_the_whole(front: Front, asked: str) -> None:
    answer, content = await fetch(front, Range=asked)
    assert (answer.status, content) == (200, CONTENT) and "Content-Range" not in answer.headers


async def test_a_part_of_another_version_gives_the_whole(front: Front) -> None:
    for version in ('"another"', 'W/"weak"', "Thu, 01 Jan 1970 00:00:00 GMT"):
        answer, content = await fetch(front, Range="bytes=5-", If_Range=version)
        assert (answer.status, content) == (200, CONTENT)
        answer, content = await fetch(front, Range="bytes=10-", If_Range=version)
        assert (answer.status, content) == (200, CONTENT)
    answer, content = await fetch(front, Range="bytes=5-", If_Range="Fri, 01 Jan 2100 00:00:00 GMT")
    assert (answer.status, content) == (206, CONTENT[5:])


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=999-", "bytes=-0"])
async def test_a_part_behind_the_end(front: Front, asked: str) -> None:
    """As whoever goes on with a download asks that was complete."""
    answer, told = await fetch(front, Range=asked)
    assert answer.status == 416 and answer.headers["Content-Range"] == "bytes */10"
    error = json.loads(told)["error"]
    assert error["code"] == "invalid_range" and "10 bytes" in error["message"] and error["details"] == {"bytes": 10}
