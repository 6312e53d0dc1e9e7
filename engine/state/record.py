"""What is known of a request that others may continue from: while it runs, and after its end.

A record is immutable to its children: they share its blocks by reference and copy the partly filled last one.
Its grades, best first:

    running   its group still works; its tables are the sequences' own
    leased    every choice holds its blocks, on the device or on the host
    stored    leased, and in files: it outlives the process; its blocks may be in memory too
    warm      holds nothing, but knows its blocks by (block, epoch), and some are still there
    tokens    the blocks are gone; the tokens are known

Owned by the event-loop thread.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, overload

import msgspec
import numpy as np

from bequest.engine._C import BeamEpochs, BlockEpochs, BlockPool, BlockTable, TokenList, count_distinct_blocks
from bequest.engine.state.cross import CrossTable
from bequest.engine.state.recurrent import State
from bequest.engine.types import ChoiceEntry, Grade, IntArray, Lineage, Parent, ParentChoice, RecordEntry, Request
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.blocks import BlockLayout
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.estate import Manifest
from bequest.engine.types.image import Image
from bequest.engine.types.record import GroupEntry


class Holding(Protocol):
    """The tokens of a choice, and how many of their KV entries its blocks hold."""

    @property
    def tokens(self) -> TokenList: ...

    @property
    def num_prompt(self) -> int: ...

    @property
    def shown_len(self) -> int: ...

    @property
    def computed(self) -> int: ...

    @property
    def full_len(self) -> int:
        """Tokens whose KV it has when nothing was lost or is still to be computed."""

    @property
    def holds_blocks(self) -> bool:
        """Whether it keeps its blocks; else whoever borrows them is alone with them."""

    @property
    def lease(self) -> BlockTable | None:
        """The table of a lease."""

    def borrow(self, pool: BlockPool) -> BlockTable:
        """A table of its blocks that are still there, unbroken from the first on."""

    def as_entry(self, pool: BlockPool) -> ChoiceEntry:
        """As its owner may inspect it."""

    def blocks_by_strip(self, pool: BlockPool) -> list[int]:
        """How many of its blocks are still there, of each strip."""


@dataclass(slots=True, eq=False)
class KeptChoice:
    """The holding of a choice that has ended."""

    tokens: TokenList
    num_prompt: int
    shown_len: int
    computed: int
    salt: bytes
    table: BlockTable | None  # of a lease
    epochs: BlockEpochs  # of any other
    _shown: ParentChoice | None = None  # once somebody continues from it: others may, too

    @property
    def full_len(self) -> int:
        return self.computed

    def as_choice(self) -> ParentChoice:
        """Its tokens do not change any more."""
        if self._shown is None:
            self._shown = _as_choice(self)
        return self._shown

    @property
    def lease(self) -> BlockTable | None:
        return self.table

    @property
    def holds_blocks(self) -> bool:
        return self.table is not None

    def as_entry(self, pool: BlockPool) -> ChoiceEntry:
        return ChoiceEntry(0, len(self.tokens), self.num_left(pool), self.num_shared(pool))

    def blocks_by_strip(self, pool: BlockPool) -> list[int]:
        if self.table is not None:
            return count_by_strip(self.table.entries, pool)
        left = set(self.epochs.blocks_left(pool).tolist())
        blocks = (self.epochs[i][0] for i in range(len(self.epochs)))
        return count_by_strip([block if block in left else 0 for block in blocks], pool)

    def borrow(self, pool: BlockPool) -> BlockTable:
        if self.table is not None:
            return self.table.fork()
        return BlockTable.adopt(pool, self.salt, self.epochs)

    def num_left(self, pool: BlockPool) -> int:
        """Blocks that are still there."""
        if self.table is not None:
            return len(self.table)
        return self.epochs.num_left(pool)

    def num_shared(self, pool: BlockPool) -> int:
        if self.table is not None:
            return self.table.num_shared
        return self.epochs.num_held(pool)


@dataclass(slots=True, eq=False)
class KeptBeams:
    """The holdings of the beams of an answer, before anybody looks at one of them.

    Arrays: a record stays, and the collector of cycles would look at a list for each beam.
    """

    prompt: TokenList
    salt: bytes
    token_ids: IntArray  # of all beams, one behind the other: what comes behind the prompt
    lengths: IntArray  # how many each beam has of them
    num_shown: list[int]  # likewise, those that have text
    epochs: BeamEpochs  # of the blocks of all but the last token

    @property
    def num_tokens(self) -> int:
        """Of all beams; the prompt counts once."""
        return len(self.prompt) + len(self.token_ids)

    def _paths(self) -> list[list[int]]:
        return [path.tolist() for path in np.split(self.token_ids, np.cumsum(self.lengths)[:-1])]

    def choices(self) -> dict[int, KeptChoice]:
        num_prompt = len(self.prompt)
        return {
            index: KeptChoice(
                tokens=self.prompt.fork(token_ids),
                num_prompt=num_prompt,
                shown_len=num_prompt + num_shown,
                computed=num_prompt + len(token_ids) - 1,
                salt=self.salt,
                table=None,
                epochs=self.epochs[index],
            )
            for index, (token_ids, num_shown) in enumerate(zip(self._paths(), self.num_shown, strict=True))
        }


class Living(Protocol):
    """The group of a record while it runs."""

    @property
    def request(self) -> Request: ...

    @property
    def cross(self) -> CrossTable | None: ...

    @property
    def parent(self) -> Record | None: ...

    @property
    def charged_output(self) -> int:
        """Tokens of each choice that its lease is charged for."""

    @property
    def sequences(self) -> abc.Sized:
        """Of its choices; none before it begins."""

    def holding(self, choice: int) -> Holding | None:
        """Of a choice that has not ended."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a record is, from its request's submission on."""

    id: str
    tenant: str
    name: str | None = None
    salt: bytes  # divides the prefix index
    cache_salt: str = ""
    created_at: float  # seconds since 1970
    origin: object = None
    lineage: Lineage | None = None
    num_choices: int = 1
    encoder: EncoderInput | None = None
    images: tuple[Image, ...] = ()
    adapter: AdapterRef | None = None

    @property
    def references(self) -> tuple[str, ...]:
        """What its tenant finds it by."""
        return (self.id,) if self.name is None else (self.id, self.name)


@dataclass(slots=True, eq=False)
class Lease:
    """How long a record keeps its blocks, and what is paid for it."""

    ttl: float | None = None  # promised or granted; None: there is no lease
    charge: int = 0  # blocks of the budget promised to it while its request runs
    discount: int = 0  # rows of blocks it shares with its parent, whose lease pays for those that are kept whole
    cross_discount: int = 0  # the same of its cross table
    expires_at: float | None = None  # once it is granted, on the engine's clock
    expires_at_wall: float | None = None
    lost: str | None = None  # why it was not granted after all
    states: int = 0  # of recurrent layers, promised to it while its request runs


@dataclass(slots=True, eq=False)
class Record:
    identity: Identity
    group: Living | None = None  # while it runs
    lease: Lease = field(default_factory=Lease)
    kept_beams: KeptBeams | None = None  # instead of kept choices, until somebody asks for those
    _kept: dict[int, KeptChoice] = field(default_factory=dict)
    inputs: list[CrossTable] = field(default_factory=list)  # held for all choices: of its encoder input, if it has one
    states: list[State] = field(default_factory=list)  # of recurrent layers, that its lease holds
    children: int = 0
    pins: int = 0  # open children that were promised its blocks
    gone: bool = False  # nobody finds it any more
    aborted: bool = False  # it ended before it, or what it was a part of, was complete
    failed: bool = False  # it ended without anything to continue from
    stored: Manifest | None = None  # of its lease, when that is in files
    lost: bool = False  # the files are broken or gone
    waiters: list[Callable[[], None]] = field(default_factory=list)  # called when it ends

    @property
    def id(self) -> str:
        return self.identity.id

    @property
    def tenant(self) -> str:
        return self.identity.tenant

    @property
    def salt(self) -> bytes:
        return self.identity.salt

    @property
    def encoder(self) -> EncoderInput | None:
        return self.identity.encoder

    @property
    def adapter_name(self) -> str | None:
        return None if self.identity.adapter is None else self.identity.adapter.name

    @property
    def leased(self) -> bool:
        return self.lease.expires_at is not None

    @property
    def kept(self) -> dict[int, KeptChoice]:
        """The choices that have ended, by number."""
        if self.kept_beams is not None:
            self._kept, self.kept_beams = self.kept_beams.choices(), None
        return self._kept

    @property
    def holds_nothing(self) -> bool:
        """It has ended without a computed token or a sampled one."""
        return self.kept_beams is None and not any(
            kept.computed or len(kept.tokens) > kept.num_prompt for kept in self._kept.values()
        )

    def num_left_blocks(self, pool: BlockPool) -> int:
        """Of all ended choices: blocks that are still there, counted as often as there are choices that have them."""
        if self.kept_beams is not None:
            return self.kept_beams.epochs.num_left(pool)
        return sum(kept.num_left(pool) for kept in self._kept.values())

    def left_epochs(self) -> Iterator[BlockEpochs]:
        """Of the ended choices that hold nothing: what they know their blocks by."""
        if self.kept_beams is not None:
            epochs = self.kept_beams.epochs
            return (epochs[i] for i in range(len(epochs)))
        return (kept.epochs for kept in self._kept.values() if kept.table is None)

    @contextmanager
    def on_end(self, wake: Callable[[], None]) -> Iterator[None]:
        """`wake` is called when it ends, if that is while the caller waits."""
        self.waiters.append(wake)
        try:
            yield
        finally:
            if wake in self.waiters:
                self.waiters.remove(wake)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """It keeps its blocks meanwhile, as it does for an open child."""
        self.pins += 1
        try:
            yield
        finally:
            self.pins -= 1

    def choice(self, index: int) -> Holding | None:
        """The holding of a choice; None where it has none. Before the choices part ways each is the first."""
        if self.failed:
            return None
        if index in self.kept:
            return self.kept[index]
        return None if self.group is None else self.group.holding(index)

    def holdings(self) -> list[Holding]:
        num = self.identity.num_choices
        if self.group is not None and not self.group.sequences and not self.kept:
            return []
        if num > 1 and (first := self.choice(0)) is not None and self.choice(1) is first:
            return [first] * num  # they have not parted ways
        return [held for i in range(num) if (held := self.choice(i)) is not None]

    def _ended_choices(self) -> list[KeptChoice]:
        """As `holdings`, of one that has ended."""
        return [] if self.failed else [kept for _, kept in sorted(self.kept.items())]

    def choice_tables(self) -> list[BlockTable]:
        return [kept.table for kept in self.kept.values() if kept.table is not None]

    def tables(self) -> list[BlockTable]:
        """All that its lease holds."""
        return self.choice_tables() + [held.table for held in self.inputs]

    def num_held_blocks(self) -> int:
        """Blocks of its lease, shared ones once."""
        return count_distinct_blocks(self.tables())

    @property
    def num_tokens(self) -> int:
        """Of all choices; their common prompt counts once."""
        if self.kept_beams is not None:
            return self.kept_beams.num_tokens
        holdings = self.holdings()
        if not holdings:
            return 0
        num_prompt = holdings[0].num_prompt
        return sum(len(held.tokens) for held in holdings) - num_prompt * (len(holdings) - 1)

    def grade(self, left_blocks: int) -> Grade:
        """`left_blocks`: as num_left_blocks says."""
        if self.group is not None:
            return "running"
        if self.leased:
            return "leased" if self.stored is None else "stored"
        return "warm" if left_blocks else "tokens"

    def as_parent(self) -> Parent:
        ended = self.group is None
        return Parent(
            id=self.id,
            running=not ended,
            cache_salt=self.identity.cache_salt,
            # Those of a running one are what they are now, the others stay as they are.
            choices=_Choices(self._ended_choices()) if ended else tuple(map(_as_choice, self.holdings())),
            origin=self.identity.origin,
            encoder=self.encoder,
            images=self.identity.images,
            adapter=self.identity.adapter,
        )

    def as_entry(self, pool: BlockPool, layout: BlockLayout) -> RecordEntry:
        lineage = self.identity.lineage
        return RecordEntry(
            id=self.id,
            name=self.identity.name,
            created_at=self.identity.created_at,
            expires_at=self.lease.expires_at_wall,
            grade=self.grade(self.num_left_blocks(pool)),
            parent=None if lineage is None else lineage.parent,
            at=None if lineage is None else lineage.at,
            children=self.children,
            choices=tuple(replace(held.as_entry(pool), index=i) for i, held in enumerate(self.holdings())),
            groups=tuple(self._groups(pool, layout)),
            adapter=self.adapter_name,
        )

    def _groups(self, pool: BlockPool, layout: BlockLayout) -> Iterator[GroupEntry]:
        counts: Counter[int] = Counter()
        for held in self.holdings():
            alone = pool.num_strips == 1
            by_strip = [held.as_entry(pool).blocks] if alone else held.blocks_by_strip(pool)
            for window, count in zip(pool.windows, by_strip, strict=True):
                counts[window] += count
        for window, count in counts.items():
            kind: Literal["full", "window"] = "window" if window else "full"
            yield GroupEntry(kind, window or None, count, count * layout.num_bytes)
        if layout.state_bytes:
            count = len(self.states)
            yield GroupEntry("state", None, count, count * layout.state_bytes)


def count_by_strip(entries: Iterable[int], pool: BlockPool) -> list[int]:
    """Of the entries of a table, row by row: those that hold something, of each strip."""
    counts = [0] * pool.num_strips
    for index, entry in enumerate(entries):
        counts[index % pool.num_strips] += entry != 0
    return counts


def _as_choice(held: Holding) -> ParentChoice:
    return ParentChoice(tuple(held.tokens[:]), held.num_prompt, held.shown_len)


class _Choices(abc.Sequence[ParentChoice]):
    """Of a request that has ended, made when they are asked for: a search has many, and mostly one is wanted."""

    def __init__(self, holdings: list[KeptChoice]) -> None:
        self._holdings = holdings

    def __len__(self) -> int:
        return len(self._holdings)

    @overload
    def __getitem__(self, index: int) -> ParentChoice: ...
    @overload
    def __getitem__(self, index: slice) -> list[ParentChoice]: ...
    def __getitem__(self, index: int | slice) -> ParentChoice | list[ParentChoice]:
        if isinstance(index, slice):
            return [held.as_choice() for held in self._holdings[index]]
        return self._holdings[index].as_choice()
