"""What a request waits for in one place after another, begun before its turn comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from itertools import islice
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def ahead(
    begin: Iterable[Callable[[], Coroutine[Any, Any, _Result]]], most: int
) -> AsyncGenerator[_Result, None]:
    """The results in their order, `most` of them under way at once. Who leaves early, or with the error of one, ends
    the others: REQUIRES that the generator is closed."""
    left = iter(begin)
    under_way: deque[asyncio.Task[_Result]] = deque()
    try:
        while True:
            for one in islice(left, most - len(under_way)):
                under_way.append(asyncio.create_task(one()))
            if not under_way:
                return
            result = await under_way[0]
            under_way.popleft()
            yield result
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
