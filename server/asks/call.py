"""How every request begins: its body is read and typed, its answer gets an id, its model must be served here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from bequest.server.access.key_file import KeyLimits
from bequest.server.access.marks import ANSWER_ID, CALLER, TENANT
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.intake import read_object
from bequest.server.wire import fields
from bequest.server.wire.names import new_id

AnyBody = TypeVar("AnyBody", bound=msgspec.Struct, covariant=True)
_Body = TypeVar("_Body", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Call(Generic[AnyBody]):
    """A request whose body has been read."""

    http: web.Request
    context: Context
    body: AnyBody
    id: str  # of the answer
    model: str  # as the answer names it
    ignored: tuple[str, ...]  # fields of the body that nobody reads

    @property
    def tenant(self) -> str:
        return self.http[TENANT]

    @property
    def limits(self) -> KeyLimits:
        """Those of the client's key."""
        return self.http[CALLER].limits

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        return fields.ignored_header(self.ignored)


async def begin(http: web.Request, kind: type[_Body], prefix: str) -> Call[_Body]:
    """Reads a JSON body; `prefix` is that of its answers' ids."""
    body, ignored = fields.read(await read_object(http, http.app[CONTEXT]), kind)
    return call_of(http, body, ignored, prefix)


def call_of(http: web.Request, body: _Body, ignored: list[str], prefix: str) -> Call[_Body]:
    """The same of a body that came otherwise. Raises 404 for a model that is not here."""
    context = http.app[CONTEXT]
    answer_id = http[ANSWER_ID] = new_id(prefix)
    context.metrics.spending.open(answer_id)
    model: str | None = getattr(body, "model", None)
    return Call(http, context, body, answer_id, context.served_name(model), tuple(ignored))
