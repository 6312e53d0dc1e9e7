"""Responses in the background, with the official client: polled, followed, left and come back to, cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bequest.engine.errors import EngineDead, QueueFull
from bequest.engine.types import ChoiceDelta, Delta, Request
from tests.server.conftest import Starter
from tests.server.front import Front
from tests.server.test_keys import bearer, key_file
from tests.server.test_responses import PATH, WHOLE, events, streamed


async def until_ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    for _ in range(2000):
        found = await client.responses.retrieve(response_id)
        if found.status not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.001)
    raise AssertionError(found)


async def test_polling(front: Front) -> None:
    client = front.strict()
    front.engine.held = True
    begun = await client.responses.create(model="fake/model", input="hi", background=True)
    assert begun.status == "queued" and begun.background and begun.output == []
    assert (await client.responses.retrieve(begun.id)).status == "queued"
    front.engine.advance()
    assert (await client.responses.retrieve(begun.id)).status == "in_progress"
    while front.engine.advance():
        pass
    done = await until_ended(client, begun.id)
    assert done.status == "completed" and done.output_text == WHOLE and done.usage and done.background
    front.engine.held = False
    following = await client.responses.create(model="fake/model", input="more", previous_response_id=begun.id)
    assert following.status == "completed"


async def test_a_client_that_leaves_and_comes_back(front: Front) -> None:
    client = front.client()
    front.engine.held = True
    heard = []
    stream = await client.responses.create(model="fake/model", input="hi", background=True, stream=True)
    front.engine.advance()
    async for event in stream:
        heard.append(event)
        if len(heard) == 5:
            break
    await stream.close()
    await front.settle()
    assert not front.engine.aborted and front.engine.runs, "it runs on"
    response_id = heard[0].response.id  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="events so far") as caught:
        await client.responses.retrieve(response_id, stream=True, starting_after=1000)
    assert caught.value.param == "starting_after"
    again = await client.responses.retrieve(response_id, stream=True, starting_after=heard[-1].sequence_number)
    while front.engine.advance():
        pass
    heard += [event async for event in again]
    assert [event.sequence_number for event in heard] == list(range(len(heard)))
    assert heard[-1].type == "response.completed" and heard[-1].response.output_text == WHOLE
    later = [event async for event in await client.responses.retrieve(response_id, stream=True)]
    assert [event.model_dump() for event in later] == [event.model_dump() for event in heard]


async def test_the_events_are_those_of_a_stream(front: Front) -> None:
    plain = await streamed(front, {"input": "hi"})
    apart = await streamed(front, {"input": "hi", "background": True})
    assert [event["type"] for event in apart] == [event["type"] for event in plain]


async def test_cancelling(front: Front) -> None:
    client = front.strict()
    front.engine.held = True
    begun = await client.responses.create(model="fake/model", input="hi", background=True)
    front.engine.advance()
    watching = asyncio.create_task(front.http.get(f"{front.url}{PATH}/{begun.id}?stream=true"))
    ended = await client.responses.cancel(begun.id)
    assert ended.status == "cancelled" and ended.background
    assert front.engine.aborted == [begun.id] and not front.engine.runs
    assert (await client.responses.retrieve(begun.id)).status == "cancelled"
    assert (await client.responses.cancel(begun.id)).status == "cancelled", "once more changes nothing"
    async with await watching as answer:
        assert b"response_cancelled" in await answer.read()
    async with front.http.get(f"{front.url}{PATH}/{begun.id}?stream=true") as answer:
        assert b"response_cancelled" in await answer.read()


async def test_a_failure_is_kept(front: Front) -> None:
    def script(request: Request) -> Iterator[Delta]:
        yield Delta(request.id, (ChoiceDelta(0, "Hel", (1,)),), first=True)
        yield Delta(request.id, error=EngineDead("The engine has failed.", reason="died"))

    front.engine.script = script
    client = front.strict()
    begun = await client.responses.create(model="fake/model", input="hi", background=True)
    failed = await until_ended(client, begun.id)
    assert failed.status == "failed" and failed.error and failed.error.code == "server_error"
    assert "restarting" in failed.error.message and failed.output_text == "Hel"


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_what_was_cut_is_told_again(front: Front, how: str) -> None:
    """Under the same numbers: a client may come back behind any of them."""

    def script(request: Request) -> Iterator[Delta]:
        for text in ("Hel", "lo"):
            yield Delta(request.id, (ChoiceDelta(0, text, (1,)),), first=text == "Hel")
        yield Delta(request.id, error=EngineDead("The engine has failed.", reason="died"))

    front.engine.script, front.engine.held = script, True
    client = front.strict()
    begun = await client.responses.create(model="fake/model", input="hi", background=True)
    for _ in range(2):
        front.engine.advance()

    async def heard() -> list[dict[str, Any]]:
        async with front.http.get(f"{front.url}{PATH}/{begun.id}?stream=true") as answer:
            return events(await answer.read())

    live = asyncio.create_task(heard())
    await front.settle()
    if how == "failed":
        front.engine.advance()
    else:
        await client.responses.cancel(begun.id)
    told = await live
    assert (await client.responses.retrieve(begun.id)).status == how
    kinds = [event["type"] for event in told]
    assert kinds[-4:] == [*["response.output_text.delta"] * 2, "response.failed", "error"]
    assert await heard() == told, "what ended it, too, and how"


async def test_deleting_ends_it(front: Front) -> None:
    client = front.client()
    front.engine.held = True
    begun = await client.responses.create(model="fake/model", input="hi", background=True)
    await client.responses.delete(begun.id)
    await front.until(lambda: not front.engine.runs)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_what_is_refused_is_refused_at_once(front: Front) -> None:
    client = front.client()
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="fake/model", input="hi", background=True, store=False)
    assert caught.value.param == "background"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="fake/model", input="hi", background=True, temperature=-1)
    assert caught.value.param == "temperature"
    front.engine.refusal = QueueFull("The server's queue is full.")
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="fake/model", input="hi", background=True)
    answer, _ = await front.post("/v1/chat/completions", {"messages": [], "background": True})
    assert answer.status == 400


async def test_it_counts_as_open(start: Starter, tmp_path: Path) -> None:
    text = '[[keys]]\nname = "a"\nkey = "a"\nmax_concurrent = 1\n[[keys]]\nname = "b"\nkey = "b"\n'
    front = await start(api_key_file=key_file(tmp_path, text))
    front.engine.held = True
    answer, begun = await front.post(PATH, {"input": "hi", "background": True}, headers=bearer("a"))
    assert answer.status == 200
    answer, _ = await front.post(PATH, {"input": "hi", "background": True}, headers=bearer("a"))
    assert answer.status == 429
    answer, _ = await front.get(f"{PATH}/{begun['id']}", headers=bearer("b"))
    assert answer.status == 404, "another tenant's"
    while front.engine.advance():
        pass
    await front.settle()
    answer, _ = await front.post(PATH, {"input": "hi", "background": True}, headers=bearer("a"))
    assert answer.status == 200
