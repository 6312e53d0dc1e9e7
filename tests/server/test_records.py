"""/v1/continuations: listing, inspecting, changing and releasing; and what the metrics say of it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.pagination import AsyncCursorPage

from bequest.engine.errors import InsufficientRetention, InvalidRequest, RetentionTooLarge
from bequest.engine.types import GradeLoad, Inheritance
from bequest.engine.watching.observation import EngineLoad, RequestStats, StepStats
from tests.server.front import Front

PATH = "/v1/continuations"


async def made(front: Front, **fields: Any) -> str:
    answer, content = await front.post("/v1/completions", {"prompt": "abc", **fields})
    assert answer.status == 200, content
    identity: str = content["id"]
    return identity


async def call(front: Front, method: str, path: str, **options: Any) -> tuple[int, Any]:
    async with front.http.request(method, front.url + path, **options) as answer:
        return answer.status, await answer.json()


async def test_an_entry(front: Front) -> None:
    parent = await made(front, request_id="mine", n=2, max_tokens=3)
    child = await made(front, continuation_of="mine", continuation_at=5, retain=True)
    _, entry = await front.get(f"{PATH}/mine")
    assert entry == {
        "id": parent,
        "object": "continuation",
        "request_id": "mine",
        "created_at": 1000,
        "expires_at": None,
        "grade": "warm",
        "adapter": None,
        "parent": None,
        "at": None,
        "children": 1,
        "choices": [{"index": i, "tokens": 7, "blocks": 1, "shared_blocks": 0} for i in range(2)],
        "groups": [
            {"kind": "full", "blocks": 2, "bytes": 64},
            {"kind": "window", "window": 8, "blocks": 1, "bytes": 32},
            {"kind": "state", "states": 3, "bytes": 30},
        ],
    }
    _, entry = await front.get(f"{PATH}/{child}")
    assert (entry["parent"], entry["at"], entry["grade"], entry["request_id"]) == (parent, 5, "leased", None)
    assert isinstance(entry["expires_at"], int)


async def test_pages(front: Front) -> None:
    ids = [await made(front, request_id=f"n{number}") for number in range(5)]
    _, page = await front.get(PATH)
    assert [entry["id"] for entry in page["data"]] == ids[::-1]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", ids[4], ids[0], False)
    _, page = await front.get(f"{PATH}?limit=2&order=asc")
    assert [entry["id"] for entry in page["data"]] == ids[:2] and page["has_more"]
    _, page = await front.get(f"{PATH}?limit=3&order=asc&after={ids[1]}")
    assert [entry["id"] for entry in page["data"]] == ids[2:] and not page["has_more"]
    _, page = await front.get(f"{PATH}?after=n1")
    assert [entry["id"] for entry in page["data"]] == ids[:1]
    answer, page = await front.get(f"{PATH}?after={ids[0]}&before=5")
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert answer.headers["X-Bequest-Ignored"] == "before"


async def test_the_official_clients_pages(front: Front) -> None:
    class Entry(openai.BaseModel):
        id: str

    ids = [await made(front) for _ in range(5)]
    pager = front.client().get_api_list(
        "/continuations", page=AsyncCursorPage[Entry], model=Entry, options={"params": {"limit": 2}}
    )
    assert [entry.id async for entry in pager] == ids[::-1]


async def test_twenty_are_a_page(front: Front) -> None:
    for _ in range(21):
        await made(front)
    _, page = await front.get(PATH)
    assert len(page["data"]) == 20 and page["has_more"]
    _, page = await front.get(f"{PATH}?limit=100")
    assert len(page["data"]) == 21


@pytest.mark.parametrize(
    "query, param",
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=ten", "limit"), ("limit=", "limit"), ("limit=-1", "limit"),
     ("limit=--5", "limit"), ("limit=%C2%B2", "limit"), ("order=up", "order"), ("order=", "order"),
     ("after=nobody", "after")],
)  # fmt: skip
async def test_bad_queries(front: Front, query: str, param: str) -> None:
    answer, content = await front.get(f"{PATH}?{query}")
    assert answer.status == 400 and (content["error"]["code"], content["error"]["param"]) == ("invalid_value", param)


async def test_change(front: Front) -> None:
    parent = await made(front, request_id="mine")
    status, entry = await call(front, "PATCH", f"{PATH}/mine", json={"ttl": 60})
    assert (
        status == 200 and entry["id"] == parent and entry["grade"] == "leased" and isinstance(entry["expires_at"], int)
    )
    status, entry = await call(front, "PATCH", f"{PATH}/{parent}", json={"ttl": None})
    assert status == 200 and entry["grade"] == "warm" and entry["expires_at"] is None


@pytest.mark.parametrize(
    "body, param, code",
    [
        ({}, "ttl", "missing_required_parameter"),
        ({"ttl": 0}, "ttl", "invalid_value"),
        ({"ttl": 86401}, "ttl", "invalid_value"),
        ({"ttl": "60"}, "ttl", "invalid_type"),
        ({"ttl": False}, "ttl", "invalid_type"),
        ({"ttl": 5, "grade": "warm"}, "grade", "unknown_parameter"),
        ([5], None, "invalid_type"),
    ],
)
async def test_bad_changes(front: Front, body: Any, param: str | None, code: str) -> None:
    await made(front, request_id="mine")
    status, content = await call(front, "PATCH", f"{PATH}/mine", json=body)
    assert status == 400 and (content["error"]["param"], content["error"]["code"]) == (param, code)


async def test_changes_that_are_refused(front: Front) -> None:
    await made(front, request_id="mine")
    for error, status in (
        (InsufficientRetention("Full.", details={"earliest_expiry": None}), 429),
        (RetentionTooLarge("Too large.", field="retain"), 400),
        (InvalidRequest("It runs."), 400),
    ):
        front.engine.refused_ttl = error
        got, content = await call(front, "PATCH", f"{PATH}/mine", json={"ttl": 5})
        assert (got, content["error"]["code"]) == (status, error.code)
        assert content["error"]["param"] == (None if error.code == "invalid_value" else "ttl")
    async with front.http.patch(f"{front.url}{PATH}/mine", data="{}", headers={"Content-Type": "text/plain"}) as answer:
        assert answer.status == 415


async def test_answers_wait_for_files(front: Front) -> None:
    await made(front, request_id="mine")
    for number, (method, options) in enumerate((("PATCH", {"json": {"ttl": 9}}), ("DELETE", {})), start=1):
        assert (await call(front, method, f"{PATH}/mine", **options))[0] == 200
        assert front.engine.num_written == number
    _, response = await front.post("/v1/responses", {"input": "abc"})
    assert (await call(front, "DELETE", f"/v1/responses/{response['id']}"))[0] == 200
    assert front.engine.num_written == 3


async def test_delete(front: Front) -> None:
    """As the official client sends it: with a Content-Type and without a body."""
    parent = await made(front, request_id="mine")
    child = await made(front, continuation_of="mine")
    client = front.client()
    gone: Any = await client.delete("/continuations/mine", cast_to=object)
    assert gone == {"id": parent, "object": "continuation", "deleted": True}
    for reference in ("mine", parent):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.delete(f"/continuations/{reference}", cast_to=object)
        assert caught.value.code == "continuation_parent_not_found" and caught.value.param is None
    status, entry = await call(front, "GET", f"{PATH}/{child}")
    assert status == 200 and entry["parent"] == parent
    answer, content = await front.post("/v1/completions", {"prompt": "x", "continuation_of": "mine"})
    assert answer.status == 404 and content["error"]["param"] == "continuation_of"


async def test_names_are_decoded(front: Front) -> None:
    parent = await made(front, request_id="a:b.c")
    from yarl import URL

    async with front.http.get(URL(f"{front.url}{PATH}/a%3Ab.c", encoded=True)) as answer:
        assert answer.status == 200 and (await answer.json())["id"] == parent
    for strange in ("%ff", "a%2Fb", "x" * 3000):
        async with front.http.get(URL(f"{front.url}{PATH}/{strange}", encoded=True)) as answer:
            assert answer.status == 404 and (await answer.json())["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    "method, path", [("POST", PATH), ("POST", f"{PATH}/x"), ("PUT", f"{PATH}/x"), ("DELETE", PATH)]
)
async def test_other_methods(front: Front, method: str, path: str) -> None:
    status, content = await call(front, method, path)
    assert status == 405 and content["error"]["code"] == "method_not_allowed"


async def test_metrics(front: Front) -> None:
    front.metrics.load = lambda: EngineLoad(
        1, 0, 5, 20, used_host_blocks=3, usable_host_blocks=9, retention_budget=10, retention_charged=4,
        retained={"leased": GradeLoad(2, 70, 6), "warm": GradeLoad(1, 10, 1)},
    )  # fmt: skip
    front.metrics.on_step(StepStats(0, 0, 0, 5, 6, 0.001, (), ()))
    for source, inherited in (("blocks", 30), ("blocks", 12), ("recompute", 0)):
        taken = Inheritance("p", 40, inherited, 1, source)  # type: ignore[arg-type]
        front.metrics.on_finish(RequestStats("stop", 40, 30, 1, 1, 1, 0, 0, 0, 0, inheritance=taken))
    async with front.http.get(front.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    label = 'model_name="fake/model"'
    for line in (
        f"bequest:host_blocks{{{label}}} 9.0",
        f"bequest:host_blocks_used{{{label}}} 3.0",
        f"bequest:leases{{{label}}} 2.0",
        f"bequest:retention_budget_blocks{{{label}}} 10.0",
        f"bequest:retention_charged_blocks{{{label}}} 4.0",
        f'bequest:retained_records{{grade="leased",{label}}} 2.0',
        f'bequest:retained_tokens{{grade="leased",{label}}} 70.0',
        f'bequest:retained_blocks{{grade="warm",{label}}} 1.0',
        f'bequest:retained_blocks{{grade="tokens",{label}}} 0.0',
        f"bequest:inherited_tokens_total{{{label}}} 42.0",
        f"bequest:swapped_out_blocks_total{{{label}}} 5.0",
        f"bequest:swapped_in_blocks_total{{{label}}} 6.0",
        f'bequest:continuations_total{{{label},source="blocks"}} 2.0',
        f'bequest:continuations_total{{{label},source="recompute"}} 1.0',
        f'bequest:continuations_total{{{label},source="host"}} 0.0',
    ):
        assert line in lines, line
