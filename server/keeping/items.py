"""Uploads → items: JSON, JSON lines or an array, checked such that every complaint names its item. Worker thread only.

Everything goes in pieces: a piece holds the interpreter for some milliseconds, and the engine takes its turns between.
"""

from __future__ import annotations

import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from bequest.engine.types import IntArray
from bequest.engine.types.catalogue import Catalogue
from bequest.server.wire.errors import ApiError, invalid, missing
from bequest.server.wire.reading import mismatch, shorten, why_malformed

LONGEST_ITEM = 4096  # tokens; the tree has a level for each
_LONGEST_TEXT = 32 * LONGEST_ITEM  # characters of an item that is text: it is not tokenised in vain
_ROWS = 1 << 16  # of an array, at once
_ITEMS = 1 << 12  # of a list, at once
# The engine's own threads have work to do meanwhile.
_BUILD_THREADS = max(1, (os.cpu_count() or 1) // 2)


class _Tokens(msgspec.Struct):
    tokens: list[int]


# Token ids, plain or in an object, or text, which is tokenised without special tokens.
Item = list[int] | _Tokens | str


class CatalogueBody(msgspec.Struct, forbid_unknown_fields=True):
    items: list[msgspec.Raw] | None = None  # of Item: decoded in pieces
    name: str | None = None


_FIELD = re.compile(r" field `(.*)`", re.DOTALL)  # that is missing, or not known
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_body_decoder = msgspec.json.Decoder(CatalogueBody)
_item_decoder = msgspec.json.Decoder(Item)


def parse_body(data: bytes | bytearray) -> CatalogueBody:
    """`{"name": …, "items": […]}`"""
    try:
        return _body_decoder.decode(data.removeprefix(BOM_UTF8))
    except _MALFORMED as error:
        raise _malformed(error) from None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What items are made of."""

    size: int
    end_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    def complaint(self, index: int, tokens: Sequence[int]) -> ApiError | None:
        """What is wrong with an item, if anything is."""
        param = f"items[{index}]"
        if not tokens:
            return invalid(f"{param}: an item has at least one token.", param)
        if len(tokens) > LONGEST_ITEM:
            return invalid(f"{param}: it has {len(tokens)} tokens; an item has at most {LONGEST_ITEM}.", param)
        for token in tokens:
            if not 0 <= token < self.size:
                message = f"{param}: token {shorten(str(token))} is outside the vocabulary of {self.size}."
                return invalid(message, param)
            if token in self.end_token_ids:
                message = f"{param}: token {token} ends an answer, so it cannot be part of an item; leave it out."
                return invalid(message, param)
        return None

    def wrong(self, tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Where `tokens` cannot be part of an item; same shape."""
        outside = (tokens < 0) | (tokens >= self.size)
        for end in self.end_token_ids:
            outside |= tokens == end
        return outside


@dataclass(slots=True)
class ItemList:
    """Items of any length, in the order in which they come."""

    vocabulary: Vocabulary
    _tokens: bytearray = field(default_factory=bytearray)  # int32, of all items
    _lengths: bytearray = field(default_factory=bytearray)  # int64

    def __len__(self) -> int:
        return len(self._lengths) // 8

    def add_lines(self, data: bytes | bytearray) -> None:
        """One JSON value per line; empty lines are passed over."""
        if not len(self):
            data = data.removeprefix(BOM_UTF8)  # as some programs begin a text
        try:
            items = _item_decoder.decode_lines(data)
        except _MALFORMED:
            self._add_until_malformed(data)
            raise AssertionError("a line is malformed") from None
        self._add_piece(items)

    def add(self, items: Sequence[msgspec.Raw]) -> None:
        for begin in range(0, len(items), _ITEMS):
            self._add_piece([_decoded(begin + i, item) for i, item in enumerate(items[begin : begin + _ITEMS])])

    def build(self) -> Catalogue:
        if not len(self):
            raise invalid("`items` is empty: a catalogue has at least one item.", "items")
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(np.frombuffer(self._lengths, np.int64), out=offsets[1:])
        tokens = np.frombuffer(self._tokens, np.int32)
        return Catalogue.from_ragged(tokens, offsets, self.vocabulary.size, _BUILD_THREADS)

    def _add_piece(self, items: Sequence[Item]) -> None:
        rows = [item if type(item) is list else self._tokens_of(item, len(self) + i) for i, item in enumerate(items)]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        try:
            tokens = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
            sound = lengths.all() and lengths.max(initial=0) <= LONGEST_ITEM and not self.vocabulary.wrong(tokens).any()
        except OverflowError:  # a number of more than 64 bits
            sound = False
        if not sound:
            complaints = (self.vocabulary.complaint(len(self) + i, row) for i, row in enumerate(rows))
            raise next(complaint for complaint in complaints if complaint is not None)
        self._tokens += tokens.astype(np.int32).tobytes()
        self._lengths += lengths.tobytes()

    def _tokens_of(self, item: Item, index: int) -> list[int]:
        if isinstance(item, str):
            if len(item) > _LONGEST_TEXT:
                param = f"items[{index}]"
                message = f"{param}: it has {len(item)} characters; an item that is text has at most {_LONGEST_TEXT}."
                raise invalid(message, param)
            return self.vocabulary.encode(item)
        return item.tokens if isinstance(item, _Tokens) else item

    def _add_until_malformed(self, data: bytes | bytearray) -> None:
        """Line by line: the first that is wrong, in whatever way, is the one to name."""
        for line in filter(bytes.strip, bytes(data).splitlines()):
            self._add_piece([_decoded(len(self), line)])


def build_array(items: IntArray, vocabulary: Vocabulary) -> Catalogue:
    """From rows [N, D] padded with -1."""
    for begin in range(0, len(items), _ROWS):
        rows = items[begin : begin + _ROWS]
        padding = rows == -1
        bad = (vocabulary.wrong(rows) & ~padding).any(1) | padding[:, 0]
        bad |= (padding[:, :-1] & ~padding[:, 1:]).any(1)
        if bad.any():
            first = int(bad.argmax())
            raise _array_complaint(begin + first, rows[first].tolist(), vocabulary)
    return Catalogue(items, vocabulary.size, _BUILD_THREADS)


def _array_complaint(index: int, row: list[int], vocabulary: Vocabulary) -> ApiError:
    tokens = row[: row.index(-1)] if -1 in row else row
    param = f"items[{index}]"
    behind = invalid(f"{param}: a token stands behind the padding (-1), which belongs at the end.", param)
    return vocabulary.complaint(index, tokens) or behind


def _decoded(index: int, item: bytes | msgspec.Raw) -> Item:
    try:
        decoded: Item = _item_decoder.decode(item)
    except _MALFORMED as error:
        raise _malformed(error, f"items[{index}]") from None
    return decoded


def _malformed(error: Exception, root: str = "") -> ApiError:
    """`root` is the path of what was decoded: the body itself, or one of its items."""
    if not isinstance(error, msgspec.ValidationError):
        message = f"{root or 'The body'} is not valid JSON: {why_malformed(error)}."
        return ApiError(400, "invalid_json", message, param=root or None)
    what, _, path = str(error).partition(" - at `$")
    field = _FIELD.search(what)
    where = (root + path.rstrip("`") + ("" if field is None else f".{shorten(field[1])}")).removeprefix(".")
    subject = f"`{where}`" if where else "The body"
    if field is None:
        message = f"{subject} {mismatch(what) or f'is wrong: {what}'}."
        return ApiError(400, "invalid_type", message, param=where or None)
    if what.startswith("Object missing"):
        return missing(where)
    names = " and ".join(f"`{name}`" for name in CatalogueBody.__struct_fields__)
    message = f"{subject} is not known here: the body has {names}; `replace` goes into the query."
    return ApiError(400, "unknown_parameter", message, param=where)
