"""A server that is one of several: tags in its ids, and what it answers for what others have."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bequest.engine.config import ServerConfig
from bequest.server.wire.names import new_id, part_id
from bequest.server.wire.replicas import tag_of
from tests.server.conftest import LEASES, Starter
from tests.server.front import Front
from tests.server.test_batches import created, ended, jsonl, line, output
from tests.server.test_moved_responses import begin, say

FOREIGN = "cmpl-r2-" + "0" * 32
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("prefix", ["cmpl-", "chatcmpl-", "resp_", "msg_", "hs-", "file-", "batch_"])
def test_a_tag_is_read_back_from_an_id(prefix: str) -> None:
    assert tag_of(new_id(prefix, "r1")) == "r1"
    assert tag_of(part_id(new_id(prefix, "r1"), 3)) == "r1"
    assert tag_of(new_id(prefix)) is None
    assert tag_of(part_id(new_id(prefix), 3)) is None


@pytest.mark.parametrize("name", ["mars", "r1", "job-r1-7", "cmpl-r1-", "a-r1-" + "0" * 31, "A-r1-" + "0" * 32])
def test_a_clients_name_has_no_tag(name: str) -> None:
    assert tag_of(name) is None


@pytest.mark.parametrize("tag", ["", "R1", "a-b", "x" * 17, "é"])
def test_a_tag_is_a_short_word(tag: str) -> None:
    with pytest.raises(ValueError, match="replica_tag must be 1 to 16 characters"):
        ServerConfig(replica_tag=tag)


async def test_ids_and_answers_carry_the_tag(start: Starter) -> None:
    front = await start(replica_tag="r1")
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/responses", {"input": "x"}),
    ):
        answer, content = await front.post(path, {**body, "max_tokens": 1} if "input" not in body else body)
        assert answer.status == 200, content
        assert tag_of(content["id"]) == "r1"
        assert answer.headers["X-Bequest-Replica"] == "r1"


async def test_without_a_tag_nothing_says_so(start: Starter) -> None:
    front = await start()
    answer, content = await front.post("/v1/completions", {"prompt": "x", "request_id": "mars"})
    assert [name for name in answer.headers if name.startswith("X-Bequest")] == ["X-Bequest-Record"]
    assert tag_of(content["id"]) is None
    answer, content = await front.post("/v1/completions", {"continuation_of": FOREIGN})
    assert (answer.status, content["error"]["code"]) == (404, "continuation_parent_not_found")


async def test_the_name_of_a_request_is_in_a_header(start: Starter) -> None:
    """Also of a stream, and not of a request that nobody can find by it."""
    front = await start(replica_tag="r1")
    answer, _ = await front.post("/v1/completions", {"prompt": "x", "request_id": "mars"})
    assert answer.headers["X-Bequest-Name"] == "mars"
    body = {"prompt": "x", "request_id": "venus", "stream": True}
    answer, _ = await front.post("/v1/completions", body)
    assert answer.headers["X-Bequest-Name"] == "venus"
    answer, _ = await front.post("/v1/completions", {"prompt": "x", "request_id": "m", "store": False})
    assert "X-Bequest-Name" not in answer.headers
    answer, _ = await front.post("/v1/completions", {"prompt": "x"})
    assert "X-Bequest-Name" not in answer.headers


@pytest.mark.parametrize("tag", [None, "r1"])
async def test_the_record_of_an_answer_is_in_a_header(start: Starter, tag: str | None) -> None:
    """Whatever the client calls its request; of a stream, too, and of nothing that leaves no record."""
    front = await start(replica_tag=tag)
    named = {"X-Request-Id": "trace-1"}
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
        ("/v1/hidden_states", {"input": "x"}),
    ):
        answer, content = await front.post(path, body, headers=named)
        assert answer.status == 200 and answer.headers["X-Bequest-Record"] == content["id"], content
    answer, _ = await front.post("/v1/completions", {"prompt": "x", "stream": True}, headers=named)
    assert answer.headers["X-Bequest-Record"] == front.engine.submitted[-1].id
    for path, body in (
        ("/v1/completions", {"prompt": "x", "store": False}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        answer, content = await front.post(path, body)
        assert "X-Bequest-Record" not in answer.headers, content


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"continuation_of": FOREIGN, "prompt": "x"}),
        ("/v1/completions", {"continuation_of": FOREIGN, "prompt": "x", "continuation_fallback": "whole"}),
        ("/v1/chat/completions", {"continuation_of": FOREIGN, "messages": HELLO}),
        ("/v1/hidden_states", {"continuation_of": FOREIGN}),
        ("/v1/responses", {"previous_response_id": FOREIGN, "input": "x"}),
        ("/v1/responses/input_tokens", {"previous_response_id": FOREIGN, "input": "x"}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": FOREIGN}]}),
        ("/v1/batches", {"input_file_id": FOREIGN, "endpoint": "/v1/completions", "completion_window": "24h"}),
    ],
)
async def test_a_parent_of_another_replica_is_misdirected(
    start: Starter, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """A fallback too: the owner has the lease, and need not compute anything again. Nothing was submitted."""
    front = await start(replica_tag="r1", files_dir=str(tmp_path))
    answer, content = await front.post(path, body)
    assert answer.status == 421, content
    assert answer.headers["X-Bequest-Replica"] == answer.headers["X-Bequest-Owner"] == "r2"
    error = content["error"]
    assert error["code"] == "wrong_replica" and error["details"] == {"replica": "r2"}
    assert f"'{FOREIGN}' belongs to the replica 'r2'" in error["message"]
    assert not front.engine.submitted


async def test_a_line_of_a_batch_says_who_has_its_parent(start: Starter, tmp_path: Path) -> None:
    """It said that there never was one."""
    front = await start(replica_tag="r1", files_dir=str(tmp_path))
    data = jsonl([line("1", {"continuation_of": FOREIGN, "prompt": "x"}, "/v1/completions")])
    client = front.client()
    batch = await ended(client, await created(client, data, "/v1/completions"))
    told = (await output(client, batch.error_file_id))["1"]["response"]
    assert (told["status_code"], told["body"]["error"]["details"]) == (421, {"replica": "r2"})


async def test_a_line_of_a_batch_finds_what_a_server_left(start: Starter, tmp_path: Path) -> None:
    """As any request does."""
    one = await begin(start, tmp_path / "r1", "one")
    first = await say(one, "hello")
    await one.stop()
    await asyncio.to_thread((tmp_path / "r2").mkdir)
    leases = replace(LEASES, directory=str(tmp_path / "r2"), has_neighbours=True)
    two: Front = await start(leases=leases, replica_tag="r2", files_dir=str(tmp_path / "files"))
    data = jsonl([line("1", {"input": "more", "previous_response_id": first["id"]}, "/v1/responses")])
    client = two.client()
    batch = await ended(client, await created(client, data, "/v1/responses"))
    assert batch.request_counts is not None and batch.request_counts.completed == 1


async def test_an_item_says_who_has_it(start: Starter) -> None:
    front = await start(replica_tag="r1")
    _, told = await front.post("/v1/responses", {"input": "x"})
    assert tag_of(told["output"][0]["id"]) == "r1"


async def test_who_falls_back_does_not_hold_the_parent(start: Starter) -> None:
    """A router would believe it, and send all that come for the parent here."""
    front = await start(replica_tag="r1")
    body = {"continuation_of": "mars", "prompt": "x"}
    answer, content = await front.post("/v1/completions", {**body, "continuation_fallback": "whole"})
    assert answer.status == 200 and "X-Bequest-Holds" not in answer.headers, content
    await front.post("/v1/completions", {"prompt": "x", "request_id": "mars"})
    answer, _ = await front.post("/v1/completions", body)
    assert answer.headers["X-Bequest-Holds"] == "mars"


@pytest.mark.parametrize(
    "method, path",
    [
        ("GET", f"/v1/continuations/{FOREIGN}"),
        ("DELETE", f"/v1/continuations/{FOREIGN}"),
        ("GET", f"/v1/responses/{FOREIGN}"),
        ("DELETE", f"/v1/responses/{FOREIGN}"),
        ("GET", f"/v1/files/{FOREIGN}"),
        ("GET", f"/v1/batches/{FOREIGN}"),
    ],
)
async def test_what_others_keep_is_misdirected(start: Starter, tmp_path: Path, method: str, path: str) -> None:
    front = await start(replica_tag="r1", files_dir=str(tmp_path))
    async with front.http.request(method, front.url + path) as answer:
        assert (answer.status, answer.headers["X-Bequest-Replica"], answer.headers["X-Bequest-Owner"]) == (
            421,
            "r2",
            "r2",
        )


async def test_one_own_id_that_is_unknown_is_a_404(start: Starter) -> None:
    front = await start(replica_tag="r2")
    answer, content = await front.post("/v1/completions", {"continuation_of": FOREIGN})
    assert (answer.status, content["error"]["code"]) == (404, "continuation_parent_not_found")
    answer, content = await front.post("/v1/completions", {"continuation_of": "mars"})
    assert (answer.status, content["error"]["code"]) == (404, "continuation_parent_not_found")


async def test_an_owner_that_is_gone_is_a_404_or_the_fallback(start: Starter) -> None:
    """The router says so: nobody else could have the lease."""
    front = await start(replica_tag="r1")
    gone = {"X-Bequest-Owner": "gone"}
    answer, content = await front.post("/v1/completions", {"continuation_of": FOREIGN}, headers=gone)
    assert (answer.status, content["error"]["code"]) == (404, "continuation_parent_not_found")
    body = {"continuation_of": FOREIGN, "continuation_fallback": "whole", "prompt": "x"}
    answer, content = await front.post("/v1/completions", body, headers=gone)
    assert answer.status == 200, content


async def test_the_parent_in_a_header_is_that_of_the_body(start: Starter) -> None:
    front = await start(replica_tag="r1")
    _, parent = await front.post("/v1/completions", {"prompt": "x", "request_id": "mars"})

    async def ask(body: dict[str, Any], named: str) -> tuple[aiohttp.ClientResponse, Any]:
        answer: tuple[aiohttp.ClientResponse, Any] = await front.post(
            "/v1/completions", body, headers={"X-Bequest-Parent": named}
        )
        return answer

    answer, content = await ask({"continuation_of": "mars", "prompt": "y"}, "mars")
    assert answer.status == 200, content
    for body, said in (
        ({"continuation_of": parent["id"], "prompt": "y"}, f"the body names '{parent['id']}'"),
        ({"prompt": "y"}, "the body names none"),
    ):
        answer, content = await ask(body, "mars")
        assert (answer.status, content["error"]["param"]) == (400, "X-Bequest-Parent")
        assert content["error"]["message"] == f"The header X-Bequest-Parent names 'mars', but {said}."
