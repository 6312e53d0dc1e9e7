"""Results come in their order, a few are under way at once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
import pytest

from bequest.server.transport import fetching
from bequest.server.transport.ahead import ahead
from tests.server.conftest import Starter
from tests.server.fakes import seeing_engine
from tests.tiny_seeing import encoded, picture


class _Work:
    """Each number waits until it is let go; numbers below none fail."""

    def __init__(self) -> None:
        self.under_way: set[int] = set()
        self.begun: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}

    async def one(self, number: int) -> int:
        self.under_way.add(number)
        self.begun.append(number)
        try:
            await self.gates.setdefault(number, asyncio.Event()).wait()
        finally:
            self.under_way.discard(number)
        if number < 0:
            raise ValueError(str(number))
        return number

    def all(self, *numbers: int) -> list[Callable[[], Coroutine[Any, Any, int]]]:
        return [partial(self.one, number) for number in numbers]

    def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self.gates.setdefault(number, asyncio.Event()).set()


async def test_results_come_in_their_order_and_a_few_are_under_way() -> None:
    work = _Work()
    work.let_go(3, 4)
    async with aclosing(ahead(work.all(1, 2, 3, 4), 3)) as results:
        first = asyncio.ensure_future(anext(results))
        await asyncio.sleep(0.01)
        assert work.begun == [1, 2, 3] and work.under_way == {1, 2} and not first.done()
        work.let_go(1)
        assert await first == 1 and 4 not in work.begun, "the next begins when somebody waits for it"
        work.let_go(2)
        assert [result async for result in results] == [2, 3, 4]


async def test_none_are_no_results() -> None:
    assert [result async for result in ahead([], 3)] == []


@pytest.mark.parametrize("how", ["an error", "leaves", "is cancelled"])
async def test_who_ends_early_leaves_nothing_under_way(how: str) -> None:
    work = _Work()

    async def run() -> None:
        async with aclosing(ahead(work.all(-1 if how == "an error" else 1, 2, 3), 3)) as results:
            await anext(results)
            raise KeyError

    running = asyncio.ensure_future(run())
    await asyncio.sleep(0.01)
    assert len(work.under_way) == 3
    if how == "is cancelled":
        running.cancel()
    work.let_go(-1, 1)
    expected = {"an error": ValueError, "leaves": KeyError, "is cancelled": asyncio.CancelledError}
    with pytest.raises(expected[how]):
        await running
    assert not work.under_way


async def test_images_of_a_request_are_fetched_at_once(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    all_asked = asyncio.Barrier(3)

    async def fetch(self: object, url: str) -> bytes:
        asked.append(url)
        await all_asked.wait()
        return encoded(picture(64, 64 + 16 * int(url[-1])))

    monkeypatch.setattr(fetching.Fetcher, "fetch", fetch)
    front = await start(engine=seeing_engine(), allow_image_hosts=("images.test",))
    urls = [f"https://images.test/{i}" for i in range(3)]
    content = [{"type": "image_url", "image_url": url} for url in urls]
    body = orjson.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    answer, told = await front.post("/v1/chat/completions", body)
    assert answer.status == 200 and asked == urls, told
