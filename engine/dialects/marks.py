"""Marks in a text that arrives in pieces: found, or maybe begun."""

from __future__ import annotations

from collections.abc import Sequence


def partial(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    longest = max(map(len, marks), default=0) - 1
    for length in range(min(len(text), longest), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0


def first_of(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where the first mark stands, and which it is; the longest of those that begin at the same place."""
    found = [(at, -len(mark), mark) for mark in marks if mark and (at := text.find(mark)) >= 0]
    if not found:
        return None
    at, _, mark = min(found)
    return at, mark
