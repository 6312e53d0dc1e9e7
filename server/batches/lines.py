"""The lines of a batch's input: checked before any of them runs, and read again one by one. For worker threads."""

from __future__ import annotations

import sys
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bequest.server.wire.reading import describe, shorten

_MOST_ERRORS = 50  # that are told of one file
_LONGEST_ID = 512  # characters of a custom_id
_PIECE = 1 << 20


class Line(msgspec.Struct, frozen=True):
    """One request."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _AnyLine(msgspec.Struct, frozen=True):
    """A line before anything is known of it."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class Lines:
    """Where each line begins and ends in the file. Empty lines are none."""

    path: Path
    starts: array[int]
    ends: array[int]

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, index: int) -> Line:
        """REQUIRES: the file was checked"""
        with self.path.open("rb") as file:
            file.seek(self.starts[index])
            return msgspec.json.decode(file.read(self.ends[index] - self.starts[index]), type=Line)

    def custom_ids(self) -> Iterator[str]:
        """Of all lines, in their order."""
        with self.path.open("rb", buffering=_PIECE) as file:
            for start, end in zip(self.starts, self.ends, strict=True):
                file.seek(start)
                yield msgspec.json.decode(file.read(end - start), type=Line).custom_id


class WrongLines(Exception):
    """The input cannot be run. `errors` says why, as a batch shows it."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__(errors[0]["message"])
        self.errors = errors


@dataclass(frozen=True, slots=True)
class LineLimits:
    lines: int = sys.maxsize
    line_bytes: int = sys.maxsize


def checked_lines(path: Path, endpoint: str, limits: LineLimits) -> Lines:
    """Raises WrongLines or OSError."""
    starts, ends = array("q"), array("q")
    seen: dict[str, int] = {}
    errors: list[dict[str, Any]] = []
    at = 0
    with path.open("rb", buffering=_PIECE) as file:
        for number, text in enumerate(file, 1):
            if number == 1 and text.startswith(BOM_UTF8):  # as some programs begin a text
                at, text = len(BOM_UTF8), text[len(BOM_UTF8) :]
            if text.strip():
                starts.append(at)
                ends.append(at + len(text))
                errors += _errors(text, number, endpoint, limits, seen)
            at += len(text)
            if len(errors) >= _MOST_ERRORS or len(starts) > limits.lines:
                break
    if len(starts) > limits.lines:
        told = f"The file has more than {limits.lines} lines (--max-batch-lines); split it into several batches."
        errors.insert(0, _error("too_many_lines", told))
    elif not starts:
        errors.append(_error("empty_file", "The file has no lines."))
    if errors:
        raise WrongLines(errors)
    return Lines(path, starts, ends)


def _errors(
    text: bytes, number: int, endpoint: str, limits: LineLimits, seen: dict[str, int]
) -> Iterator[dict[str, Any]]:
    if len(text) > limits.line_bytes:
        told = f"Line {number} is longer than a request may be: {limits.line_bytes} bytes (--max-body-mb)."
        yield _error("line_too_large", told, line=number)
        return
    try:
        line = msgspec.json.decode(text, type=_AnyLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        yield _error("invalid_json_line", f"Line {number} is not a JSON object.", line=number)
        return
    if not isinstance(line.custom_id, str) or not 0 < len(line.custom_id) <= _LONGEST_ID:
        told = f"`custom_id` must be a string of 1 to {_LONGEST_ID} characters, not {describe(line.custom_id)}."
        yield _error("invalid_custom_id", f"Line {number}: {told}", "custom_id", number)
    elif (before := seen.setdefault(line.custom_id, number)) != number:
        told = f"Line {number}: `custom_id` {shorten(repr(line.custom_id))} is that of line {before}, too."
        yield _error("duplicate_custom_id", told, "custom_id", number)
    if line.method != "POST":
        told = f"Line {number}: `method` must be 'POST', not {describe(line.method)}."
        yield _error("invalid_method", told, "method", number)
    if line.url != endpoint:
        told = f"Line {number}: `url` must be the batch's endpoint '{endpoint}', not {describe(line.url)}."
        yield _error("invalid_url", told, "url", number)
    if not bytes(line.body).lstrip().startswith(b"{"):
        yield _error("invalid_body", f"Line {number}: `body` must be an object.", "body", number)


def _error(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
