"""Base64 as the standard library reads it, whatever its length and wherever it is wrong."""

from __future__ import annotations

import base64
import random

import pytest

from bequest.engine import _C
from bequest.engine.kernels.base64 import decode_plain
from bequest.engine.text.base64 import from_base64

HEAD = "data:,"


@pytest.mark.parametrize("size", [*range(13), 300, 4099])
def test_every_length(size: int) -> None:
    data = random.Random(size).randbytes(size)
    text = base64.b64encode(data).decode()
    assert decode_plain(HEAD + text, len(HEAD)) == decode_plain(text) == from_base64(text) == data


def test_what_is_not_plain_is_as_the_library_has_it() -> None:
    dice, outcomes = random.Random(2), set()
    for _ in range(2000):
        text = base64.b64encode(dice.randbytes(dice.randrange(9))).decode()
        place = dice.randrange(len(text) + 1)
        text = text[:place] + dice.choice(["=", "==", "-", "A", "é", "\n", ""]) + text[place + dice.randrange(2) :]
        try:
            expected = base64.b64decode(text, validate=True)
        except ValueError:
            with pytest.raises(ValueError):
                from_base64(text)
            assert decode_plain(text) is None
            outcomes.add("wrong")
        else:
            assert from_base64(text) == expected
            outcomes.add("right")
    assert outcomes == {"wrong", "right"}


def test_blanks_where_they_may_be() -> None:
    assert from_base64("x,aG Vs\nbG8=", 2, blanks=True) == b"hello"
    with pytest.raises(ValueError):
        from_base64("x,aG Vs\nbG8=", 2)


def test_it_begins_within_the_text() -> None:
    with pytest.raises(_C.Error, match="within itself"):
        decode_plain("aGVs", 5)
