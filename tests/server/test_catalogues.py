"""/v1/catalogues: uploads in three forms, what is wrong with them, who sees what, and the memory they may take."""

from __future__ import annotations

import asyncio
import gzip
import random
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import orjson
import pytest

from bequest.engine.types.catalogue import Catalogue
from tests.server.conftest import Starter
from tests.server.fakes import EOS
from tests.server.front import Front

LINES = {"Content-Type": "application/x-ndjson"}
ARRAY = {"Content-Type": "application/octet-stream"}
ITEMS = [[10, 11, 12], [10, 11], [10, 13, 14], [200], [10, 11, 12]]
PATH = "/v1/catalogues"


def padded(items: list[list[int]], width: int) -> bytes:
    rows = np.full((len(items), width), -1, "<i4")
    for row, item in zip(rows, items, strict=True):
        row[: len(item)] = item
    return rows.tobytes()


def lines(items: list[Any]) -> bytes:
    return b"\n".join(map(orjson.dumps, items))


async def uploaded(front: Front, name: str, form: str, items: list[list[int]], query: str = "") -> dict[str, Any]:
    if form == "json":
        answer, content = await front.post(f"{PATH}?{query}", {"name": name, "items": items})
    elif form == "lines":
        answer, content = await front.post(f"{PATH}?name={name}&{query}", lines(items), headers=LINES)
    else:
        body = padded(items, max(map(len, items)))
        answer, content = await front.post(
            f"{PATH}?name={name}&width={max(map(len, items))}&{query}", body, headers=ARRAY
        )
    assert answer.status == 200, content
    assert isinstance(content, dict)
    return content


async def refused(front: Front, query: str, body: Any, headers: dict[str, str] | None = None) -> dict[str, Any]:
    answer, content = await front.post(PATH + query, body, headers=headers or {})
    assert answer.status >= 400, content
    _, listed = await front.get(PATH)
    assert listed["data"] == [], "nothing is left of it"
    return {"status": answer.status, **content["error"]}


async def tree(front: Front, name: str) -> Catalogue:
    """The catalogue as the engine gets it."""
    answer, content = await front.post("/v1/completions", {"prompt": "a", "catalogue": name})
    assert answer.status == 200, content
    found = front.engine.submitted[-1].params.catalogue
    assert found is not None
    return found


def members(catalogue: Catalogue, node: int = 0, before: tuple[int, ...] = ()) -> set[tuple[int, ...]]:
    found = {before} if node and catalogue.is_terminal(node) else set()
    for token in catalogue.children(node).tolist():
        found |= members(catalogue, catalogue.child(node, token), (*before, token))
    return found


@pytest.mark.parametrize("form", ["json", "lines", "array"])
async def test_the_three_forms(front: Front, form: str) -> None:
    made = await uploaded(front, "shop.v1:a-b_c", form, ITEMS)
    assert made["created_at"] > 1.7e9 and made["bytes"] > 0
    shown = {name: made[name] for name in ("id", "name", "object", "items", "depth")}
    assert shown == {"id": "shop.v1:a-b_c", "name": "shop.v1:a-b_c", "object": "catalogue", "items": 4, "depth": 3}
    assert members(await tree(front, "shop.v1:a-b_c")) == set(map(tuple, ITEMS))
    assert (await front.get(f"{PATH}/shop.v1:a-b_c"))[1] == made
    assert (await front.get(PATH))[1] == {"object": "list", "data": [made]}
    async with front.http.delete(f"{front.url}{PATH}/shop.v1:a-b_c") as answer:
        deleted = await answer.json()
    assert deleted == {"id": "shop.v1:a-b_c", "name": "shop.v1:a-b_c", "object": "catalogue", "deleted": True}
    for request in (
        front.get(f"{PATH}/shop.v1:a-b_c"),
        front.post("/v1/completions", {"prompt": "a", "catalogue": "x"}),
    ):
        answer, content = await request
        assert answer.status == 404 and content["error"]["code"] == "catalogue_not_found"


@pytest.mark.parametrize("form", ["json", "lines", "array"])
async def test_many_random_items(front: Front, form: str) -> None:
    """Pieces of the forms end anywhere in an item."""
    draw = random.Random(form)
    items = [[draw.randrange(EOS) for _ in range(draw.randint(1, 4))] for _ in range(70_000)]
    made = await uploaded(front, "many", form, items)
    assert made["items"] == len(set(map(tuple, items))) and made["depth"] == 4
    catalogue = await tree(front, "many")
    assert members(catalogue) == set(map(tuple, items))


async def test_lines_hold_lists_objects_and_texts(front: Front) -> None:
    body = b'[65, 66]\r\n\n{"tokens": [67]}\n  "de"\n\n"fg"'
    answer, content = await front.post(f"{PATH}?name=x", body, headers=LINES)
    assert answer.status == 200, content
    assert members(await tree(front, "x")) == {(65, 66), (67,), tuple(b"de"), tuple(b"fg")}
    await front.post(PATH, {"name": "y", "items": ["de", {"tokens": [67]}, [1]]})
    assert members(await tree(front, "y")) == {(67,), tuple(b"de"), (1,)}


async def test_chunked_and_compressed_uploads(front: Front) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        body = padded(ITEMS, 3)
        for begin in range(0, len(body), 7):
            yield body[begin : begin + 7]

    async with front.http.post(f"{front.url}{PATH}?name=a&width=3", data=pieces(), headers=ARRAY) as answer:
        assert answer.status == 200, await answer.text()
    headers = {**ARRAY, "Content-Encoding": "gzip"}
    answer, content = await front.post(f"{PATH}?name=b&width=3", gzip.compress(padded(ITEMS, 3)), headers=headers)
    assert answer.status == 200, content
    assert members(await tree(front, "a")) == members(await tree(front, "b")) == set(map(tuple, ITEMS))


async def test_curl_waits_for_a_continue(front: Front) -> None:
    body = padded(ITEMS, 3)

    async def status_of(query: str, length: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        head = f"POST {PATH}{query} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {ARRAY['Content-Type']}\r\n"
        writer.write(f"{head}Expect: 100-continue\r\nContent-Length: {length}\r\n\r\n".encode())
        status = await reader.readline()
        if b" 100 " in status:
            await reader.readline()
            writer.write(body)
            status = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return status.split()[1]

    assert await status_of("?name=a&width=3", len(body)) == b"200"
    assert await status_of("?name=b&width=3", 3 << 30) == b"413"
    assert await status_of("?name=b", len(body)) == b"400"


WRONG_ITEMS = [
    ([[1], [2, 3], [], [4]], 2, "items[2]: an item has at least one token."),
    ([[1], [2, 258]], 1, "items[1]: token 258 is outside the vocabulary of 258."),
    ([[1], [2], [3], [70_000]], 3, "items[3]: token 70000 is outside the vocabulary of 258."),
    ([[-2]], 0, "items[0]: token -2 is outside the vocabulary of 258."),
    ([[1], [2, EOS]], 1, f"items[1]: token {EOS} ends an answer, so it cannot be part of an item; leave it out."),
]


@pytest.mark.parametrize("items, index, message", WRONG_ITEMS)
async def test_wrong_items_are_named(front: Front, items: list[list[int]], index: int, message: str) -> None:
    for query, body, headers in (
        ("", {"name": "x", "items": items}, {}),
        ("?name=x", lines(items), LINES),
        ("?name=x&width=4", padded(items, 4), ARRAY),
    ):
        error = await refused(front, query, body, headers)
        assert (error["status"], error["code"]) == (400, "invalid_value")
        assert (error["param"], error["message"]) == (f"items[{index}]", message)


async def test_wrong_items_far_into_an_upload(front: Front) -> None:
    items = [[1, 2, 3]] * 150_000
    items[140_001] = [1, 999]
    for query, body, headers in (("?name=x", lines(items), LINES), ("?name=x&width=3", padded(items, 3), ARRAY)):
        error = await refused(front, query, body, headers)
        assert error["message"] == "items[140001]: token 999 is outside the vocabulary of 258."


@pytest.mark.parametrize(
    "body, param, code",
    [
        (b"[1]\n[2,\n[3]", "items[1]", "invalid_json"),
        (b"[1]\n\n\n[true]", "items[1][0]", "invalid_type"),
        (b"[1]\n[1.0]", "items[1][0]", "invalid_type"),
        (b"[1]\n[1, %d]" % 10**30, "items[1]", "invalid_value"),
        (b"[1]\nnull", "items[1]", "invalid_type"),
        (b"[1]\n[[2]]", "items[1][0]", "invalid_type"),
        (b'{"token": [1]}', "items[0].tokens", "missing_required_parameter"),
        (b'[1]\n"\xff"', "items[1]", "invalid_json"),
        (b'[1]\n""', "items[1]", "invalid_value"),
        (b"[300]\n[", "items[0]", "invalid_value"),
        (b"[" * 100_000, "items[0][0]", "invalid_type"),
        (b'[1]\n{"tokens": [1], "more": ' + b"[" * 100_000, "items[1]", "invalid_json"),
        (b"[1] [2] x", "items[0]", "invalid_json"),
        (b"", "items", "invalid_value"),
        (b"\n \n", "items", "invalid_value"),
        (b"[1," * 800_000, "items", "invalid_value"),
    ],
)
async def test_wrong_lines_are_named(front: Front, body: bytes, param: str, code: str) -> None:
    error = await refused(front, "?name=x", body, LINES)
    assert (error["status"], error["param"], error["code"]) == (400, param, code), error["message"]


@pytest.mark.parametrize(
    "body, param, code",
    [
        (b"{", None, "invalid_json"),
        (b"[]", None, "invalid_type"),
        (b'{"name": "x", "items": ' + b"[" * 100_000, None, "invalid_json"),
        (b'{"name": "x"}', "items", "missing_required_parameter"),
        (b'{"name": "x", "items": null}', "items", "missing_required_parameter"),
        (b'{"name": "x", "items": {}}', "items", "invalid_type"),
        (b'{"items": [[1]]}', "name", "missing_required_parameter"),
        (b'{"name": 5, "items": [[1]]}', "name", "invalid_type"),
        (b'{"name": "a b", "items": [[1]]}', "name", "invalid_value"),
        (b'{"name": "x", "items": []}', "items", "invalid_value"),
        (b'{"name": "x", "items": [{"ids": [1]}]}', "items[0].tokens", "missing_required_parameter"),
        (b'{"name": "x", "items": [[1], [true]]}', "items[1][0]", "invalid_type"),
        (b'{"name": "x", "items": [[1]], "width": 3}', "width", "unknown_parameter"),
    ],
)
async def test_wrong_json(front: Front, body: bytes, param: str | None, code: str) -> None:
    error = await refused(front, "", body)
    assert (error["status"], error["param"], error["code"]) == (400, param, code), error["message"]
    assert param is None or f"`{param}`" in error["message"]


async def test_a_name_in_two_places(front: Front) -> None:
    error = await refused(front, "?name=y", b'{"name": "x", "items": [[1]]}')
    assert (error["code"], error["param"]) == ("invalid_value", "name") and "'y'" in error["message"]
    answer, _ = await front.post(f"{PATH}?name=x", b'{"name": "x", "items": [[1]]}')
    assert answer.status == 200


@pytest.mark.parametrize("headers", [{}, LINES])
async def test_a_width_is_of_an_array(front: Front, headers: dict[str, str]) -> None:
    error = await refused(front, "?name=x&width=3", b"[1]", headers)
    assert (error["code"], error["param"]) == ("invalid_value", "width")


@pytest.mark.parametrize("headers, body", [({}, b'{"items": [[1], [2]]}'), (LINES, b"[1]\n[2]")])
async def test_a_byte_order_mark(front: Front, headers: dict[str, str], body: bytes) -> None:
    answer, content = await front.post(f"{PATH}?name=x", BOM_UTF8 + body, headers=headers)
    assert answer.status == 200 and content["items"] == 2, content


@pytest.mark.parametrize(
    "query, body, param",
    [
        ("?width=3", padded(ITEMS, 3), "name"),
        ("?name=&width=3", padded(ITEMS, 3), "name"),
        ("?name=" + "x" * 129 + "&width=3", padded(ITEMS, 3), "name"),
        ("?name=a/b&width=3", padded(ITEMS, 3), "name"),
        ("?name=x", padded(ITEMS, 3), "width"),
        ("?name=x&width=0", padded(ITEMS, 3), "width"),
        ("?name=x&width=4097", padded(ITEMS, 3), "width"),
        ("?name=x&width=-3", padded(ITEMS, 3), "width"),
        ("?name=x&width=3", padded(ITEMS, 3)[:-1], "width"),
        ("?name=x&width=7", padded(ITEMS, 3), "width"),
        ("?name=x&width=3", b"", "width"),
        ("?name=x&width=3&replace=yes", padded(ITEMS, 3), "replace"),
        ("?name=x&width=3", np.array([[1, 2, 3], [1, -1, 3]], "<i4").tobytes(), "items[1]"),
        ("?name=x&width=2", np.array([[1, 2], [-1, 3]], "<i4").tobytes(), "items[1]"),
    ],
)
async def test_wrong_arrays(front: Front, query: str, body: bytes, param: str) -> None:
    error = await refused(front, query, body, ARRAY)
    assert (error["status"], error["param"]) == (400, param), error["message"]


async def test_other_content_types(front: Front) -> None:
    for headers in ({"Content-Type": "text/plain"}, {}):  # web pages may post either to any server
        http = {"skip_auto_headers": ["Content-Type"], "headers": headers}
        async with front.http.post(f"{front.url}{PATH}?name=x&width=1", data=b"\1\0\0\0", **http) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_body_that_cannot_be_decoded(front: Front) -> None:
    headers = {**ARRAY, "Content-Encoding": "gzip"}
    assert (await refused(front, "?name=x&width=3", b"not gzip at all", headers))["status"] == 400


async def test_a_name_that_is_taken(front: Front) -> None:
    await uploaded(front, "x", "lines", [[1]])
    client = front.client(max_retries=2)
    with pytest.raises(openai.ConflictError) as caught:
        await client.post("/catalogues", body={"name": "x", "items": [[2]]}, cast_to=object)
    assert caught.value.code == "catalogue_exists" and caught.value.response.headers["x-should-retry"] == "false"
    answer, content = await front.post(f"{PATH}?name=x&width=1", padded([[2]], 1), headers=ARRAY)
    assert answer.status == 409 and content["error"]["param"] == "name"
    held = await tree(front, "x")
    await uploaded(front, "x", "lines", [[2]], "replace=true")
    await uploaded(front, "new", "array", [[3]], "replace=true")
    assert members(await tree(front, "x")) == {(2,)}
    assert members(held) == {(1,)}, "who runs under the old one keeps it"


async def test_tenants_do_not_see_each_other(start: Starter, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text('keys = [{name = "one", key = "key-1"}, {name = "two", key = "key-2"}]')
    front = await start(api_key_file=str(file))
    one, two = ({"Authorization": f"Bearer key-{i}"} for i in (1, 2))
    answer, _ = await front.post(PATH, {"name": "x", "items": [[1]]}, headers=one)
    assert answer.status == 200
    body = {"prompt": "a", "catalogue": "x"}
    assert (await front.post("/v1/completions", body, headers=one))[0].status == 200
    answer, error = await front.post("/v1/completions", body, headers=two)
    assert answer.status == 404 and error["error"]["param"] == "catalogue"
    _, unknown = await front.post("/v1/completions", {**body, "catalogue": "y"}, headers=one)
    assert error["error"]["message"].replace("'x'", "'y'") == unknown["error"]["message"]
    assert (await front.get(PATH, headers=two))[1]["data"] == []
    assert (await front.get(f"{PATH}/x", headers=two))[0].status == 404
    async with front.http.delete(f"{front.url}{PATH}/x", headers=two) as gone:
        assert gone.status == 404
    answer, _ = await front.post(PATH, {"name": "x", "items": [[2]]}, headers=two)
    assert answer.status == 200, "names are a tenant's own"
    assert (await front.post(PATH, {"name": "z", "items": [[2]]}))[0].status == 401


async def test_limits(start: Starter) -> None:
    front = await start(max_catalogue_mb=1, catalogues_mb=1.5)
    answer, content = await front.post(f"{PATH}?name=x&width=1", bytes(2**20 + 4), headers=ARRAY)
    assert answer.status == 413 and content["error"]["details"] == {"limit": 2**20}
    assert "--max-catalogue-mb 1" in content["error"]["message"]

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"[1]\n" * 10_000

    async with front.http.post(f"{front.url}{PATH}?name=x", data=endless(), headers=LINES) as response:
        assert response.status == 413
    answer, content = await front.post(PATH, b" " * (4 * 2**20 + 1))
    assert answer.status == 413 and "application/x-ndjson" in content["error"]["message"]
    draw = np.random.default_rng(0)
    rows = np.ascontiguousarray(draw.integers(0, 250, (80_000, 3), np.int32))
    kept = 0
    while True:
        answer, content = await front.post(f"{PATH}?name=c{kept}&width=3", rows.tobytes(), headers=ARRAY)
        if answer.status != 200:
            break
        kept += 1
    assert 1 <= kept <= 4
    assert answer.status == 429 and content["error"]["code"] == "catalogues_full"
    assert answer.headers["x-should-retry"] == "false"
    details = content["error"]["details"]
    assert details["limit"] == 1.5 * 2**20 and details["used"] + details["needed"] > details["limit"]
    sizes = [entry["bytes"] for entry in (await front.get(PATH))[1]["data"]]
    assert details["used"] == sum(sizes), "uploads that failed hold nothing"
    async with front.http.delete(f"{front.url}{PATH}/c0") as gone:
        assert gone.status == 200
    answer, _ = await front.post(f"{PATH}?name=again&width=3", rows.tobytes(), headers=ARRAY)
    assert answer.status == 200


async def test_a_client_that_leaves_gives_its_room_back(start: Starter) -> None:
    front = await start(catalogues_mb=1)
    body = padded([[1, 2, 3]] * 50_000, 3)
    head = f"POST {PATH}?name=x&width=3 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {ARRAY['Content-Type']}\r\n"
    for _ in range(3):
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-400_000])
        await writer.drain()
        await front.settle()
        writer.close()
        await writer.wait_closed()
    await front.settle()
    assert (await uploaded(front, "x", "array", [[1, 2, 3]] * 50_000))["items"] == 1


async def test_the_official_client_manages_catalogues(front: Front) -> None:
    client = front.client()
    made: Any = await client.post("/catalogues", body={"name": "x", "items": ITEMS}, cast_to=object)
    listed: Any = await client.get("/catalogues", cast_to=object)
    assert listed["data"] == [made]
    answer = await front.strict().completions.create(model="fake/model", prompt="a", extra_body={"catalogue": "x"})
    assert answer.choices[0].text
    deleted: Any = await client.delete("/catalogues/x", cast_to=object)
    assert deleted["deleted"] is True
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="fake/model", prompt="a", extra_body={"catalogue": "x"})
    assert (caught.value.code, caught.value.param) == ("catalogue_not_found", "catalogue")


async def test_requests_that_are_bound_to_a_catalogue(front: Front) -> None:
    await uploaded(front, "x", "json", ITEMS)
    chat = {"messages": [{"role": "user", "content": "hi"}], "catalogue": "x"}
    for path, body in (("/v1/completions", {"prompt": "a", "catalogue": "x"}), ("/v1/chat/completions", chat)):
        for extra in ({}, {"stream": True}, {"n": 3, "temperature": 0}, {"use_beam_search": True, "n": 2}):
            answer, content = await front.post(path, {**body, **extra})
            assert answer.status == 200, content
            params = front.engine.submitted[-1].params
            assert params.catalogue is not None and params.max_tokens == 4, "the longest item and its end"
            assert not params.skip_special_tokens
        await front.post(path, {**body, "skip_special_tokens": True, "max_tokens": 3, "ignore_eos": True})
        params = front.engine.submitted[-1].params
        assert params.skip_special_tokens and params.max_tokens == 3 and params.ends_at_eos


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({"max_tokens": 2}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 2}, "max_completion_tokens", "invalid_value"),
        ({"stop": "x"}, "stop", "unsupported_parameter"),
        ({"stop_token_ids": [EOS, 13]}, "stop_token_ids[1]", "invalid_value"),
        ({"prompt": "x" * 509}, "prompt", "context_length_exceeded"),
        ({"catalogue": 5}, "catalogue", "invalid_type"),
    ],
)
async def test_requests_that_could_not_give_an_item(
    front: Front, fields: dict[str, Any], param: str | None, code: str
) -> None:
    await uploaded(front, "x", "json", ITEMS)
    answer, content = await front.post("/v1/completions", {"prompt": "a", "catalogue": "x", **fields})
    assert answer.status == 400, content
    assert (content["error"]["param"], content["error"]["code"]) == (param, code)
    answer, _ = await front.post("/v1/completions", {"prompt": "a", "catalogue": "x", "stop_token_ids": [EOS, 15]})
    assert answer.status == 200
