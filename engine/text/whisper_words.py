"""Words of a transcript: which of its tokens are one.

A word begins with a space. Languages that are written without spaces have a word for each character, more or less.
Punctuation belongs to the word that it stands at.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

_UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_OPENS = "\"'“¡¿([{-"
_CLOSES = "\"'.。,，!！?？:：”)]}、"


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens [first, end) of a list, and what they spell."""

    first: int
    end: int
    text: str


def words(spelled: Sequence[bytes], language: str) -> list[TokenRun]:
    """The words of tokens that spell these bytes, of which none is a control token."""
    units = _characters(spelled)
    if language not in _UNSPACED:
        units = _joined(units)
    return _with_closing(_with_opening(units))


def _characters(spelled: Sequence[bytes]) -> list[TokenRun]:
    """The shortest runs that spell whole characters; what never becomes one goes with the last."""
    runs: list[TokenRun] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, first = "", 0
    for index, piece in enumerate(spelled):
        is_last = index == len(spelled) - 1
        text += decoder.decode(piece, is_last)
        if is_last or not decoder.getstate()[0]:
            runs.append(TokenRun(first, index + 1, text))
            text, first = "", index + 1
    return runs


def _joined(units: Sequence[TokenRun]) -> list[TokenRun]:
    """What begins without a space goes on with the word before; punctuation waits for its place."""
    runs: list[TokenRun] = []
    for unit in units:
        if not runs or unit.text.startswith(" ") or unit.text.strip() in _PUNCTUATION:
            runs.append(unit)
        else:
            runs[-1] = _both(runs[-1], unit)
    return runs


def _with_opening(runs: Sequence[TokenRun]) -> list[TokenRun]:
    """A bracket or a quote behind a space opens the word that follows."""
    kept: list[TokenRun] = []
    for run in reversed(runs):
        if kept and run.text.startswith(" ") and run.text.strip() in _OPENS:
            kept[-1] = _both(run, kept[-1])
        else:
            kept.append(run)
    return kept[::-1]


def _with_closing(runs: Sequence[TokenRun]) -> list[TokenRun]:
    kept: list[TokenRun] = []
    for run in runs:
        if kept and not kept[-1].text.endswith(" ") and run.text in _CLOSES:
            kept[-1] = _both(kept[-1], run)
        else:
            kept.append(run)
    return kept


def _both(one: TokenRun, other: TokenRun) -> TokenRun:
    return TokenRun(one.first, other.end, one.text + other.text)
