"""Cross tables: the blocks that hold an encoder input's keys and values for every layer of the decoder.

They come from the pool of all other blocks, are written once and only read afterwards. A group has one for all its
sequences while any of them runs or keeps blocks on the host; a lease has one beside the tables of its choices. Each of
these holds references of its own; equal inputs of a tenant share the blocks, which is found by the salt: an exact key
of tenant, cache salt and encoder input. Blocks that nobody holds any more are remembered by (block, epoch) and serve
again as long as they were not handed out.

Owned by the event-loop thread.
"""

from __future__ import annotations

import numpy as np

from bequest.engine._C import BlockPool, BlockTable
from bequest.engine.state.cross import CrossTable, Moving
from bequest.engine.types import Source
from bequest.engine.types.blocks import BlockBytes
from bequest.engine.types.encoder import EncoderInput, Slots


class CrossTables:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[bytes, dict[CrossTable, None]] = {}  # by salt, ordered sets
        # By salt, blocks that nobody holds; a block is of one salt at most, so that the pool bounds both.
        self._left: dict[bytes, list[tuple[int, int]]] = {}
        self._salt_of: dict[int, bytes] = {}
        self.nowhere = CrossPlace(None, BlockTable(pool), None, 0)  # of those without an encoder input

    def num_blocks(self, encoder: EncoderInput | None) -> int:
        return 0 if encoder is None else -(-encoder.length // self._pool.block_size)

    def find(self, salt: bytes) -> BlockTable | None:
        """A table of its own of blocks that hold the input of `salt`: some on the device, else what there is."""
        held = [cross.table for cross in self._held.get(salt, {}) if cross.trusted]
        nearest = min(held, key=lambda table: table.num_on_host, default=None)
        if nearest is not None and nearest.resident:
            return nearest.fork()
        left = self._left.get(salt)
        if left is not None:
            table = BlockTable.adopt(self._pool, salt, left)
            if len(table) == len(left):
                return table
            table.free()
            self._forget(salt)
        return None if nearest is None else nearest.fork()

    def hold(self, salt: bytes, table: BlockTable, group: Moving | None) -> CrossTable:
        """Somebody holds `table` from now on. REQUIRES: it has the blocks of the input, or is about to write them."""
        cross = CrossTable(salt, table, group)
        self._held.setdefault(salt, {})[cross] = None
        return cross

    def place(self, salt: bytes, encoder: EncoderInput | None, own: CrossTable | None) -> CrossPlace:
        """The blocks that a group holds as its own, or those of an equal input, or new ones to write."""
        if encoder is None:
            return self.nowhere
        table = self.find(salt) if own is None else own.table
        if table is None:
            return self.place_anew(encoder)
        return CrossPlace(encoder, table, own, self.num_blocks(encoder))

    def place_anew(self, encoder: EncoderInput | None) -> CrossPlace:
        """Blocks that its encoder has to write."""
        return CrossPlace(encoder, BlockTable(self._pool), None, self.num_blocks(encoder))

    def settle(self, place: CrossPlace, salt: bytes, group: Moving) -> CrossTable | None:
        """What the group holds from now on."""
        return place.own or (None if place.encoder is None else self.hold(salt, place.table, group))

    def let_go(self, cross: CrossTable) -> None:
        held = self._held[cross.salt]
        del held[cross]
        if not held:
            del self._held[cross.salt]
        if cross.trusted and cross.table.resident:
            epochs = cross.table.epochs()
            self._remember(cross.salt, [epochs[i] for i in range(len(epochs))])
        cross.table.free()

    def distrust(self, cross: CrossTable | None) -> None:
        """Its holder met NaN, which may be in these blocks: nobody gets them from it. Others who hold the same meet it
        too, or have shown that it is not there."""
        if cross is not None:
            self._forget(cross.salt)
            cross.trusted = False

    def idle(self, cross: CrossTable | None) -> list[BlockTable]:
        """The table and those of groups that do not run and share its blocks: these move between the pools together."""
        if cross is None:
            return []
        idle = [c for c in self._held[cross.salt] if c is cross or (c.group is not None and not c.group.runs)]
        blocks = cross.table.blocks
        return [c.table for c in idle if c.table.blocks == blocks]

    def num_held(self) -> int:
        return sum(len(held) for held in self._held.values())

    def _remember(self, salt: bytes, blocks: list[tuple[int, int]]) -> None:
        for block, _ in blocks:
            if (before := self._salt_of.get(block)) is not None:
                self._forget(before)
        self._left[salt] = blocks
        self._salt_of.update((block, salt) for block, _ in blocks)

    def _forget(self, salt: bytes) -> None:
        for block, _ in self._left.pop(salt, ()):
            del self._salt_of[block]


class CrossPlace:
    """Where the cross blocks of a waiting sequence's group come from. Nothing has moved yet. Without an encoder there
    are none: the place is an empty table, and all of it is there."""

    __slots__ = ("content", "encoder", "needed", "own", "source", "table")

    def __init__(self, encoder: EncoderInput | None, table: BlockTable, own: CrossTable | None, needed: int) -> None:
        """`table`: empty, if the encoder has to run, which needs so many blocks. `own`: the group already holds it."""
        self.encoder = encoder
        self.table = table
        self.own = own
        self.content: BlockBytes | None = None  # out of files: the table is empty until they are brought
        self.source: Source = "blocks" if table.resident else "host"
        self.needed = table.num_on_host  # device blocks that are missing
        if encoder is not None and len(table) == 0:
            self.source = "recompute"
            self.needed = needed

    @property
    def runs_encoder(self) -> bool:
        return self.source == "recompute"

    def is_lost(self, held: CrossTable | None) -> bool:
        """The choice that kept the table of its group, which is `held` now, has dropped it since."""
        return self.encoder is not None and self.own is not held

    def take_content(self, content: BlockBytes) -> None:
        """The encoder need not run. REQUIRES: it would"""
        self.content, self.source = content, "file"

    def prepare(self) -> list[int]:
        """Blocks for all positions. REQUIRES: they are free"""
        assert self.encoder is not None
        copies = self.table.try_prepare_write(0, self.encoder.length)
        assert copies == [], "the blocks were counted"
        return self.table.blocks

    def write(self, block_size: int) -> Slots | None:
        """What a run of the encoder fills; None if it does not run. REQUIRES: the blocks are free"""
        if self.encoder is None or not self.runs_encoder:
            return None
        self.prepare()
        return slots_of(self.table, self.encoder.length, block_size)

    def drop(self) -> None:
        if self.own is None:
            self.table.free()


def slots_of(table: BlockTable, length: int, block_size: int) -> Slots:
    """[length]: where positions [0, length) of a resident table live."""
    blocks = np.asarray(table.blocks, dtype=np.int64)
    return (blocks[:, None] * block_size + np.arange(block_size)).ravel()[:length]
