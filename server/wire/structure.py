"""Where the values of a JSON text begin and end, and how many there are: known before any of them is made.

The text is looked at in pieces. Almost all of the work is numpy's, which leaves the interpreter to others meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bequest.server.wire.errors import ApiError

OPEN, CLOSE, COMMA, COLON = 1, 2, 3, 4
_QUOTE, _BACKSLASH = 5, 6
_KINDS = bytes(
    {**dict.fromkeys(b"[{", OPEN), **dict.fromkeys(b"]}", CLOSE), ord(","): COMMA, ord(":"): COLON}.get(
        byte, _QUOTE if byte == ord('"') else _BACKSLASH if byte == ord("\\") else 0
    )
    for byte in range(256)
)
_PIECE = 1 << 18  # bytes looked at together, at the most,
_SHORT = 1 << 12  # and where a long string may begin
_VALUE_BYTES, _PART_BYTES = 64, 256  # that a number takes in a list, and its place in a table; and anything else
_WIDEST = 4  # bytes of a character in a string that has a rare one
_DEEPEST = 128  # lists and objects inside of each other


@dataclass(frozen=True, slots=True)
class Counts:
    """How much a body may hold. `parts` are strings, lists, objects and names; `values` are these and numbers."""

    values: int
    parts: int

    def check(self, values: int, parts: int) -> None:
        for found, most, what, flag in (
            (values, self.values, "values", "--max-body-values"),
            (parts, self.parts, "strings, names, lists and objects", "--max-body-parts"),
        ):
            if found > most:
                raise ApiError(
                    413,
                    "request_too_large",
                    f"The body holds more {what} than this server takes: {most} ({flag}). Split it.",
                    details={"limit": most},
                )


@dataclass(frozen=True, slots=True)
class Structure:
    """The brackets, commas and colons outside of strings, in order."""

    places: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    levels: npt.NDArray[np.int32]  # lists and objects that it is inside of; a bracket is inside of its own
    values: int
    parts: int
    text_bytes: int  # of all its strings, at the most

    @property
    def num_bytes(self) -> int:
        """What the values take, about."""
        return self.text_bytes + _VALUE_BYTES * self.values + _PART_BYTES * self.parts

    def within(self, begin: int, end: int) -> slice:
        """Those of a stretch of the text."""
        first, last = np.searchsorted(self.places, (begin, end))
        return slice(int(first), int(last))


def structure_of(text: bytes | bytearray, most: Counts) -> Structure:
    """REQUIRES: some text. Raises 413 for more than `most`, as soon as that is known, and 400 for what is nested too
    deeply."""
    places, kinds, levels = [], [], []
    looker, begin, size = _Looker(), 0, _SHORT
    opened = commas = quotes = 0
    while begin < len(text):
        found, kind, marks = looker.look(bytes(memoryview(text)[begin : begin + size]))
        level = looker.levels(kind)
        places.append(found + begin)
        kinds.append(kind)
        levels.append(level)
        opened += int(np.count_nonzero(kind == OPEN))
        commas += int(np.count_nonzero(kind == COMMA))
        quotes += marks
        values, parts = opened + commas, opened + (quotes + 1) // 2
        most.check(values, parts)
        end = begin + size
        begin = looker.skip(text, end)
        size = _SHORT if begin - end > size else min(2 * size, _PIECE)
    text_bytes = len(text) * (1 if text.isascii() else _WIDEST)
    return Structure(
        np.concatenate(places), np.concatenate(kinds), np.concatenate(levels), values + opened, parts, text_bytes
    )


class _Looker:
    """What has to be known of earlier pieces."""

    def __init__(self) -> None:
        self._escaped = False  # the next byte is behind a backslash
        self._inside = False  # of a string
        self._level = 0

    def look(self, piece: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], int]:
        """The structural bytes of a piece, by place and kind, and the number of its quotes."""
        kinds = np.frombuffer(piece.translate(_KINDS), np.uint8)
        quotes = kinds == _QUOTE
        escaped = self._escapes(kinds)
        if escaped is not None:
            quotes &= ~escaped
        inside = np.bitwise_xor.accumulate(quotes)
        if self._inside:
            np.logical_not(inside, out=inside)
        self._inside = bool(inside[-1])
        found = np.flatnonzero((kinds > 0) & (kinds < _QUOTE) & ~inside)
        return found, kinds[found], int(np.count_nonzero(quotes))

    def skip(self, text: bytes | bytearray, begin: int) -> int:
        """Where there is something to look at again: inside of a string, a file in base64 say, there is nothing."""
        if not self._inside or self._escaped:
            return begin
        quote = text.find(b'"', begin)
        end = len(text) if quote < 0 else quote
        slash = text.find(b"\\", begin, end)
        return end if slash < 0 else slash

    def levels(self, kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        steps = (kinds == OPEN).astype(np.int32) - (kinds == CLOSE)
        after = np.cumsum(steps, dtype=np.int32) + np.int32(self._level)
        if len(after):
            self._level = int(after[-1])
            if int(after.max()) > _DEEPEST:
                raise ApiError(400, "invalid_json", "The body is not valid JSON: it is nested too deeply.")
        levels: npt.NDArray[np.int32] = after + (kinds == CLOSE)
        return levels

    def _escapes(self, kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_] | None:
        """Which bytes have an odd number of backslashes before them; None: not one."""
        slashes = np.flatnonzero(kinds == _BACKSLASH)
        if not len(slashes) and not self._escaped:
            return None
        escaped = np.zeros(len(kinds) + 1, np.bool_)
        escaped[0] = self._escaped
        if len(slashes):
            order = np.arange(len(slashes))
            begins = np.ones(len(slashes), np.bool_)  # a run of backslashes does here
            begins[1:] = slashes[1:] != slashes[:-1] + 1
            place = order - np.maximum.accumulate(np.where(begins, order, 0))
            if self._escaped:
                place[slashes == order] += 1  # those that go on with the last piece's run
            escaped[slashes[place % 2 == 0] + 1] = True
        self._escaped = bool(escaped[-1])
        return escaped[:-1]
