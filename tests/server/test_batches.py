"""Files and batches, with the official client over a real socket: one answer per line, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from bequest.engine.types import ChoiceDelta, Delta, Request, Usage
from bequest.server.batches.answering import PRIORITY
from bequest.server.stores import batches, disk, files
from bequest.server.stores.disk import LineLog, write_durably
from bequest.server.stores.files import StoredFile
from tests.server.conftest import Starter
from tests.server.front import Front
from tests.server.test_keys import bearer, key_file

MESSAGES = [{"role": "user", "content": "x"}]
CHAT = "/v1/chat/completions"


def line(custom_id: str, body: dict[str, Any] | None = None, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"messages": MESSAGES}, **fields}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def created(client: openai.AsyncOpenAI, data: bytes, endpoint: Any = CHAT, **options: Any) -> Batch:
    file = await client.files.create(file=("requests.jsonl", data), purpose="batch")
    options = {"completion_window": "24h", **options}
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, **options)


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    for _ in range(5000):
        found = await client.batches.retrieve(batch.id)
        if found.status in ("completed", "failed", "expired", "cancelled"):
            return found
        await asyncio.sleep(0.002)
    raise AssertionError(found)


async def output(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """By custom_id, of which none may be there twice."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture
async def front(start: Starter, tmp_path: Path) -> Front:
    front: Front = await start(files_dir=str(tmp_path / "files"))
    return front


# --- files -------------------------------------------------------------------------------------------------------


async def test_the_life_of_a_file(front: Front) -> None:
    client = front.strict()
    data = jsonl([line("a")])
    file = await client.files.create(
        file=("früh.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.id.startswith("file-") and file.filename == "früh.jsonl" and file.purpose == "batch"
    assert file.bytes == len(data) and file.expires_at == file.created_at + 3600
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).read() == data
    other = await client.files.create(file=data, purpose="batch")
    assert other.filename
    assert [found.id async for found in client.files.list(limit=1)] == [other.id, file.id]
    assert [found.id async for found in client.files.list(purpose="user_data")] == []
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        await client.files.content(file.id)
    assert caught.value.code == "file_not_found"


@pytest.mark.parametrize(
    "options, status, param",
    [
        ({"purpose": "fine-tune"}, 400, "purpose"),
        ({"file": b""}, 400, "file"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, 400, "expires_after.seconds"),
        ({"expires_after": {"anchor": "later", "seconds": 3600}}, 400, "expires_after.anchor"),
        ({"file": b"x" * (1 << 20)}, 413, None),
    ],
)
async def test_uploads_that_are_refused(
    start: Starter, tmp_path: Path, options: dict[str, Any], status: int, param: str | None
) -> None:
    front = await start(files_dir=str(tmp_path), max_file_mb=0.5)
    with pytest.raises(openai.APIStatusError) as caught:
        await front.client().files.create(**{"file": b"{}", "purpose": "batch", **options})
    assert caught.value.status_code == status and caught.value.param == param
    assert [path.name for path in (tmp_path / "files").iterdir()] == []
    assert not front.app_disk.files.budget.used_bytes


async def test_without_a_directory(start: Starter) -> None:
    front = await start()
    for call in (front.client().files.list(), front.client().batches.list()):
        with pytest.raises(openai.NotFoundError, match="--files-dir") as caught:
            await call
        assert caught.value.code == "files_disabled"
    with pytest.raises(openai.NotFoundError, match="--files-dir"):
        await front.client().files.create(file=b"{}", purpose="batch")


async def test_the_directory_is_full(start: Starter, tmp_path: Path) -> None:
    front = await start(files_dir=str(tmp_path), files_mb=1)
    client = front.client(max_retries=2)
    file = await client.files.create(file=b"x" * 900_000, purpose="batch")
    with pytest.raises(openai.RateLimitError, match="Delete a file first") as caught:
        await client.files.create(file=b"x" * 900_000, purpose="batch")
    assert caught.value.code == "files_full"
    assert caught.value.request.headers["x-stainless-retry-count"] == "0", "trying again would be in vain"
    await client.files.delete(file.id)
    await client.files.create(file=b"x" * 900_000, purpose="batch")


async def test_a_client_that_leaves_in_the_middle_of_an_upload(front: Front, tmp_path: Path) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 600_000
    writer.write(head + b"Content-Length: 1000000\r\n\r\n" + part)
    await writer.drain()
    await front.until(lambda: front.app_disk.files.budget.used_bytes > 0)
    writer.close()
    await front.until(lambda: not front.app_disk.files.budget.used_bytes)
    await front.until(lambda: not list((tmp_path / "files" / "files").iterdir()))


async def test_tenants_see_their_own_alone(start: Starter, tmp_path: Path) -> None:
    keys = key_file(tmp_path, '[[keys]]\nname = "a"\nkey = "a"\n[[keys]]\nname = "b"\nkey = "b"\n')
    front = await start(files_dir=str(tmp_path / "files"), api_key_file=keys)
    mine, other = front.client(api_key="a"), front.client(api_key="b")
    batch = await ended(mine, await created(mine, jsonl([line("1")])))
    assert batch.status == "completed" and batch.output_file_id
    for call in (
        other.files.retrieve(batch.output_file_id),
        other.files.content(batch.input_file_id),
        other.files.delete(batch.input_file_id),
        other.batches.retrieve(batch.id),
        other.batches.cancel(batch.id),
        other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    assert [file async for file in other.files.list()] == []
    assert [found async for found in other.batches.list()] == []
    answer, _ = await front.get("/v1/files", headers=bearer("c"))
    assert answer.status == 401


# --- batches -----------------------------------------------------------------------------------------------------

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "model": "fake/model"},
    "/v1/completions": {"prompt": ["a", "b"], "n": 2, "logprobs": 1},
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": ["x", "y"]},
}


@pytest.mark.parametrize("endpoint", BODIES)
async def test_answers_are_those_of_the_endpoint(front: Front, endpoint: str) -> None:
    client = front.strict()
    body = BODIES[endpoint]
    wrong = {"temperature": -1} if endpoint != "/v1/embeddings" else {"dimensions": -1}
    data = jsonl([line("good", body, endpoint), line("bad", {**body, **wrong}, endpoint), line("x", body, endpoint)])
    begun = await created(client, data, endpoint, metadata={"for": "test"})
    assert begun.status == "validating" and begun.metadata == {"for": "test"}
    batch = await ended(client, begun)
    assert batch.status == "completed" and batch.request_counts is not None and batch.usage is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    good = await output(client, batch.output_file_id)
    assert good.keys() == {"good", "x"} and good["good"]["error"] is None
    response = good["good"]["response"]
    assert response["status_code"] == 200 and response["request_id"]
    _, plain = await front.post(endpoint, {**body, "store": False} if "input" not in body else body)
    assert response["body"].keys() == plain.keys()
    told = response["body"]["usage"]
    assert told["total_tokens"] == plain["usage"]["total_tokens"]
    assert batch.usage.total_tokens == 2 * told["total_tokens"]
    bad = (await output(client, batch.error_file_id))["bad"]["response"]
    assert bad["status_code"] == 400 and bad["body"]["error"]["param"] == next(iter(wrong))
    assert all(request.priority == PRIORITY for request in front.engine.submitted[:2])
    assert [found.id async for found in client.batches.list()] == [batch.id]
    await front.until(lambda: "bequest:batches_open 0.0" in metrics(front))  # once the disk has its end, too
    told_metrics = metrics(front)
    assert 'bequest:batch_lines_total{outcome="completed"} 2.0' in told_metrics
    assert 'bequest:batch_lines_total{outcome="failed"} 1.0' in told_metrics
    assert 'bequest:batches_total{status="completed"} 1.0' in told_metrics


def metrics(front: Front) -> list[str]:
    return front.metrics.exposition()[0].decode().splitlines()


async def test_lines_leave_no_records_unless_they_say_so(front: Front) -> None:
    client = front.client()
    lines = [line("a"), line("b", {"messages": MESSAGES, "store": True}), line("c", {"input": "x"}, url=CHAT)]
    await ended(client, await created(client, jsonl(lines)))
    kept = [request.terms.keep_record for request in front.engine.submitted]
    assert sorted(kept) == [False, True]


@pytest.mark.parametrize(
    "body, code",
    [
        ({"messages": MESSAGES, "stream": True}, "unsupported_parameter"),
        ({"messages": MESSAGES, "model": "other"}, "model_not_found"),
        ({"messages": MESSAGES, "priority": 5}, "invalid_value"),
        ({}, "missing_required_parameter"),
    ],
)
async def test_lines_that_fail(front: Front, body: dict[str, Any], code: str) -> None:
    client = front.client()
    given = {"custom_id": "1", "method": "POST", "url": CHAT, "body": body}
    batch = await ended(client, await created(client, jsonl([given])))
    assert batch.status == "completed" and batch.output_file_id is None
    answer = (await output(client, batch.error_file_id))["1"]["response"]
    assert answer["body"]["error"]["code"] == code


async def test_a_line_cannot_be_in_the_background(front: Front) -> None:
    """A line leaves no record unless it says so, and that is not what is wrong with this one."""
    client = front.client()
    given = line("1", {"input": "hi", "background": True}, url="/v1/responses")
    batch = await ended(client, await created(client, jsonl([given]), "/v1/responses"))
    error = (await output(client, batch.error_file_id))["1"]["response"]["body"]["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "background")
    assert "cannot be used in a batch" in error["message"]


async def test_a_field_that_nobody_reads_is_named(front: Front) -> None:
    client = front.client()
    batch = await ended(client, await created(client, jsonl([line("1", {"messages": MESSAGES, "flavour": 1})])))
    assert (await output(client, batch.output_file_id))["1"]["response"]["ignored"] == ["flavour"]


async def test_a_file_may_begin_with_the_mark_of_utf_8(front: Front) -> None:
    client = front.client()
    batch = await ended(client, await created(client, BOM_UTF8 + jsonl([line("a"), line("b")])))
    assert batch.status == "completed" and set(await output(client, batch.output_file_id)) == {"a", "b"}


@pytest.mark.parametrize(
    "data, code, number",
    [
        (b"{\n", "invalid_json_line", 1),
        (b"\n\n", "empty_file", None),
        (b"[]\n", "invalid_json_line", 1),
        (jsonl([line("a"), line("a")]), "duplicate_custom_id", 2),
        (jsonl([line("")]), "invalid_custom_id", 1),
        (jsonl([line("a", url="/v1/completions")]), "invalid_url", 1),
        (jsonl([{**line("a"), "method": "GET"}]), "invalid_method", 1),
        (jsonl([{**line("a"), "body": []}]), "invalid_body", 1),
        (jsonl([line(str(i)) for i in range(4)]), "too_many_lines", None),
        (jsonl([line("a", {"messages": MESSAGES, "user": "x" * 20_000})]), "line_too_large", 1),
    ],
)
async def test_inputs_that_fail(start: Starter, tmp_path: Path, data: bytes, code: str, number: int | None) -> None:
    front = await start(files_dir=str(tmp_path), max_batch_lines=3, max_body_mb=0.01)
    client = front.strict()
    batch = await ended(client, await created(client, data))
    assert batch.status == "failed" and batch.failed_at and batch.errors is not None and batch.errors.data
    assert batch.errors.data[0].code == code and batch.errors.data[0].line == number
    assert not front.engine.submitted


@pytest.mark.parametrize(
    "options, param",
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
async def test_batches_that_are_refused(front: Front, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await created(front.client(), jsonl([line("a")]), **options)
    assert caught.value.param == param


async def test_an_output_is_no_input(front: Front) -> None:
    client = front.client()
    batch = await ended(client, await created(client, jsonl([line("a")])))
    assert batch.output_file_id
    with pytest.raises(openai.BadRequestError) as caught:
        await client.batches.create(input_file_id=batch.output_file_id, endpoint=CHAT, completion_window="24h")
    assert caught.value.param == "input_file_id"


async def test_cancelling(front: Front) -> None:
    client = front.strict(max_retries=2)
    front.engine.held = True
    batch = await created(client, jsonl([line(str(i)) for i in range(200)]))
    await front.until(lambda: len(front.engine.runs) == 64)
    running = {"bequest:batches_open 1.0", "bequest:batch_lines_running 64.0", "bequest:batch_lines_waiting 136.0"}
    assert running <= set(metrics(front))
    with pytest.raises(openai.ConflictError) as caught:
        await client.files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    front.engine.advance(next(iter(front.engine.runs)))
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    done = await ended(client, batch)
    assert done.status == "cancelled" and done.cancelled_at and not front.engine.runs
    good, bad = await output(client, done.output_file_id), await output(client, done.error_file_id)
    assert good.keys() | bad.keys() == {str(i) for i in range(200)} and not good.keys() & bad.keys()
    assert {one["error"]["code"] for one in bad.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError) as caught:
        await client.batches.cancel(batch.id)
    assert caught.value.code == "batch_ended"
    assert (await client.files.delete(batch.input_file_id)).deleted


async def test_a_batch_whose_time_is_up(front: Front) -> None:
    client = front.strict()
    front.engine.held = True
    batch = await created(client, jsonl([line("a"), line("b")]))
    await front.until(lambda: len(front.engine.runs) == 2)
    front.engine.advance(next(iter(front.engine.runs)))
    front.app_disk.files.clock = lambda: time.time() + 2 * 86400
    done = await ended(client, batch)
    assert done.status == "expired"
    good, bad = await output(client, done.output_file_id), await output(client, done.error_file_id)
    assert len(good) == 1 and [one["error"]["code"] for one in bad.values()] == ["batch_expired"]


async def test_a_full_queue_is_waited_for(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bequest.server.batches.running._LOOK", 0.01)
    client = front.client()
    front.engine.full = True
    batch = await created(client, jsonl([line("a"), line("b")]))
    await front.settle()
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    front.engine.full = False
    done = await ended(client, batch)
    assert done.status == "completed" and len(await output(client, done.output_file_id)) == 2


async def test_others_go_first(front: Front) -> None:
    """While a request is open, an eighth of the places is left to lines."""
    client = front.client()
    front.engine.held = True
    live = asyncio.create_task(client.chat.completions.create(model="fake/model", messages=MESSAGES))  # type: ignore[arg-type]
    await front.until(lambda: len(front.engine.runs) == 1)
    await created(client, jsonl([line(str(i)) for i in range(100)]))
    await front.until(lambda: len(front.engine.runs) > 8)
    await front.settle()
    assert len(front.engine.runs) == 1 + 8
    front.engine.advance(next(iter(front.engine.runs)))
    await live
    await front.until(lambda: len(front.engine.runs) == 64)


async def test_tenants_take_turns(start: Starter, tmp_path: Path) -> None:
    keys = key_file(tmp_path, '[[keys]]\nname = "a"\nkey = "a"\n[[keys]]\nname = "b"\nkey = "b"\n')
    front = await start(files_dir=str(tmp_path / "files"), api_key_file=keys, batch_concurrency=8)
    front.engine.held = True
    for name in ("a", "a", "b"):
        await created(front.client(api_key=name), jsonl([line(str(i)) for i in range(50)]))
    await front.until(lambda: len(front.engine.runs) == 8)
    while len(front.engine.submitted) < 60:
        front.engine.advance()
        await front.settle()
    later = [request.tenant for request in front.engine.submitted[20:60]]
    assert abs(later.count("a") - later.count("b")) <= 8


async def test_a_key_that_is_gone_ends_its_batches(start: Starter, tmp_path: Path) -> None:
    one, two = (f'[[keys]]\nname = "{name}"\ntenant = "t"\nkey = "{name}"\n' for name in "ab")
    keys = key_file(tmp_path, one + two)
    front = await start(files_dir=str(tmp_path / "files"), api_key_file=keys, batch_concurrency=1)
    front.engine.held = True
    client = front.client(api_key="b")
    batch = await created(front.client(api_key="a"), jsonl([line(str(i)) for i in range(3)]))
    await front.until(lambda: len(front.engine.runs) == 1)
    key_file(tmp_path, two)
    front.context.gate._keys.reload()
    front.engine.advance()
    done = await ended(client, batch)
    assert done.status == "failed" and done.errors and done.errors.data
    assert done.errors.data[0].code == "invalid_api_key"
    assert len(await output(client, done.output_file_id)) == 1 and len(await output(client, done.error_file_id)) == 2


async def test_answers_that_do_not_fit_end_the_batch(start: Starter, tmp_path: Path) -> None:
    front = await start(files_dir=str(tmp_path), files_mb=0.05, batch_concurrency=1)
    client = front.client()
    batch = await ended(client, await created(client, jsonl([line(str(i)) for i in range(300)])))
    assert batch.status == "failed" and batch.errors and batch.errors.data and batch.request_counts
    assert batch.errors.data[0].code == "files_full"
    good, bad = await output(client, batch.output_file_id), await output(client, batch.error_file_id)
    assert good and len(good) + len(bad) == 300
    assert batch.request_counts.completed == len(good)


def unfinished_writes(directory: Path) -> list[Path]:
    return list(directory.rglob("*.new"))


async def test_a_full_disk_is_waited_for(front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose answers found no room ends when there is some, and not at the next start alone."""

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    client = front.client().with_options(max_retries=0)
    monkeypatch.setattr("bequest.server.batches.running._LOOK", 0.01)
    front.engine.held = True
    batch = await created(client, jsonl([line("a"), line("b")]))
    await front.until(lambda: len(front.engine.runs) == 2)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_all", full)
        patch.setattr(files, "write_all", full)
        for call in (
            client.files.create(file=b"{}", purpose="batch"),
            client.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.InternalServerError, match="No space left") as caught:
                await call
            assert caught.value.status_code == 507 and caught.value.code == "disk_error"
        front.engine.advance()
        [made] = front.app_disk.batches.unfinished()
        await front.until(lambda: bool(made.errors))
        await asyncio.sleep(0.05)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    done = await ended(client, batch)
    assert done.status == "failed" and done.errors and done.errors.data and done.errors.data[0].code == "disk_error"
    assert (await output(client, done.error_file_id)).keys() == {"a", "b"}
    assert not unfinished_writes(tmp_path)


async def test_expired_files_leave(front: Front, tmp_path: Path) -> None:
    client = front.client()
    file = await client.files.create(
        file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    front.app_disk.files.clock = lambda: time.time() + 3601
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)
    assert front.app_disk.files.expired()


async def test_a_client_that_leaves_while_its_batch_is_written(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch may be on the disk, and runs. No two threads write it, though it changes at once."""
    client = front.client()
    file = await client.files.create(file=jsonl([line("a")]), purpose="batch")
    writing, at_once = [], []

    def slow(path: Path, data: bytes) -> None:
        writing.append(path)
        at_once.append(writing.count(path))
        time.sleep(0.05)
        write_durably(path, data)
        writing.remove(path)

    monkeypatch.setattr(batches, "write_durably", slow)
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    raw = await front.connect(body, "/v1/batches")
    await front.until(lambda: bool(writing))
    await raw.close()
    await front.settle()
    tenant = front.app_disk.files._files[file.id].tenant
    await front.until(lambda: bool(front.app_disk.batches.of(tenant)))
    [made] = front.app_disk.batches.of(tenant)
    await front.until(lambda: made.ended)
    assert made.status == "completed"
    for _ in range(3):
        left = asyncio.create_task(front.app_disk.batches.save(made))
        await front.until(lambda: bool(writing))
        left.cancel()
        await front.app_disk.batches.save(made)
    assert set(at_once) == {1}


async def test_files_are_not_deleted_under_a_batch_that_begins(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    client = front.client()
    file = await client.files.create(file=jsonl([line("a")]), purpose="batch")
    monkeypatch.setattr(batches, "MOST_OPEN", 1)
    writing = threading.Event()

    def slow(path: Path, data: bytes) -> None:
        writing.set()
        time.sleep(0.05)
        write_durably(path, data)

    monkeypatch.setattr(batches, "write_durably", slow)
    options: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    making = asyncio.create_task(client.batches.create(**options))
    await front.until(writing.is_set)
    with pytest.raises(openai.ConflictError):
        await client.files.delete(file.id)
    with pytest.raises(openai.RateLimitError):
        await client.batches.create(**options)
    assert (await ended(client, await making)).status == "completed"


async def test_a_client_that_leaves_while_its_file_is_deleted(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its room is free."""
    file = await front.client().files.create(file=jsonl([line("a")]), purpose="batch")
    files = front.app_disk.files
    remove = files._remove
    removing = threading.Event()

    def slow(gone: StoredFile) -> None:
        removing.set()
        time.sleep(0.05)
        remove(gone)

    monkeypatch.setattr(files, "_remove", slow)
    deleting = asyncio.create_task(front.http.delete(f"{front.url}/v1/files/{file.id}"))
    await front.until(removing.is_set)
    deleting.cancel()
    await front.until(lambda: files.budget.used_bytes == 0)


async def test_a_file_that_the_disk_does_not_let_go_is_still_there(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, files = front.client(), front.app_disk.files
    first, second = [await client.files.create(file=jsonl([line("a")]), purpose="batch") for _ in range(2)]

    def broken(gone: StoredFile) -> None:
        raise OSError("the disk is read-only")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_remove", broken)
        with pytest.raises(openai.InternalServerError):
            await client.with_options(max_retries=0).files.delete(first.id)
    assert {file.id async for file in client.files.list()} == {first.id, second.id}
    for file in (first, second):
        assert (await client.files.delete(file.id)).deleted
    assert files.budget.used_bytes == 0


# --- restarts ----------------------------------------------------------------------------------------------------


def slow_words(request: Request) -> Iterator[Delta]:
    yield Delta(
        request.id,
        (ChoiceDelta(0, "word", (1,), finish_reason="length"),),
        first=True,
        usage=Usage(3, 1, 0),
    )


async def test_a_batch_goes_on_after_a_restart(start: Starter, tmp_path: Path) -> None:
    first = await start(files_dir=str(tmp_path), batch_concurrency=4)
    first.engine.script, first.engine.held = slow_words, True
    client = first.client()
    batch = await created(client, jsonl([line(str(i)) for i in range(10)]))
    for _ in range(2):
        await first.until(lambda: len(first.engine.runs) == 4)
        first.engine.advance()
    await first.until(lambda: len(first.engine.runs) == 2)
    await first.stop()
    assert not first.engine.runs, "lines that ran were given up"
    second = await start(files_dir=str(tmp_path), max_batch_lines=9)
    second.engine.script = slow_words
    client = second.strict()
    done = await ended(client, batch)
    assert done.status == "completed" and done.request_counts and done.request_counts.completed == 10
    assert done.usage and done.usage.total_tokens == 40
    assert len(second.engine.submitted) == 2, "what was answered is not run again"
    assert (await output(client, done.output_file_id)).keys() == {str(i) for i in range(10)}


async def test_a_batch_whose_file_expires_goes_on_after_a_restart(start: Starter, tmp_path: Path) -> None:
    first = await start(files_dir=str(tmp_path), batch_concurrency=1)
    first.engine.script, first.engine.held = slow_words, True
    client = first.client()
    file = await client.files.create(
        file=jsonl([line("a"), line("b")]), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    await first.until(lambda: len(first.engine.runs) == 1)
    first.engine.advance()
    await first.until(lambda: len(first.engine.submitted) == 2)
    await first.stop()
    about = tmp_path / "files" / f"{file.id}.json"
    about.write_text(json.dumps({**json.loads(about.read_bytes()), "expires_at": 1}))
    second = await start(files_dir=str(tmp_path))
    second.engine.script = slow_words
    client = second.client()
    done = await ended(client, batch)
    assert done.status == "completed" and done.request_counts and done.request_counts.completed == 2
    assert (await output(client, done.output_file_id)).keys() == {"a", "b"}
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)


async def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "log")
    log.append([b"one", b"two"])
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"half')
    again = LineLog(tmp_path / "log")
    assert list(again.recover()) == [b"one", b"two"]
    again.append([b"three"])
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nthree\n"


async def test_one_server_has_the_directory(start: Starter, tmp_path: Path) -> None:
    await start(files_dir=str(tmp_path))
    with pytest.raises(OSError, match="another server uses it"):
        await start(files_dir=str(tmp_path))
