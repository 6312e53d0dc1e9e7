"""Large JSON texts, parsed in pieces: one call of the parser for thirty megabytes would keep the interpreter from every
other thread for a tenth of a second, and for longer where they are many small values.

For worker threads. What is accepted, and what becomes of it, is what the parser makes of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bequest.server.wire.structure import CLOSE, COLON, COMMA, Structure

_PIECE = 1 << 16  # bytes that are parsed together
_AT_ONCE, _FEW = 1 << 20, 512  # bytes, and parts: a few long strings take the parser a millisecond
_BLANK = b" \t\n\r"
_NOT_BLANK = re.compile(rb"[^ \t\n\r]")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")  # of a pair, whose other half comes next
_ESCAPE = 6  # bytes of the longest, \uXXXX
_AT_BYTE = re.compile(r" \(byte (\d+)\)")


class Malformed(Exception):
    """The text is not JSON, for the reason given."""


def parse_large(text: bytes | bytearray, structure: Structure, begin: int = 0) -> Any:
    """The value in a text of this structure, which has no JSON in front of `begin`. Raises Malformed."""
    parser = _Parser(text, structure)
    if len(text) <= _AT_ONCE and structure.parts <= _FEW:
        return parser.decoded(b"", begin, len(text), b"")
    return parser.value(begin, len(text))


class _Parser:
    def __init__(self, text: bytes | bytearray, structure: Structure) -> None:
        self._text = text
        self._view = memoryview(text)
        self._structure = structure

    def value(self, begin: int, end: int) -> Any:
        begin, end = self._trimmed(begin, end)
        if end - begin <= _PIECE:
            return self.decoded(b"", begin, end, b"")
        first = self._text[begin]
        if first == ord("["):
            return self._list(begin, end)
        if first == ord("{"):
            return self._object(begin, end)
        if first == ord('"'):
            return self._string(begin, end)
        raise Malformed(f"a value of {end - begin} bytes is no string, list or object")

    def _list(self, begin: int, end: int) -> list[Any]:
        items: list[Any] = []
        for first, last, large in self._groups(begin, end, "]"):
            if large:
                items.append(self.value(first, last))
            else:
                items += self.decoded(b"[", first, last, b"]")
        return items

    def _object(self, begin: int, end: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for first, last, large in self._groups(begin, end, "}"):
            if large:
                colon = self._colon(first, last)
                name_begin, name_end = self._trimmed(first, colon)
                if self._text[name_begin : name_begin + 1] != b'"':
                    raise Malformed(f"a name is missing (byte {name_begin})")
                members[self.value(name_begin, name_end)] = self.value(colon + 1, last)
            else:
                members.update(self.decoded(b"{", first, last, b"}"))
        return members

    def _groups(self, begin: int, end: int, closing: str) -> Iterator[tuple[int, int, bool]]:
        """The stretches between commas of a list or object: several small ones together, or one that is large."""
        cuts = self._cuts(begin, end, closing)
        index, last = 0, len(cuts) - 1
        while index < last:
            upto = int(np.searchsorted(cuts, cuts[index] + _PIECE, "right")) - 1
            upto = min(max(upto, index + 1), last)
            first, behind = int(cuts[index]) + 1, int(cuts[upto])
            large = behind - first > _PIECE
            if not large and not self._text[first:behind].strip(_BLANK):
                raise Malformed(f"a value is missing (byte {first})")
            yield first, behind, large
            index = upto

    def _cuts(self, begin: int, end: int, closing: str) -> npt.NDArray[np.int64]:
        """Where a list or object begins, its commas, and where it ends: which must be the end of the stretch."""
        inner = self._structure.within(begin, end)
        places, kinds = self._structure.places[inner], self._structure.kinds[inner]
        own = self._structure.levels[inner] == self._structure.levels[inner][0]
        ends = np.flatnonzero(own & (kinds == CLOSE))
        if not len(ends):
            raise Malformed("it ends in the middle")
        if int(places[ends[0]]) != end - 1 or self._text[end - 1] != ord(closing):
            raise Malformed(f"a comma or a bracket is wrong (byte {int(places[ends[0]])})")
        return np.concatenate(([begin], places[own & (kinds == COMMA)], [end - 1]))

    def _colon(self, begin: int, end: int) -> int:
        inner = self._structure.within(begin, end)
        found = np.flatnonzero(self._structure.kinds[inner] == COLON)
        if not len(found):
            raise Malformed(f"a colon is missing (byte {begin})")
        return int(self._structure.places[inner][found[0]])

    def _string(self, begin: int, end: int) -> str:
        if self._text[end - 1] != ord('"'):
            raise Malformed("it ends in the middle of a string")
        pieces: list[str] = []
        at, last = begin + 1, end - 1
        while at < last:
            upto = last if last - at <= _PIECE else self._end_of_characters(at, at + _PIECE)
            while upto < last and upto > at and self._text[upto] & 0xC0 == 0x80:
                upto -= 1  # not into the middle of a character
            if upto == at:
                raise Malformed(f"a string has a character that is wrong (byte {at})")
            pieces.append(self._plain(at, upto) or self.decoded(b'"', at, upto, b'"'))
            at = upto
        return "".join(pieces)

    def _plain(self, begin: int, end: int) -> str | None:
        """Characters that stand for themselves, as those of base64 do: a tenth of the parser's time. None: others."""
        piece = self._view[begin:end]
        if int(np.frombuffer(piece, np.uint8).min()) < ord(" "):
            return None
        if any(self._text.find(other, begin, end) >= 0 for other in (b"\\", b'"')):
            return None
        try:
            return str(piece, "ascii")
        except UnicodeDecodeError:
            return None

    def _end_of_characters(self, begin: int, end: int) -> int:
        """The last place in front of `end` where the string can be cut: in the middle of no escape, and of no pair of
        surrogates. REQUIRES: it can be cut at `begin`"""
        text = self._text
        last = text.rfind(b"\\", max(begin, end - _ESCAPE + 1), end)
        if last >= 0 and self._is_escape(begin, last):
            length = _ESCAPE if text[last + 1 : last + 2] == b"u" else 2
            end = last if last + length > end else end
        high = end - _ESCAPE
        if high >= begin and _HIGH_SURROGATE.match(text, high, end) and self._is_escape(begin, high):
            end = high
        return end

    def _is_escape(self, begin: int, place: int) -> bool:
        """Whether the backslash there is not an escaped one: it ends a run of an odd number of them."""
        before = bytes(self._view[begin : place + 1])
        return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1

    def decoded(self, before: bytes, begin: int, end: int, behind: bytes) -> Any:
        """What the parser makes of a stretch, put between two brackets that the stretch lies inside of."""
        try:
            return msgspec.json.decode(b"".join((before, self._view[begin:end], behind)))
        except msgspec.MsgspecError as error:
            raise Malformed(_AT_BYTE.sub(_moved(begin - len(before)), str(error))) from None
        except UnicodeDecodeError:
            raise Malformed("it is not UTF-8") from None

    def _trimmed(self, begin: int, end: int) -> tuple[int, int]:
        """Without blanks at both ends, of which there may be megabytes."""
        while begin < end and not (found := _NOT_BLANK.search(self._text, begin, min(begin + _PIECE, end))):
            begin = min(begin + _PIECE, end)
        begin = found.start() if begin < end and found else end
        while begin < end:
            piece = self._text[max(begin, end - _PIECE) : end]
            kept = len(piece.rstrip(_BLANK))
            end -= len(piece) - kept
            if kept:
                break
        return begin, end


def _moved(offset: int) -> Callable[[re.Match[str]], str]:
    """For messages that name a place in a stretch, which the client knows as a part of the whole."""
    return lambda match: f" (byte {int(match[1]) + offset})"
