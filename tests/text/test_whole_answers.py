"""Rows of JSON are those that a writer of JSON makes of the same values, and texts those of their bytes."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bequest.engine._C import Error
from bequest.engine.text.whole_answers import spell_answers, write_rows

PARTS = ('{"index":', ',"text":', ',"score":', ',"other":', "}")
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), FINITE, FINITE), max_size=5)


def written(rows: list[tuple[str, float, float]], first: int = 0) -> bytes | None:
    return write_rows(PARTS, first, *([row[i] for row in rows] for i in range(3)))


@given(ROWS, st.integers(0, 2000))
def test_rows_are_json(rows: list[tuple[str, float, float]], first: int) -> None:
    told = [{"index": first + i, "text": t, "score": a, "other": b} for i, (t, a, b) in enumerate(rows)]
    as_json = written(rows, first)
    assert as_json is not None
    assert orjson.loads(as_json) == told
    # Python's own reader tells 1 from 1.0, and sees characters that must be escaped.
    assert repr(json.loads(as_json)) == repr(told)


@pytest.mark.parametrize("score", [float("inf"), float("-inf"), float("nan")])
def test_what_json_cannot_tell_is_not_written(score: float) -> None:
    assert written([("a", 0.0, 0.0), ("b", score, 0.0)]) is None
    assert written([("a", 0.0, score)]) is None


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(Error, match="a text has two scores"):
        write_rows(PARTS, 0, ["a", "b"], [0.0, 0.0], [0.0])


class Found(dict[int, bytes]):
    def __missing__(self, token: int) -> bytes:
        return bytes([token])


def test_texts_are_those_of_their_bytes() -> None:
    half, other_half = "é".encode()
    answers: list[tuple[int, ...]] = [(65, 66, 67), (), (half,), (half, other_half, 66), (0, half, 0)]
    texts = spell_answers(Found({66: b"<b>"}), frozenset({67}), b"", list(answers))
    assert texts == ["A<b>", "", "\ufffd", "é<b>", "\0\ufffd\0"]
    assert spell_answers(Found(), frozenset(), bytes([half]), [(other_half,), [65]]) == ["é", "\ufffdA"]
