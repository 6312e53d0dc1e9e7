"""Lists in pages, as OpenAI has them: `limit`, `after`, `order` in the query."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from bequest.server.wire.errors import invalid
from bequest.server.wire.reading import shorten

QUERY = ("limit", "after", "order")
_DEFAULT_LIMIT, _MOST_LISTED = 20, 100
_ORDERS = ("asc", "desc")

_Entry = TypeVar("_Entry")


def page_of(
    query: Mapping[str, str],
    entries: Sequence[_Entry],
    names: Callable[[_Entry], tuple[str | None, ...]],
    shown: Callable[[_Entry], dict[str, Any]],
    most: int = _MOST_LISTED,
    default: int = _DEFAULT_LIMIT,
) -> dict[str, Any]:
    """A page of `entries`; see `cut_page`."""
    page, more = cut_page(query, entries, names, most, default)
    return page_object([shown(entry) for entry in page], more)


def cut_page(
    query: Mapping[str, str],
    entries: Sequence[_Entry],
    names: Callable[[_Entry], tuple[str | None, ...]],
    most: int = _MOST_LISTED,
    default: int = _DEFAULT_LIMIT,
) -> tuple[list[_Entry], bool]:
    """The entries of a page, and whether there are more. `entries` are the oldest first; the youngest come first
    unless `order=asc`. `after` is one of the `names` of the last entry of the page before."""
    limit = integer(query, "limit", default, 1, most)
    order = query.get("order", "desc")
    if order not in _ORDERS:
        raise invalid(f"`order` must be asc or desc, not {shorten(repr(order))}.", "order")
    left = list(entries) if order == "asc" else list(reversed(entries))
    if "after" in query:
        left = left[_place(left, names, query["after"]) + 1 :]
    return left[:limit], len(left) > limit


def page_object(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


def integer(query: Mapping[str, str], name: str, default: int, low: int, high: int | None = None) -> int:
    text = query.get(name)
    if text is None:
        return default
    number = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
    if number is None or number < low or (high is not None and number > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise invalid(f"`{name}` must be a number {allowed}, not {shorten(repr(text))}.", name)
    return number


def _place(entries: Sequence[_Entry], names: Callable[[_Entry], tuple[str | None, ...]], reference: str) -> int:
    for index, entry in enumerate(entries):
        if reference in names(entry):
            return index
    raise invalid(f"`after` is {shorten(repr(reference))}, which is not in the list (any more).", "after")
