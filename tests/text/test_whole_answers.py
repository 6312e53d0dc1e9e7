"""Rows of JSON are those that a writer of JSON makes of the same values, and texts those of their bytes."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bequest.engine._C import Error
from bequest.engine.text.whole_answers import json_rows, spell_answers

PARTS = ('{"index":', ',"text":', ',"score":', ',"other":', "}")
FINITE = st.floats(-1e300, 1e300)
ROWS = st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), FINITE, FINITE), max_size=5)


def written(rows: list[tuple[str, float, float]]) -> bytes | None:
    return json_rows(PARTS, [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


@given(ROWS)
def test_rows_are_json(rows: list[tuple[str, float, float]]) -> None:
    told = [{"index": i, "text": t, "score": a, "other": b} for i, (t, a, b) in enumerate(rows)]
    as_json = written(rows)
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
        json_rows(PARTS, ["a", "b"], [0.0, 0.0], [0.0])


class Found(dict[int, bytes]):
    def __missing__(self, token: int) -> bytes:
        return bytes([token])


def test_texts_are_those_of_their_bytes() -> None:
    half, other_half = "é".encode()
    answers: list[tuple[int, ...]] = [(65, 66, 67), (), (half,), (half, other_half, 66), (0, half, 0)]
    texts = spell_answers(Found({66: b"<b>"}), frozenset({67}), b"", list(answers))
    assert texts == ["A<b>", "", "\ufffd", "é<b>", "\0\ufffd\0"]
    assert spell_answers(Found(), frozenset(), bytes([half]), [(other_half,), [65]]) == ["é", "\ufffdA"]
