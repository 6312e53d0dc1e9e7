"""Answers that are told whole: the texts of several in one call, and rows of JSON around them.

A search has as many choices as other requests have tokens.
"""

from __future__ import annotations

from math import isfinite

import orjson

from bequest.engine._C import spell_answers, write_rows

__all__ = ["json_rows", "spell_answers"]

Parts = tuple[str, str, str, str, str]


def json_rows(parts: Parts, texts: list[str], scores: list[float], others: list[float]) -> bytes | None:
    """A list with a row for each text: parts[0], its number, parts[1], the text, parts[2], its score, parts[3], its
    other score, parts[4]. None: JSON cannot tell a score, or all are huge."""
    if not isfinite(sum(scores) + sum(others)):
        return None
    return write_rows(parts, texts, orjson.dumps(scores), orjson.dumps(others))
