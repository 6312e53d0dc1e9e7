"""What the fake engine retains: records without blocks, for everything a client can ask about them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from msgspec import structs

from bequest.engine.errors import DeadlineExceeded, EngineError, NameInUse, ParentExpired, ParentFailed, ParentNotFound
from bequest.engine.types import (
    ChoiceEntry,
    Delta,
    Grade,
    Inheritance,
    Parent,
    ParentChoice,
    RecordEntry,
    Request,
    Retained,
    Source,
)
from bequest.engine.types.record import GroupEntry

BLOCK = 16


@dataclass
class Record:
    request: Request
    sampled: list[list[int]]
    hidden: list[int]  # trailing tokens of each choice that were not shown
    created_at: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failed: bool = False
    named: bool = True  # whether it keeps its name from others
    expires_at: float | None = None
    children: int = 0

    def parent(self) -> Parent:
        prompt = self.request.prompt_token_ids
        choices = [
            ParentChoice((*prompt, *ids), len(prompt), len(prompt) + len(ids) - hidden)
            for ids, hidden in zip(self.sampled, self.hidden, strict=True)
        ]
        running = not self.ended.is_set()
        request = self.request
        return Parent(
            request.id,
            running,
            request.cache_salt,
            tuple(choices),
            request.terms.origin,
            request.encoder,
            request.adapter,
            images=request.images,
        )

    def entry(self) -> RecordEntry:
        grade: Grade = "warm" if self.expires_at is None else "leased"
        lineage = self.request.terms.lineage
        lengths = [len(choice.token_ids) for choice in self.parent().choices]
        return RecordEntry(
            self.request.id,
            self.request.terms.name,
            self.created_at,
            self.expires_at,
            grade if self.ended.is_set() else "running",
            None if lineage is None else lineage.parent,
            None if lineage is None else lineage.at,
            self.children,
            tuple(ChoiceEntry(i, tokens, -(-tokens // BLOCK), 0) for i, tokens in enumerate(lengths)),
            (GroupEntry("full", None, 2, 64), GroupEntry("window", 8, 1, 32), GroupEntry("state", None, 3, 30)),
            None if self.request.adapter is None else self.request.adapter.name,
        )


class FakeRecords:
    """The engine's side of continuation. `hidden` tokens at the end of an answer count as not shown."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Record] = {}
        self.expired: dict[tuple[str, str], float] = {}
        self.hidden = 0
        self.outgrown: str | None = None  # why no lease is granted in the end
        self.refused_ttl: EngineError | None = None
        self.num_changes = 0  # by `set_ttl` and `forget`
        self.num_written = 0  # of them, that somebody waited for

    # --- called by the fake engine

    def begin(self, request: Request) -> None:
        taken = self.found.get((request.tenant, request.terms.name)) if request.terms.name else None
        if taken is not None and taken.named:
            status = "retained" if taken.ended.is_set() else "running"
            details = {"id": taken.request.id, "status": status}
            raise NameInUse("The name is taken.", field="name", details=details)
        if request.terms.lineage is not None and (parent := self._by_id(request.tenant, request.terms.lineage.parent)):
            parent.children += 1
        n = request.params.n
        if request.terms.keep_record:
            record = Record(request, [[] for _ in range(n)], [0] * n, created_at=1000.75 + len(self.found))
            self.found[request.tenant, request.id] = record
            if request.terms.name:
                self.found[request.tenant, request.terms.name] = record

    def follow(self, request: Request, delta: Delta, first: bool) -> Delta:
        """What the engine adds to a delivery."""
        record = self._by_id(request.tenant, request.id)
        if record is not None:
            for choice in () if request.suffixes else delta.choices:  # what is scored is nobody's
                record.sampled[choice.index] += choice.token_ids
                if choice.finish_reason == "stop":
                    record.hidden[choice.index] = self.hidden
            if delta.finished:
                record.ended.set()
                record.failed = delta.error is not None
        lineage, length = request.terms.lineage, len(request.prompt_token_ids)
        if first and lineage is not None:
            inherited = min(lineage.at, length - 1)
            source: Source = "blocks" if lineage.at else "recompute"
            taken = Inheritance(lineage.parent, lineage.at, inherited, length - inherited, source)
            delta = structs.replace(delta, inheritance=taken)
        if delta.usage is not None and request.terms.retain is not None and record is not None:
            if self.outgrown is not None:
                return structs.replace(delta, retention_lost=self.outgrown)
            record.expires_at = time.time() + request.terms.retain.ttl
            tokens = sum(length + len(ids) for ids in record.sampled)
            return structs.replace(delta, retained=Retained(request.id, record.expires_at, tokens, -(-tokens // BLOCK)))
        return delta

    def abandon(self, request: Request) -> None:
        record = self._by_id(request.tenant, request.id)
        if record is not None:
            record.named = False
            record.ended.set()

    # --- EngineLike

    def find(self, tenant: str, reference: str) -> Record:
        record = self.found.get((tenant, reference))
        if record is not None:
            return record
        if (tenant, reference) in self.expired:
            details = {"expired_at": int(self.expired[tenant, reference])}
            raise ParentExpired(f"The request '{reference}' has expired.", details=details)
        raise ParentNotFound(f"There is no request '{reference}'.", reason="parent_unknown", reference=reference)

    def parent(self, tenant: str, reference: str) -> Parent:
        return self.find(tenant, reference).parent()

    async def seek(self, tenant: str, reference: str) -> None:
        """It has no store."""

    async def reach(self, tenant: str, reference: str, choice: int) -> None:
        """It has no files."""

    async def parent_ended(self, tenant: str, reference: str, deadline: float | None) -> Parent:
        record = self.find(tenant, reference)
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await record.ended.wait()
        except TimeoutError:
            raise DeadlineExceeded("The parent still ran at the timeout.", field="deadline") from None
        if record.failed:
            raise ParentFailed(f"The request '{reference}' failed.")
        return record.parent()

    def free_name(self, tenant: str, reference: str) -> None:
        if record := self.found.get((tenant, reference)):
            record.named = not record.ended.is_set()

    def record_names(self, tenant: str) -> list[tuple[str, str | None]]:
        owned = {id(record): record for (owner, _), record in self.found.items() if owner == tenant}
        return [(record.request.id, record.request.terms.name) for record in owned.values()]

    def record(self, tenant: str, reference: str) -> RecordEntry:
        return self.find(tenant, reference).entry()

    def set_ttl(self, tenant: str, reference: str, ttl: float | None) -> RecordEntry:
        record = self.find(tenant, reference)
        if self.refused_ttl is not None:
            raise self.refused_ttl
        record.expires_at = None if ttl is None else time.time() + ttl
        self.num_changes += 1
        return record.entry()

    def prefetch(self, tenant: str, reference: str) -> RecordEntry:
        return self.record(tenant, reference)

    async def written(self) -> None:
        await asyncio.sleep(0)
        self.num_written = self.num_changes

    def forget(self, tenant: str, reference: str) -> str:
        record = self.find(tenant, reference)
        self.num_changes += 1
        self.found = {key: kept for key, kept in self.found.items() if kept is not record}
        return record.request.id

    def _by_id(self, tenant: str, record_id: str) -> Record | None:
        return self.found.get((tenant, record_id))
