"""Makes a body that breaks something smaller, as long as it still does."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

_TRIES = 300
_PLAIN: list[Any] = [None, 0, 1, "", "a", [], {}]

Breaks = Callable[[Any], Awaitable[bool]]


async def minimised(body: Any, breaks: Breaks, tries: int = _TRIES) -> Any:
    """The smallest body found; `breaks` sends one. Each success starts over, so what is left cannot lose a part."""
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for candidate in _smaller(body):
            tries -= 1
            if await breaks(candidate):
                body, smaller = candidate, True
                break
            if tries <= 0:
                break
    return body


def _smaller(body: Any) -> Iterator[Any]:
    """Without a part, the large ones first; then with plainer values."""
    for path in sorted(_paths(body), key=len):
        yield _changed(body, path, delete=True)
    for path in _paths(body):
        value = _at(body, path)
        if isinstance(value, str | list) and len(value) > 1:
            yield _changed(body, path, value[: len(value) // 2])
        for plain in _PLAIN:
            if type(plain) is type(value) and plain != value and _size(plain) < _size(value):
                yield _changed(body, path, plain)


def _size(value: Any) -> int:
    return len(repr(value))


def _paths(value: Any) -> list[tuple[Any, ...]]:
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [path for key in keys for path in ((key,), *((key, *inner) for inner in _paths(value[key])))]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _changed(body: Any, path: tuple[Any, ...], value: Any = None, delete: bool = False) -> Any:
    body = copy.deepcopy(body)
    holder = _at(body, path[:-1])
    if delete:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return body
