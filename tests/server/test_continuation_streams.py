"""Where streams tell of a parent and of a lease, and that the official client takes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import Starter
from tests.server.front import Front

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
MORE: list[Any] = [{"role": "user", "content": "more"}]


async def streamed(front: Front, path: str, **fields: Any) -> list[Any]:
    body = {"stream": True, **fields}
    async with front.http.post(front.url + path, json=body) as answer:
        text = (await answer.read()).decode()
    *parts, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), text
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("limit", [0, 1, 2, 20])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("path, field", [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": HELLO})])
async def test_where_streams_tell(front: Front, path: str, field: Any, usage: bool, n: int, limit: int) -> None:
    _, parent = await front.post(path, field)
    more: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": MORE}
    options = {"n": n, "max_tokens": limit, "retain": True, "stream_options": {"include_usage": usage}}
    events = await streamed(front, path, continuation_of=parent["id"], **options, **more)
    assert [bool("continuation" in event) for event in events] == [True, *[False] * (len(events) - 1)]
    assert events[0]["continuation"]["parent"] == parent["id"]
    assert [bool("retained" in event) for event in events] == [*[False] * (len(events) - 1), True]
    ended = [index for index, event in enumerate(events) if any(c["finish_reason"] for c in event["choices"])]
    assert ended[-1] == len(events) - 1 - usage
    assert bool(events[-1]["choices"]) != usage
    assert [choice["index"] for event in events[:n] for choice in event["choices"]] == list(range(n))
    _, whole = await front.post(path, {"continuation_of": parent["id"], "n": n, "max_tokens": limit, **more})
    assert events[0]["continuation"] == whole["continuation"]


async def test_streams_of_requests_that_ask_for_nothing(front: Front) -> None:
    for event in await streamed(front, CHAT, messages=HELLO) + await streamed(front, COMPLETIONS, prompt=["a", "b"]):
        assert not {"continuation", "retained"} & set(event)


async def test_streamed_fallback_and_outgrown_lease(front: Front) -> None:
    front.engine.outgrown = "Too long."
    events = await streamed(front, CHAT, messages=MORE, continuation_of="x", continuation_fallback=HELLO, retain=True)
    assert events[0]["continuation"]["source"] == "recompute" and events[0]["continuation"]["parent"] == "x"
    assert events[-1]["retained"] is None and events[-1]["retained_reason"] == "Too long."


async def test_the_official_client(front: Front) -> None:
    """Strict: it raises for every missing or foreign value."""
    client = front.strict()
    parent = await client.completions.create(model="fake/model", prompt="abc", extra_body={"retain": True})
    assert parent.retained["id"] == parent.id  # type: ignore[attr-defined]
    child = await client.completions.create(
        model="fake/model", prompt="", extra_body={"continuation_of": parent.id, "continuation_suffix": "x"}
    )
    assert child.continuation["source"] == "blocks"  # type: ignore[attr-defined]
    first = await client.chat.completions.create(model="fake/model", messages=HELLO)
    async with client.chat.completions.stream(
        model="fake/model",
        messages=MORE,
        n=2,
        stream_options={"include_usage": True},
        extra_body={"continuation_of": first.id, "retain": {"ttl": 9}},
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert final.continuation["parent"] == first.id  # type: ignore[attr-defined]
    chunks: list[Any] = [event.chunk for event in events if event.type == "chunk"]
    assert chunks[-1].retained["id"] == final.id and chunks[-1].usage.prompt_tokens > 0


async def test_a_slow_reader_is_told_too(start: Starter) -> None:
    """What is held while the client lags keeps what its deliveries told."""
    front = await start()
    _, parent = await front.post(COMPLETIONS, {"prompt": "abc"})
    front.engine.held = True
    raw = await front.connect({"prompt": "x", "continuation_of": parent["id"], "stream": True, "retain": True})
    await front.until(lambda: len(front.engine.runs) == 1)
    while front.engine.advance():
        pass
    await raw.head()
    [event] = [json.loads(part[6:]) for part in (await raw.chunk()).split(b"\n\n") if part.startswith(b"data: {")]
    assert event["continuation"]["source"] == "blocks" and event["retained"]["tokens"] > 0
    await raw.close()
