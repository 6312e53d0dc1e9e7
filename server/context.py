"""What every handler needs, built once by make_app."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import web

from bequest.engine.config import ServerConfig
from bequest.engine.errors import EngineError, ParentLost
from bequest.engine.text.foreign_template import TemplateRenderer
from bequest.engine.types.adapter import AdapterRef
from bequest.server.access.admission import Admission
from bequest.server.access.auth import Gate
from bequest.server.access.in_flight import InFlight
from bequest.server.access.keys import Caller
from bequest.server.access.threads import DaemonThreads
from bequest.server.access.turns import Entrance, FairPool
from bequest.server.interfaces import EngineLike, TextLike
from bequest.server.operation.metrics import Metrics
from bequest.server.operation.tracing import Tracing
from bequest.server.stores.batches import Disk
from bequest.server.stores.catalogues import CatalogueStore
from bequest.server.stores.coming import Coming
from bequest.server.stores.grammars import GrammarStore
from bequest.server.stores.images import ImageStore, RecentContents
from bequest.server.stores.leases import LeaseTimes
from bequest.server.stores.response_file import ResponseFile
from bequest.server.stores.response_rows import RunsElsewhere
from bequest.server.stores.responses import ResponseStore, RunningResponse, RunningResponses, StoredResponse
from bequest.server.stores.room import Room
from bequest.server.stores.speech import Speech
from bequest.server.wire.errors import ApiError
from bequest.server.wire.replicas import misdirected


@dataclass(frozen=True, slots=True)
class Context:
    engine: EngineLike
    text: TextLike
    config: ServerConfig
    leases: LeaseTimes
    gate: Gate
    admission: Admission
    in_flight: InFlight
    tracing: Tracing
    metrics: Metrics
    model_names: tuple[str, ...]
    stored: ResponseStore
    archive: ResponseFile | None  # of these, where they outlive the process
    catalogues: CatalogueStore
    grammars: GrammarStore
    fingerprint: str  # of what answers: another one may answer otherwise to the same seed
    templates: TemplateRenderer  # of those that requests bring
    entrance: Entrance
    pool: FairPool  # for what would hold the event loop up: long texts
    builder: FairPool  # for catalogues: they take seconds, and the memory of many at once would add up
    speech: Speech | None  # of a model that hears
    recent: RecentContents  # images, and rows of requests, that may come again
    images: ImageStore | None  # of a model that sees
    encoder: DaemonThreads  # for hidden states: much arithmetic on few requests
    room: Room  # for their memory
    disk: Disk | None  # files and batches
    coming: Coming = field(default_factory=Coming)
    running: RunningResponses = field(default_factory=RunningResponses)
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def states_budget(self) -> int:
        """Bytes of hidden states that one request may come to hold."""
        limits = self.engine.extraction_limits
        return min(limits.max_request_bytes, limits.max_bytes)

    def holds(self, tenant: str, reference: str) -> bool:
        """Whether there is a response here, or something to continue from."""
        if self._response(tenant, reference) is not None:
            return True
        with suppress(EngineError):
            self.engine.parent(tenant, reference)
            return True
        return False

    async def seek_response(self, tenant: str, reference: str) -> None:
        """One that another server has left is stored here from now on, and its lease with it: parted, neither server
        could go on from both. Raises 421 where a server that runs has the response, or has its lease already."""
        if self._response(tenant, reference) is not None or self.archive is None:
            return
        try:
            await self.archive.check(tenant, reference)
            with suppress(ParentLost):  # who continues from it will hear
                await self.engine.seek(tenant, reference)
            found = await self.archive.seek(tenant, reference)
        except RunsElsewhere as error:
            raise misdirected(reference, error.owner) from None
        if found is not None:
            self.stored.restore([found])

    def _response(self, tenant: str, reference: str) -> StoredResponse | RunningResponse | None:
        return self.stored.get(tenant, reference) or self.running.get(tenant, reference)

    def served_name(self, model: str | None, caller: Caller) -> str:
        """The name to answer with; raises 404 for a model that is not here, or not for the caller."""
        if model is None:
            return self.model_names[0]
        self.adapter(model, caller)
        return model

    def adapter(self, model: str, caller: Caller) -> AdapterRef | None:
        """The adapter of this name; None: it is the model itself. Raises 404 where the caller may not use it, too."""
        if model in self.model_names:
            return None
        ref = self.engine.adapters.find(model)
        if ref is None or not caller.may_use(model):
            raise unknown_model(model, self.names_for(caller))
        return ref

    def created(self, name: str) -> int:
        """Seconds since 1970: the model is as old as the server, an adapter as its load."""
        ref = None if name in self.model_names else self.engine.adapters.find(name)
        return self.started if ref is None else int(ref.loaded_at)

    def adapters_for(self, caller: Caller) -> list[AdapterRef]:
        return [ref for ref in self.engine.adapters.refs if caller.may_use(ref.name)]

    def names_for(self, caller: Caller) -> tuple[str, ...]:
        """All that the caller may name as `model`."""
        return (*self.model_names, *(ref.name for ref in self.adapters_for(caller)))


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
_MOST_NAMES = 8  # that a refusal lists


def unknown_model(model: str, served: tuple[str, ...]) -> ApiError:
    names = ", ".join(f"'{name}'" for name in served[:_MOST_NAMES])
    if len(served) > _MOST_NAMES:
        names += f" and {len(served) - _MOST_NAMES} more (GET /v1/models)"
    shown = model if len(model) <= 100 else model[:99] + "…"
    message = f"The model '{shown}' does not exist here; this server serves {names}."
    return ApiError(404, "model_not_found", message, param="model")
