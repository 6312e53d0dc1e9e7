"""How every request begins: its body is read and typed, its answer gets an id, its model must be served here."""

from __future__ import annotations

from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from bequest.engine.errors import EngineError, ParentElsewhere, ParentLost
from bequest.engine.types.adapter import AdapterRef
from bequest.server.access.key_file import KeyLimits
from bequest.server.access.keys import Caller
from bequest.server.access.marks import ANSWER_ID, ARRIVED, CALLER
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.intake import read_body
from bequest.server.wire import fields, replicas
from bequest.server.wire.bodies import HiddenStatesBody, SampledBody
from bequest.server.wire.names import is_name, new_id

COUNT_PREFIX = "req-"  # of the ids of answers that only count

AnyBody = TypeVar("AnyBody", bound=msgspec.Struct, covariant=True)
_Body = TypeVar("_Body", bound=msgspec.Struct)


class Call(msgspec.Struct, Generic[AnyBody], frozen=True):
    """A request whose body has been read, however it came."""

    context: Context
    body: AnyBody
    id: str  # of the answer
    model: str  # as the answer names it
    caller: Caller
    arrived: float  # time.monotonic

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    @property
    def adapter(self) -> AdapterRef | None:
        """Of the model; raises 404 where the client may not use it."""
        return self.context.adapter(self.model, self.caller)

    @property
    def limits(self) -> KeyLimits:
        """Those of the client's key."""
        return self.caller.limits

    @property
    def owner_gone(self) -> bool:
        """Whether a router knows that the server that made the parent's id does not run."""
        return False


class HttpCall(Call[AnyBody], frozen=True):
    """One that came over HTTP, where its answer goes too."""

    http: web.Request
    ignored: tuple[str, ...]  # fields of the body that nobody reads

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        told = fields.ignored_header(self.ignored) | self._record_header()
        return told if self.context.config.replica_tag is None else told | self._name_header() | self._holds_header()

    @property
    def owner_gone(self) -> bool:
        return replicas.is_owner_gone(self.http.headers)

    @property
    def _leaves_record(self) -> bool:
        """Encoders leave none, nor do answers that are counts."""
        body = self.body
        if not isinstance(body, SampledBody | HiddenStatesBody) or self.id.startswith(COUNT_PREFIX):
            return False
        return body.store is not False and getattr(body, "stack", None) != "encoder"

    def _record_header(self) -> dict[str, str]:
        """What stays here, for a router that reads no answers."""
        return {replicas.RECORD_HEADER: self.id} if self._leaves_record else {}

    def _name_header(self) -> dict[str, str]:
        """The client's own name for it, for a router that has to find it again."""
        name: str | None = getattr(self.body, "request_id", None)
        return {replicas.NAME_HEADER: name} if self._leaves_record and name is not None and is_name(name) else {}

    def _holds_header(self) -> dict[str, str]:
        """A parent that is here, though nothing in its id says so."""
        parent = _parent_of(self.body)
        if parent is None or not is_name(parent) or replicas.tag_of(parent) == self.context.config.replica_tag:
            return {}
        # A fallback was computed because it is not here.
        return {replicas.HOLDS_HEADER: parent} if self.context.holds(self.tenant, parent) else {}


async def begin(http: web.Request, kind: type[_Body], prefix: str) -> HttpCall[_Body]:
    """Reads a JSON body; `prefix` is that of its answers' ids."""
    context = http.app[CONTEXT]
    body, ignored = await read_body(http, context, kind)
    await seek(context, http[CALLER].tenant, body)
    return call_of(http, body, ignored, prefix)


async def seek(context: Context, tenant: str, body: msgspec.Struct) -> None:
    """What another server has left is here from now on, if the request needs it. Raises 421 where that one runs."""
    if (parent := _parent_of(body)) is None:
        return
    if getattr(body, "previous_response_id", None) is None:
        with suppress(ParentLost):  # who continues from it will hear
            await context.engine.seek(tenant, parent)
        return
    await context.seek_response(tenant, parent)
    with suppress(ParentLost, ParentElsewhere):  # its items are here, of which all can be computed
        await context.engine.seek(tenant, parent)


def call_of(http: web.Request, body: _Body, ignored: list[str], prefix: str) -> HttpCall[_Body]:
    """The same of a body that came otherwise. Raises 404 for a model that is not here."""
    context = http.app[CONTEXT]
    replicas.check_parent_header(http.headers, _parent_of(body))
    answer_id = http[ANSWER_ID] = new_id(prefix, context.config.replica_tag)
    context.metrics.spending.open(answer_id)
    served = served_model(context, http[CALLER], body)
    return HttpCall(context, body, answer_id, served, http[CALLER], http[ARRIVED], http, tuple(ignored))


def served_model(context: Context, caller: Caller, body: msgspec.Struct) -> str:
    """The name to answer with; raises 404 for a model that is not here, or not for the caller."""
    model: str | None = getattr(body, "model", None)
    if model is None:
        model = _model_of_parent(context, caller.tenant, body)
    return context.served_name(model, caller)


def _parent_of(body: msgspec.Struct) -> str | None:
    reference: str | None = getattr(body, "continuation_of", None) or getattr(body, "previous_response_id", None)
    return reference


def _model_of_parent(context: Context, tenant: str, body: msgspec.Struct) -> str | None:
    """A request that names no model has its parent's adapter, also one that falls back because that parent is gone.
    Whether there is a parent is another's question."""
    reference = _parent_of(body)
    if reference is None:
        return None
    try:
        adapter = context.engine.parent(tenant, reference).adapter
    except EngineError as error:
        stored = context.stored.get(tenant, reference)
        known = error.facts.get("adapter") if stored is None else stored.adapter
        return known if isinstance(known, str) else None
    return None if adapter is None else adapter.name
