"""The multipart form of a transcription: its fields, typed, and the bytes of its file."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from bequest.server.context import Context
from bequest.server.transport.forms import check_form, parts
from bequest.server.transport.intake import BodyLimit, Patience, hold, of_caller
from bequest.server.wire import fields
from bequest.server.wire.errors import ApiError, invalid, missing
from bequest.server.wire.reading import shorten

_LONGEST_FIELD = 1 << 16  # bytes; a prompt's, by far the longest of them
_MOST_FIELDS = 64
_LISTS = ("timestamp_granularities", "include", "languages")
_INSIDE = re.compile(r"([^\[\]]+)\[([^\[\]]*)\]")  # of a list or an object: its name, and the place in it
_NUMBERS = ("temperature", "timeout")
_FLAGS = ("stream",)


class TranslationBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    response_format: str | None = None
    temperature: float | None = None
    timeout: float | None = None


class TranscriptionBody(TranslationBody, frozen=True, kw_only=True):
    language: str | None = None
    languages: list[str] | None = None
    timestamp_granularities: list[str] | None = None
    stream: bool = False
    include: list[str] | None = None
    chunking_strategy: str | dict[str, Any] | None = None  # advisory: the windows are the model's own


FormBody = TypeVar("FormBody", TranslationBody, TranscriptionBody)


def check_head(http: web.BaseRequest, context: Context) -> None:
    """What can be refused before the body is read."""
    check_form(http, "-F file=@speech.wav -F model=…", "most audio formats are already")
    of_caller(http, _limit(context)).check(http.content_length or 0)


async def read_form(http: web.Request, context: Context, body: type[FormBody]) -> tuple[FormBody, bytearray, list[str]]:
    """The typed fields, the file, and the names of the fields that were ignored."""
    check_head(http, context)
    raw, file = await _parts(http, of_caller(http, _limit(context)), Patience(context.config.client_timeout))
    if file is None:
        raise missing("file", "`file` is missing: send the audio as a file field (with curl: -F file=@speech.wav).")
    typed, ignored = fields.read(raw, body)
    return typed, file, ignored


async def _parts(http: web.Request, limit: BodyLimit, patience: Patience) -> tuple[dict[str, Any], bytearray | None]:
    raw: dict[str, Any] = {}
    file: bytearray | None = None
    received = 0
    async for part in parts(http, patience):
        name, is_file = part.name, part.name == "file"
        data = bytearray()
        async for piece in part.pieces:
            received += len(piece)
            limit.check(received)
            hold(http, received)
            data += piece
            if not is_file and len(data) > _LONGEST_FIELD:
                raise invalid(f"`{shorten(name)}` is longer than {_LONGEST_FIELD} bytes.", shorten(name))
        if is_file and file is not None:
            raise invalid("`file` is there twice; send one audio file per request.", "file")
        if is_file:
            file = data
        elif len(raw) < _MOST_FIELDS:
            _add(raw, name, data)
    return raw, file


def _add(raw: dict[str, Any], given: str, data: bytearray) -> None:
    """A field of the form; `name[]` is one of a list, `name[inner]` one of an object. One that is empty is the same as
    absent."""
    inside = _INSIDE.fullmatch(given)
    name, inner = (given, None) if inside is None else inside.groups()
    try:
        value = data.decode()
    except UnicodeDecodeError:
        raise invalid(f"`{shorten(name)}` is not UTF-8.", shorten(name)) from None
    if not value:
        return
    is_list = name in _LISTS or inner == ""
    held = raw.setdefault(name, [] if is_list else {}) if is_list or inner else None
    if isinstance(held, list) and is_list:
        held.append(value)
    elif isinstance(held, dict) and inner and inner not in held:
        held[inner] = value
    elif held is not None or name in raw:
        raise invalid(f"`{shorten(given)}` is there twice.", shorten(name))
    else:
        raw[name] = _typed(name, value)


def _typed(name: str, value: str) -> Any:
    if name in _NUMBERS:
        try:
            return float(value)
        except ValueError:
            message = f"`{name}` must be a number, not {shorten(repr(value))}."
            raise ApiError(400, "invalid_type", message, param=name) from None
    if name in _FLAGS:
        if value.lower() not in ("true", "false", "1", "0"):
            message = f"`{name}` must be true or false, not {shorten(repr(value))}."
            raise ApiError(400, "invalid_type", message, param=name)
        return value.lower() in ("true", "1")
    return value


def _limit(context: Context) -> BodyLimit:
    most = context.config.max_audio_mb
    return BodyLimit(int(most * 2**20), f"--max-audio-mb {most:g}")
