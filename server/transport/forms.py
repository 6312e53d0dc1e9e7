"""Forms with a file in them (multipart/form-data), part by part as they come in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import BodyPartReader, web

from bequest.server.transport.intake import Patience
from bequest.server.wire.errors import ApiError, invalid

_PIECE = 1 << 18


def check_form(http: web.BaseRequest, curl: str, why_plain: str) -> None:
    """What can be refused before the body is read. `curl` is how that sends such a form, and `why_plain` says why it
    need not be compressed."""
    if http.content_type != "multipart/form-data":
        shown = http.headers.get("Content-Type", "none")[:100]
        message = f"The Content-Type must be multipart/form-data, not {shown}; with curl use {curl}."
        raise ApiError(415, "unsupported_media_type", message)
    if (encoding := http.headers.get("Content-Encoding", "identity")) != "identity":
        message = f"A form must not be compressed (Content-Encoding: {encoding[:100]}); {why_plain}."
        raise ApiError(415, "unsupported_media_type", message)


@contextmanager
def _well_formed() -> Iterator[None]:
    """aiohttp has several exceptions for a body that is cut off or wrongly framed."""
    try:
        yield
    except (ApiError, ConnectionError):
        raise
    except Exception as error:
        raise invalid("The body is not well-formed multipart/form-data.", None) from error


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    filename: str | None
    pieces: AsyncIterator[bytes]  # of its content, which is read before the next part is asked for


async def parts(http: web.Request, patience: Patience) -> AsyncIterator[Part]:
    with _well_formed():
        form = await http.multipart()
    while True:
        with _well_formed():
            async with patience.waiting():
                part = await form.next()
        if part is None:
            return
        if not isinstance(part, BodyPartReader) or part.name is None:
            raise invalid("Every part of the form needs a name, and none may hold a form of its own.", None)
        yield Part(part.name, part.filename, _pieces(part, patience))


async def _pieces(part: BodyPartReader, patience: Patience) -> AsyncIterator[bytes]:
    while True:
        with _well_formed():
            async with patience.waiting():
                piece: bytes = await part.read_chunk(_PIECE)
        if not piece:
            return
        patience.received(len(piece))
        yield piece
