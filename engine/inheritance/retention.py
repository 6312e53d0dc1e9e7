"""Who may be continued from: the records of running and finished requests, by id and by name.

Owned by the event-loop thread; no asyncio; clocks are passed in. Nothing here only grows: leases are bounded by their
budget, other records by their number (least recently used first out), and of what has gone the last ids are remembered,
so that a late child hears that its parent has expired rather than that it never was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from bequest.engine._C import BlockEpochs, BlockPool, BlockTable, TokenList
from bequest.engine.cache.cross import CrossTables
from bequest.engine.cache.salt import pack_salt
from bequest.engine.cache.states import Stateless, States
from bequest.engine.errors import (
    ContinuationMismatch,
    EngineError,
    NameInUse,
    ParentExpired,
    ParentFailed,
    ParentLost,
    ParentNotFound,
)
from bequest.engine.inheritance.books import FileBooks
from bequest.engine.inheritance.budget import LeaseBudget
from bequest.engine.inheritance.estate_images import check_size
from bequest.engine.inheritance.leases import OPEN_ENDED_TOKENS, Borrowed, Leases
from bequest.engine.inheritance.state_leases import StateLeases
from bequest.engine.inheritance.tallies import Tallies
from bequest.engine.state.contents import Contents
from bequest.engine.state.corpus import Corpus
from bequest.engine.state.record import Identity, KeptBeams, KeptChoice, Living, Record
from bequest.engine.state.sequence import Group, Sequence
from bequest.engine.types import Grade, GradeLoad, Lineage, Request, Retained
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.estate import Manifest
from bequest.engine.types.image import Image
from bequest.engine.types.recurrent import StateSizes

_MOST_GONE = 8192  # ids and names that are remembered as expired


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    budget_blocks: int = 0  # of leases, on the device and on the host
    budget_per_tenant: int = 0
    max_leases: int | None = None  # per tenant
    max_records: int = 1024  # without a lease
    states: StateSizes | None = None  # of a model with recurrent layers
    file_blocks: int = 0  # that leases may have in files
    rows_of_state: int = 0  # of the size of a block, that a state of recurrent layers takes there
    block_bytes: int = 0


class Settlement(msgspec.Struct, frozen=True):
    """What became of the lease that a request asked for."""

    retained: Retained | None = None
    lost: str | None = None  # why there is none


class Retention:
    def __init__(
        self,
        limits: RetentionLimits,
        pool: BlockPool,
        wall: Callable[[], float],
        states: States | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        budget = LeaseBudget(limits.budget_blocks, limits.budget_per_tenant, limits.max_leases)
        self.cross = CrossTables(pool)
        self.states = Stateless() if states is None else states
        self.leases = Leases(budget, pool, self.cross, StateLeases(self.states, limits.states), wall)
        self.contents = Contents()  # of images that records and requests have
        self.books = FileBooks(limits.file_blocks, limits.block_bytes)
        self.on_discard: Callable[[Record], None] = lambda record: None  # its lease in files is over
        self.is_torn: Callable[[str, str], bool] = lambda tenant, reference: False  # files had it, and are broken
        # Of a lease in files that can be continued when it is loaded.
        self.awaited_adapter: Callable[[str, str], str | None] = lambda tenant, reference: None
        self._limits = limits
        self._pool = pool
        self._corpus = corpus
        self.wall = wall
        self._found: dict[tuple[str, str], Record] = {}  # by (tenant, id) and (tenant, name)
        self._others: OrderedDict[Record, None] = OrderedDict()  # without a lease, least recently used first
        self._tallies = Tallies(pool)
        self._gone: OrderedDict[tuple[str, str], tuple[float, str | None]] = OrderedDict()  # → when, of which adapter

    # --- finding -------------------------------------------------------------------------------------------------

    def get(self, tenant: str, reference: str) -> Record | None:
        return self._found.get((tenant, reference))

    def find(self, tenant: str, reference: str) -> Record:
        record = self.get(tenant, reference)
        if record is not None:
            return record
        if (gone := self._gone.get((tenant, reference))) is not None:
            expired_at, adapter = gone
            raise ParentExpired(
                f"The request '{reference}' is not retained any more.",
                reason="parent_expired",
                details={"expired_at": int(expired_at)},
                reference=reference,
                adapter=adapter,
            )
        if self.is_torn(tenant, reference):
            raise ParentLost(f"The lease '{reference}' is lost.", reason="parent_lost", id=reference)
        if (adapter := self.awaited_adapter(tenant, reference)) is not None:
            message = f"The lease '{reference}' is of the adapter '{adapter}', which is not loaded."
            raise ParentNotFound(message, reason="parent_of_adapter", reference=reference, adapter=adapter)
        raise ParentNotFound(f"There is no request '{reference}'.", reason="parent_unknown", reference=reference)

    def of(self, tenant: str) -> list[Record]:
        """All that the tenant has, oldest first."""
        records = {record for (owner, _), record in self._found.items() if owner == tenant}
        return sorted(records, key=lambda record: (record.identity.created_at, record.id))

    def others(self) -> Iterator[Record]:
        """Those without a lease that have ended, most recently used first."""
        return reversed(self._others)

    def computed_with(self, adapter: AdapterRef) -> list[Record]:
        """All records of an adapter, of all tenants: every record is looked at."""
        return [record for record in {*self._found.values()} if record.identity.adapter == adapter]

    def loads(self) -> dict[Grade, GradeLoad]:
        return self._tallies.loads()

    # --- while a request runs ------------------------------------------------------------------------------------

    def open(self, group: Group) -> None:
        """Gives a group that is about to run its record, and a hold on its parent's.

        Raises NameInUse, RetentionTooLarge, InsufficientRetention or ContinuationMismatch, with nothing changed.
        """
        request = group.request
        lineage = request.terms.lineage
        parent = None if lineage is None else self.get(request.tenant, lineage.parent)
        if parent is not None:
            _check_adapter(request, parent)
        if lineage is not None and lineage.at and parent is not None and parent.lost:
            raise ParentLost(f"The lease '{parent.id}' is lost.", reason="parent_lost", id=parent.id)
        if request.terms.keep_record and group.kind.keeps_record:
            self._check_name(request.tenant, request.terms.name)
            record = Record(self._identify(group), group)
            if request.terms.retain is not None:
                if request.terms.retain.open_ended:
                    group.ties.charged_output = OPEN_ENDED_TOKENS
                self.leases.promise(record, group, request.terms.retain.ttl, parent)
                if request.terms.retain.durable:
                    self._promise_files(record, group)
            group.ties.record = record
            self._list(record)
        if parent is not None:
            self._attach(group, parent)

    def keep(self, sequence: Sequence) -> None:
        """A sequence has ended: its tokens and blocks become the record's. It has no blocks afterwards."""
        self._give_parent_more(sequence)
        record = sequence.group.ties.record
        if record is None or record.gone or record.failed:
            sequence.table.free()
            self.states.let_go(sequence)
            return
        # A step launched past the end has computed more than the plain loop would have: it does not count. The last
        # token has KV where its hidden state was wanted.
        with_last = sequence.capture is not None and sequence.capture.covers_last
        full = max(sequence.num_prompt, len(sequence.tokens) - (0 if with_last else 1))
        computed = min(sequence.num_computed, full)
        complete = sequence.output.finish_reason is not None
        table = sequence.table
        table.truncate(computed)
        if complete and record.lease.ttl is not None:
            table.keep_for_lease(sequence.num_prompt)
            table.slide(computed)
        states = self.states.end(sequence, computed)
        kept = KeptChoice(
            tokens=sequence.tokens,
            num_prompt=sequence.num_prompt,
            shown_len=sequence.num_prompt + sequence.output.shown_len,
            computed=computed,
            salt=record.salt,
            table=None,
            epochs=table.epochs(),
        )
        record.kept[sequence.choice] = kept
        if complete and computed < full:
            self.leases.give_up(record, "its time was up while its blocks were with more urgent requests")
        if complete and record.lease.ttl is not None:
            sequence.table = BlockTable(self._pool, record.salt)
            self.leases.hold(record, kept, table, states)
        else:
            table.free()
            self.states.drop(states)

    def keep_beams(self, group: Group, beams: KeptBeams) -> None:
        """A search that has no lease has ended. Its blocks are not held here."""
        record = group.ties.record
        if record is not None and not record.gone and not record.failed:
            record.kept_beams = beams

    def close(self, group: Group, complete: bool, now: float) -> Settlement:
        """The group has ended, `complete` or not: its lease is granted, or given up. Idempotent."""
        record, group.ties.record = group.ties.record, None
        self._detach(group)
        if record is None:
            return Settlement()
        record.group = None
        record.aborted = not complete
        retained = None
        if complete and record.lease.ttl is not None and not record.gone:
            retained = self.leases.grant(record, now)
        else:
            self.leases.give_up(record, "the request did not finish")
            self.books.settle(record)
        record.failed = record.failed or record.holds_nothing
        if not record.gone and retained is None:
            self._add_other(record)
        if not record.gone:
            self._tallies.add(record)
            if self._corpus is not None:
                self._corpus.learn(record, group.ties.cached_tokens)
        for wake in record.waiters:
            wake()
        record.waiters.clear()
        return Settlement(retained, record.lease.lost)

    # --- what comes from elsewhere -------------------------------------------------------------------------------

    def check_new(self, tenant: str, references: Iterable[str]) -> None:
        """Raises NameInUse if one of the tenant's records is found by one of them."""
        for reference in references:
            self._check_name(tenant, reference)

    def adopt(self, record: Record, owned: Borrowed, num_blocks: int, ttl: float, now: float) -> None:
        """A record whose blocks another engine computed is leased from now on. REQUIRES: `num_blocks` were promised."""
        self.check_new(record.tenant, record.identity.references)
        self.leases.grant_import(record, owned, num_blocks, ttl, now)
        self._list(record)
        if self._corpus is not None:
            self._corpus.learn(record, 0)

    def restore(
        self,
        manifest: Manifest,
        origin: object,
        adapter: AdapterRef | None,
        images: tuple[Image, ...] = (),
        *,
        lost: bool,
        now: float,
    ) -> None:
        """A lease of an earlier process is found again; its blocks are in files. `images`: whose ids its tokens have
        here."""
        deed, tenant = manifest.deed, manifest.deed.identity.tenant
        encoder = None if deed.encoder is None else deed.encoder.as_input()
        identity = Identity(
            id=deed.id,
            tenant=tenant,
            name=deed.name,
            salt=pack_salt(tenant, deed.cache_salt, encoder, adapter),
            cache_salt=deed.cache_salt,
            created_at=deed.created_at,
            origin=origin,
            lineage=None if deed.parent is None else Lineage(deed.parent, deed.parent_choice, deed.at),
            num_choices=deed.num_choices,
            adapter=adapter,
            encoder=encoder,
            images=images,
        )
        record = Record(identity, stored=manifest, lost=lost)
        for choice in deed.choices:
            record.kept[choice.index] = KeptChoice(
                tokens=TokenList(choice.token_ids),
                num_prompt=choice.num_prompt,
                shown_len=choice.shown_len,
                computed=choice.computed,
                salt=identity.salt,
                table=None,
                epochs=BlockEpochs(),
            )
        self.books.enter(manifest)
        self.leases.restore(record, manifest.expires_at - self.wall(), now)
        self._list(record)

    # --- what its owner asks for ---------------------------------------------------------------------------------

    def set_ttl(self, record: Record, ttl: float | None, now: float) -> None:
        """Counts from now, and makes a lease of a record that is none; None makes it warm."""
        if record.failed and ttl is not None:
            raise ParentFailed(
                f"The request '{record.id}' ended before anything was computed.",
                reason="nothing_to_lease",
                id=record.id,
            )
        if record.group is not None:
            self._set_ttl_of_running(record, record.group, ttl)
        elif ttl is None:
            self.leases.end(record)
            self._discard_if_free(record)
            self._add_other(record)
        else:
            self.leases.revive(record)
            self.leases.set_expiry(record, ttl, now)
            self._others.pop(record, None)
        self._tallies.add(record)

    def forget(self, record: Record) -> None:
        """Nobody finds it any more. Its blocks stay as long as open children were promised them."""
        self._unlist(record)
        self._others.pop(record, None)
        if record.group is not None:
            self.leases.give_up(record, "the record was deleted")
        else:
            self.leases.end(record)
            self._discard_if_free(record)

    def free_name(self, record: Record) -> None:
        """It has ended, but was a part of something that has not: another request may have its name."""
        record.aborted = record.aborted or record.group is None

    def expire(self, now: float) -> None:
        while (record := self.leases.pop_expired(now)) is not None:
            self.expire_record(record)

    def expire_record(self, record: Record) -> None:
        """Forgets it, and remembers that it was here."""
        self._remember_gone(record)
        self.forget(record)

    # --- inside --------------------------------------------------------------------------------------------------

    def _identify(self, group: Group) -> Identity:
        request = group.request
        return Identity(
            id=request.id,
            tenant=request.tenant,
            name=request.terms.name,
            salt=group.salt,
            cache_salt=request.cache_salt,
            created_at=self.wall(),
            origin=request.terms.origin,
            lineage=request.terms.lineage,
            num_choices=request.params.n,
            encoder=request.encoder,
            images=request.images,
            adapter=request.adapter,
        )

    def _give_parent_more(self, sequence: Sequence) -> None:
        """An extraction has computed what its parent had no KV of, its last token that is: it stays with it, and
        whoever continues from there does not compute it again."""
        group, lineage = sequence.group, sequence.group.request.terms.lineage
        if group.parent is None or lineage is None or group.parent.gone or not group.kind.hands_over:
            return
        kept = group.parent.kept.get(lineage.choice)
        if kept is None or not sequence.table.resident or group.parent.encoder != group.request.encoder:
            return
        alike = kept.tokens.common_prefix(sequence.tokens)
        computed = min(sequence.num_computed, lineage.at, alike)
        if computed > kept.computed:
            self.leases.replace(group.parent, kept, sequence.table.slice_to(computed), computed)

    def _check_name(self, tenant: str, name: str | None) -> None:
        taken = None if name is None else self.get(tenant, name)
        if taken is None or (taken.group is None and taken.aborted):
            return
        running = taken.group is not None
        raise NameInUse(
            f"The name '{name}' is that of the request {taken.id}.",
            reason="name_of_running" if running else "name_of_retained",
            field="name",
            details={"id": taken.id, "status": "running" if running else "retained"},
            name=name,
        )

    def _attach(self, child: Group, parent: Record) -> None:
        """A child is open: a lease keeps its blocks for it, even if the lease ends meanwhile."""
        parent.children += 1
        self.leases.touch(parent)
        if parent in self._others:
            self._others.move_to_end(parent)
        child.ties.parent = parent
        parent.pins += 1

    def _detach(self, child: Group) -> None:
        if child.parent is not None:
            child.parent.pins -= 1
            self.leases.release_if_free(child.parent)
            self._discard_if_free(child.parent)
            child.ties.parent = None

    def _promise_files(self, record: Record, group: Group) -> None:
        try:
            check_size(group.request.images, "retain.durable")
            rows = record.lease.states * self._limits.rows_of_state
            pixels = self.books.size_of_images(image.content.nbytes for image in group.request.images)
            self.books.promise(record, self.leases.most_blocks(group) + rows + pixels)
        except EngineError as error:
            self.leases.give_up(record, error.message)
            raise

    def _discard_if_free(self, record: Record) -> None:
        """The files of a lease that is over go when no open child was promised them."""
        if record.stored is not None and not record.leased and record.pins == 0:
            self.on_discard(record)

    def _set_ttl_of_running(self, record: Record, group: Living, ttl: float | None) -> None:
        if ttl is None:
            self.leases.give_up(record, "the lease was given back")
        elif record.lease.ttl is not None:
            record.lease.ttl = ttl
        else:
            self.leases.promise(record, group, ttl, None)
            try:
                self.leases.hold_ended(record)
            except EngineError as error:
                self.leases.give_up(record, error.message)
                raise

    def _add_other(self, record: Record) -> None:
        self._others[record] = None
        self._others.move_to_end(record)
        while len(self._others) > self._limits.max_records:
            oldest, _ = self._others.popitem(last=False)
            self._remember_gone(oldest)
            self._unlist(oldest)

    def _list(self, record: Record) -> None:
        self._tallies.add(record)
        for reference in record.identity.references:
            self._found[record.tenant, reference] = record

    def _unlist(self, record: Record) -> None:
        record.gone = True
        self._tallies.drop(record)
        if self._corpus is not None:
            self._corpus.forget(record)
        for reference in record.identity.references:
            if self._found.get((record.tenant, reference)) is record:
                del self._found[record.tenant, reference]

    def _remember_gone(self, record: Record) -> None:
        for reference in record.identity.references:
            if self._found.get((record.tenant, reference)) is record:
                self._gone[record.tenant, reference] = self.wall(), record.adapter_name
        while len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)


def _check_adapter(request: Request, parent: Record) -> None:
    """What a parent has computed is of its own adapter."""
    lineage = request.terms.lineage
    if lineage is None or not lineage.at or request.adapter == parent.identity.adapter:
        return
    raise ContinuationMismatch(
        f"The request '{parent.id}' was computed with another adapter, or without one.",
        reason="other_adapter",
        field="adapter",
        parent=parent.id,
    )
