"""What a record owns, on its way out of the engine and into it: which blocks, and who pays for them meanwhile.

Bytes are moved by others (engine/estates.py). Between the two ends of a move the blocks are held here, so that neither
the end of a lease nor anybody's need of memory touches them; whoever opens a move closes it, whatever happens.

Owned by the event-loop thread; no asyncio.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bequest.engine._C import BlockEpochs, BlockTable, TokenList
from bequest.engine.cache.entries import is_on_host
from bequest.engine.cache.kv_cache import KvCache
from bequest.engine.cache.salt import pack_salt
from bequest.engine.cache.states import States
from bequest.engine.errors import InsufficientRetention, InvalidEstate, InvalidRequest, ParentFailed
from bequest.engine.inheritance.estate_images import check_size
from bequest.engine.inheritance.leases import Borrowed, Leases
from bequest.engine.inheritance.retention import Retention
from bequest.engine.state.record import Identity, KeptChoice, Record
from bequest.engine.state.recurrent import State
from bequest.engine.types import Lineage
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.estate import (
    NO_BLOCK,
    Deed,
    Estate,
    EstateChoice,
    EstateEncoder,
    EstateIdentity,
    EstateImage,
    EstateState,
    Notes,
)
from bequest.engine.types.image import Image


class Leaving:
    """Holds the blocks of a record while they are read."""

    def __init__(self, record: Record, leases: Leases) -> None:
        """Raises InsufficientRetention if some of it is gone."""
        self._record = record
        self._leases = leases
        self._owned = owned = leases.borrow(record)
        self._closed = False
        # By choice. A record may be given more meanwhile, which these blocks have not got.
        self._computed = {index: record.kept[index].computed for index in owned.tables}
        # By choice and position. Choices that say the same have one each for the same tokens: the first serves all.
        self._standing = {index: _standing_for(record.kept[index], owned.states) for index in owned.tables}
        standing = (state for found in self._standing.values() for state in found.values())
        self.states = list(dict.fromkeys(standing))  # of recurrent layers, those to be read, each once
        entries = dict.fromkeys(entry for table in owned.all() for entry in table.blocks)
        self.entries = sorted(entries, key=is_on_host)  # the blocks to be read, each once, those of the device first

    @property
    def tables(self) -> dict[int, BlockTable]:
        """By choice."""
        return self._owned.tables

    def deed(self, identity: EstateIdentity, notes: Notes) -> Deed:
        """Its rows are the entries, in order, then those of the states."""
        rows = {entry: row for row, entry in enumerate(self.entries)}
        record, lineage = self._record, self._record.identity.lineage
        states = self._rows_of_states(identity.cache.rows_of_state)
        encoder = None
        if record.encoder is not None and self._owned.inputs:
            encoder = EstateEncoder.of(record.encoder, tuple(rows[entry] for entry in self._owned.inputs[0].blocks))
        adapter = record.identity.adapter
        return Deed(
            identity=identity if adapter is None else replace(identity, adapter=adapter.identity),
            id=record.id,
            name=record.identity.name,
            cache_salt=record.identity.cache_salt,
            num_choices=record.identity.num_choices,
            choices=tuple(
                EstateChoice(
                    index=index,
                    token_ids=tuple(record.kept[index].tokens[:]),
                    num_prompt=record.kept[index].num_prompt,
                    shown_len=record.kept[index].shown_len,
                    computed=self._computed[index],
                    rows=tuple(rows.get(entry, NO_BLOCK) for entry in table.entries),
                    states=tuple(
                        EstateState(position=position, rows=states[state])
                        for position, state in self._standing[index].items()
                    ),
                )
                for index, table in sorted(self._owned.tables.items())
            ),
            encoder=encoder,
            created_at=record.identity.created_at,
            parent=None if lineage is None else lineage.parent,
            parent_choice=0 if lineage is None else lineage.choice,
            at=0 if lineage is None else lineage.at,
            origin=notes.to_bytes(record.identity.origin),
            images=tuple(map(EstateImage.of, record.identity.images)),
        )

    def _rows_of_states(self, count: int) -> dict[State, tuple[int, ...]]:
        """Those behind the entries, so many each."""
        first = len(self.entries)
        return {state: tuple(range(first + i * count, first + (i + 1) * count)) for i, state in enumerate(self.states)}

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._leases.give_back(self._owned)


def _standing_for(kept: KeptChoice, states: Iterable[State]) -> dict[int, State]:
    """Those that stand for tokens of a choice; one for each position."""
    found: dict[int, State] = {}
    for state in states:
        if state.position <= min(state.tokens.common_prefix(kept.tokens), kept.computed):
            found.setdefault(state.position, state)
    return found


@dataclass(frozen=True, slots=True)
class _Front:
    """The rows of blocks that a choice has in common with one before it, from the first on."""

    choice: int  # in the order of the deed
    num_rows: int


class Coming:
    """Holds and pays for the blocks of an estate while they are written."""

    def __init__(
        self,
        estate: Estate,
        origin: object,
        adapter: AdapterRef | None,
        images: tuple[Image, ...],
        cache: KvCache,
        retention: Retention,
        fronts: list[_Front | None],
    ) -> None:
        """REQUIRES: the blocks are free, and promised"""
        self._estate, self._cache, self._retention = estate, cache, retention
        self.rows: list[int] = []  # of the content
        self.blocks: list[int] = []  # of the device that they go to
        deed = estate.deed
        encoder = None if deed.encoder is None else deed.encoder.as_input()
        self._identity = Identity(
            id=deed.id,
            tenant=deed.identity.tenant,
            name=deed.name,
            salt=pack_salt(deed.identity.tenant, deed.cache_salt, encoder, adapter),
            cache_salt=deed.cache_salt,
            created_at=deed.created_at,
            origin=origin,
            lineage=None if deed.parent is None else Lineage(deed.parent, deed.parent_choice, deed.at),
            num_choices=deed.num_choices,
            encoder=encoder,
            images=images,
            adapter=adapter,
        )
        tables: list[BlockTable] = []
        for choice, front in zip(deed.choices, fronts, strict=True):
            tables.append(self._table(choice.rows, choice.computed, front, tables))
        inputs = []
        if deed.encoder is not None:
            inputs.append(self._table(deed.encoder.rows, deed.encoder.length, None, tables))
        indices = (choice.index for choice in deed.choices)
        self._tokens = {choice.index: TokenList(choice.token_ids) for choice in deed.choices}
        self.states = self._expect_states(cache.states)
        self._owned: Borrowed | None = Borrowed(dict(zip(indices, tables, strict=True)), inputs, self.states)

    def _expect_states(self, states: States) -> list[State]:
        """Each once; whoever shares the rows of one shares it."""
        self.state_rows: list[tuple[int, ...]] = []  # of the content, of each state
        brought: dict[tuple[int, ...], State] = {}
        for choice in self._estate.deed.choices:
            for kept in choice.states:
                if kept.rows not in brought:
                    self.state_rows.append(kept.rows)
                    tokens = self._tokens[choice.index]
                    brought[kept.rows] = states.expect(self._identity.salt, tokens, kept.position)
        return list(brought.values())

    def _table(self, rows: tuple[int, ...], length: int, front: _Front | None, before: list[BlockTable]) -> BlockTable:
        pool = self._cache.pool
        shared = 0 if front is None else front.num_rows
        table = BlockTable(pool, self._identity.salt)
        if front is not None:
            table = before[front.choice].slice_to(shared * pool.block_size)
        first = shared * pool.num_strips
        added = [row != NO_BLOCK for row in rows[first:]]
        assert table.try_append(added, length), "the blocks were counted"
        self.rows += [row for row in rows[first:] if row != NO_BLOCK]
        self.blocks += [entry for entry in table.entries[first:] if entry]
        return table

    def grant(self, ttl: float, now: float) -> str:
        """The bytes are there: the record is found and leased from now on. Raises NameInUse, with nothing changed."""
        owned = self._owned
        assert owned is not None
        record = Record(self._identity)
        for choice in self._estate.deed.choices:
            record.kept[choice.index] = KeptChoice(
                tokens=self._tokens[choice.index],
                num_prompt=choice.num_prompt,
                shown_len=choice.shown_len,
                computed=choice.computed,
                salt=record.salt,
                table=None,
                epochs=BlockEpochs(),
            )
        self._retention.adopt(record, owned, len(self.blocks), ttl, now)
        self._owned = None
        self._unpark()
        self._cache.states.show(self.states)
        self._cache.index(record)
        return record.id

    def close(self) -> None:
        """Gives back what no record has taken over."""
        owned, self._owned = self._owned, None
        if owned is not None:
            self._unpark()
            self._retention.leases.drop_import(self._identity.tenant, len(self.blocks), len(self.states), owned)

    def _unpark(self) -> None:
        """The record does, or nobody."""
        for state in self.states:
            self._cache.states.unpark(state)


class Estates:
    def __init__(self, cache: KvCache, retention: Retention) -> None:
        self._cache = cache
        self._retention = retention

    def leave(self, tenant: str, reference: str) -> Leaving:
        """Raises ParentNotFound, ParentFailed, or InsufficientRetention if its blocks are gone."""
        return self.leave_record(self._retention.find(tenant, reference), reference)

    def leave_record(self, record: Record, reference: str) -> Leaving:
        if record.group is not None:
            message = f"The request '{reference}' still runs: its estate is not complete."
            raise InvalidRequest(message, reason="estate_incomplete", reference=reference)
        if record.failed or not record.kept:
            message = f"The request '{reference}' ended before anything was computed."
            raise ParentFailed(message, reason="parent_failed", reference=reference)
        check_size(record.identity.images)
        return Leaving(record, self._retention.leases)

    def come(
        self, estate: Estate, origin: object, adapter: AdapterRef | None, images: tuple[Image, ...] = ()
    ) -> Coming:
        """`adapter`: what it was computed with, as it is loaded here. `images`: whose ids its tokens have.

        Raises NameInUse, RetentionTooLarge or InsufficientRetention, with nothing changed."""
        deed = estate.deed
        tenant = deed.identity.tenant
        self._retention.check_new(tenant, (deed.id,) if deed.name is None else (deed.id, deed.name))
        strips = self._cache.pool.num_strips
        if any(_lacks_blocks(choice, self._cache.pool.windows) for choice in deed.choices):
            raise InvalidEstate("The estate lacks what slid out of a window that is wider than any sequence here.")
        fronts = _fronts(deed, strips)
        num_blocks = sum(map(_num_blocks, deed.choices, fronts, [strips] * len(fronts)))
        num_blocks += 0 if deed.encoder is None else len(deed.encoder.rows)
        num_states = len({state.rows for choice in deed.choices for state in choice.states})
        self._retention.leases.open_import(tenant, num_blocks, num_states)
        if not self._cache.make_room(num_blocks):
            self._retention.leases.drop_import(tenant, num_blocks, num_states)
            raise InsufficientRetention(
                f"The estate needs {num_blocks} blocks at once, which running requests have.",
                reason="no_room_for_estate",
                details=self._retention.leases.budget.details(tenant, num_blocks),
            )
        return Coming(estate, origin, adapter, images, self._cache, self._retention, fronts)


def _lacks_blocks(choice: EstateChoice, windows: list[int]) -> bool:
    return any(row == NO_BLOCK and not windows[i % len(windows)] for i, row in enumerate(choice.rows))


def _num_blocks(choice: EstateChoice, front: _Front | None, num_strips: int) -> int:
    """Of a choice, beside those of its front."""
    first = 0 if front is None else front.num_rows * num_strips
    return sum(row != NO_BLOCK for row in choice.rows[first:])


def _fronts(deed: Deed, num_strips: int) -> list[_Front | None]:
    """For each choice the one before it that it shares the most leading rows with; None: it shares none."""
    fronts: list[_Front | None] = []
    for i, choice in enumerate(deed.choices):
        shared = [_num_common(choice.rows, other.rows) // num_strips for other in deed.choices[:i]]
        most = max(shared, default=0)
        fronts.append(_Front(shared.index(most), most) if most else None)
    return fronts


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
