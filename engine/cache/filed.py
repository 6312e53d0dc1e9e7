"""What files have of a parent, for its child: where it starts from, and the bytes that go to the device for it.

A child whose parent is in files alone is placed with an empty table, which is filled when it is let in: others then
find the blocks as those of a warm record. Nothing is taken from the device before the bytes are at hand.

Owned by the event-loop thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np

from bequest.engine._C import BlockPool, BlockTable, TokenList
from bequest.engine.cache.cross import CrossPlace
from bequest.engine.cache.placement import Placement
from bequest.engine.cache.states import States
from bequest.engine.cache.tiers.files import Files, NoFiles, Stored
from bequest.engine.cache.tiers.ticket import Ticket
from bequest.engine.cache.windows import keep_windows, most_inherited
from bequest.engine.state.record import KeptChoice, Record
from bequest.engine.state.sequence import Sequence
from bequest.engine.types.blocks import BlockBytes, StateWrite
from bequest.engine.types.estate import NO_BLOCK, ChoiceBytes, EstateChoice

_LEAST_WARM = 64  # tokens: fewer are computed as soon as they are read


class Filed:
    def __init__(self, pool: BlockPool, states: States, nowhere: CrossPlace, *, prefix_caching: bool) -> None:
        self.files: Files = NoFiles()
        self._pool = pool
        self._states = states
        self._nowhere = nowhere
        self._prefix_caching = prefix_caching
        self._blocks: list[tuple[list[int], BlockBytes]] = []
        self._slots: list[tuple[int, BlockBytes]] = []

    # --- where a child starts ------------------------------------------------------------------------------------

    def place(self, sequence: Sequence, beyond: int) -> Placement | None:
        """More than `beyond` tokens that the files of its parent have. Its table is filled when it is let in."""
        parent, lineage = _stored_parent(sequence), sequence.group.request.terms.lineage
        if parent is None or lineage is None or sequence.group.request.params.prompt_logprobs is not None:
            return None
        held = parent.kept.get(lineage.choice)
        choice = _choice(parent, lineage.choice)
        if held is None or choice is None:
            return None
        alike = held.tokens.common_prefix(sequence.tokens)
        most = min(lineage.at, choice.computed, most_inherited(self._pool, sequence), alike)
        computed = self._startable(sequence, choice, most)
        if computed <= beyond:
            return None
        table = BlockTable(self._pool, sequence.group.salt)
        placement = Placement(table, computed, self._missing(sequence, choice, computed), "file", self._nowhere)
        self._reach(placement, parent, lineage.choice)
        return placement

    def place_warm(self, sequence: Sequence, beyond: int) -> Placement | None:
        """Clearly more than `beyond` tokens that a request without a lease left in files: bytes that were not promised
        should be worth the reading."""
        request = sequence.group.request
        if request.encoder is not None or request.images or request.params.prompt_logprobs is not None:
            return None
        found = self.files.find(sequence.group.salt, sequence.tokens)
        if found is None or found.alike < beyond + _LEAST_WARM:
            return None
        most = min(found.alike, most_inherited(self._pool, sequence))
        computed = self._startable(sequence, found.choice, most)
        if computed < beyond + _LEAST_WARM:
            return None
        table = BlockTable(self._pool, sequence.group.salt)
        placement = Placement(table, computed, self._missing(sequence, found.choice, computed), "file", self._nowhere)
        self._reach(placement, found.holder, found.choice.index)
        return placement

    def place_cross(self, placement: Placement, sequence: Sequence) -> None:
        """Lets the files of its parent take the place of a run of the encoder."""
        parent, lineage = _stored_parent(sequence), sequence.group.request.terms.lineage
        if parent is None or lineage is None or _choice(parent, lineage.choice) is None or placement.ticket.pending:
            return
        found = placement.content or self.files.content(parent, lineage.choice)
        if isinstance(found, Ticket):
            placement.ticket = found
        else:
            placement.cross.take_content(found.encoder)

    def _reach(self, placement: Placement, holder: Stored, choice: int) -> None:
        found = self.files.content(holder, choice)
        if isinstance(found, Ticket):
            placement.ticket = found
        else:
            placement.content = found

    def _startable(self, sequence: Sequence, choice: EstateChoice, most: int) -> int:
        """Of its first `most` tokens those that a child can start behind: its windows and states are there."""
        computed = most
        while True:
            kept = (state.position for state in choice.states if state.position <= computed)
            start = max(self._states.nearest(sequence, computed), *kept, 0)
            start = served(choice.rows, self._pool.windows, self._pool.block_size, start)
            if start == computed:
                return computed
            computed = start

    def _missing(self, sequence: Sequence, choice: EstateChoice, computed: int) -> int:
        """Device blocks: of the bytes, and of what it computes behind them."""
        size = self._pool.block_size
        rows = -(-computed // size)
        present = _num_present(choice.rows[: rows * self._pool.num_strips])
        behind = -(-sequence.work.goal_len(sequence) // size) - rows
        grown = BlockTable(self._pool)
        keep_windows(self._pool, grown, sequence)
        growth = grown.blocks_to_reach(0, max(0, behind) * size)
        return present + growth + sequence.work.spare_blocks(sequence)

    # --- when it is let in ---------------------------------------------------------------------------------------

    def fill(self, placement: Placement, content: ChoiceBytes, sequence: Sequence) -> None:
        """Gives the bytes blocks, and a slot. REQUIRES: `missing` blocks are free"""
        table, computed, rows = placement.table, placement.computed, content.choice.rows
        rows = rows[: -(-computed // self._pool.block_size) * self._pool.num_strips]
        assert table.try_append([row != NO_BLOCK for row in rows], computed), "the blocks were counted"
        blocks = [entry for entry in table.entries if entry]
        self._blocks.append((blocks, content.blocks[: len(blocks)]))
        held = _held(sequence, content.choice)
        if held is not None and held.table is None and computed == held.computed:
            held.epochs = table.epochs()
        if self._prefix_caching:
            table.commit(sequence.tokens, computed)
        if self._states.nearest(sequence, computed) < computed:
            tokens = TokenList(content.choice.token_ids[:computed])
            state = self._states.bring(sequence.group.salt, tokens, computed)
            self._slots.append((state.slot, content.states[computed]))
            self._states.drop([state])  # the sequence takes it next
        keep_windows(self._pool, table, sequence)
        table.slide(computed)

    def fill_cross(self, cross: CrossPlace, content: BlockBytes) -> None:
        """The same of an encoder input."""
        self._blocks.append((cross.prepare(), content))

    def take_blocks(self) -> list[tuple[list[int], BlockBytes]]:
        """Bytes that have to be on the device before the step, and the blocks that they go to."""
        blocks, self._blocks = self._blocks, []
        return blocks

    def take_states(self) -> list[StateWrite]:
        slots, self._slots = self._slots, []
        return [
            StateWrite(slots=np.asarray([slot], np.int32), content=content[None], moves=self._states.take_moves())
            for slot, content in slots
        ]


def _held(sequence: Sequence, choice: EstateChoice) -> KeptChoice | None:
    """The choice of its parent that is this one in files, if it is."""
    parent = sequence.group.ties.parent
    if parent is None or parent.stored is None or not any(one is choice for one in parent.stored.deed.choices):
        return None
    return parent.kept.get(choice.index)


def _stored_parent(sequence: Sequence) -> Record | None:
    """Whose files may serve it."""
    parent = sequence.group.ties.parent
    if parent is None or parent.stored is None or parent.lost:
        return None
    # The tokens may be the same, but not what they attend to.
    return parent if parent.encoder == sequence.group.request.encoder else None


def _choice(parent: Record, index: int) -> EstateChoice | None:
    assert parent.stored is not None
    return next((choice for choice in parent.stored.deed.choices if choice.index == index), None)


def _num_present(rows: Several[int]) -> int:
    return sum(row != NO_BLOCK for row in rows)


def served(rows: Several[int], windows: Several[int], block_size: int, most: int) -> int:
    """Of the first `most` tokens those behind which every strip has what the next token sees: as BlockTable.servable,
    of blocks that are not in memory."""
    position, before = most, -1
    while before != position:
        before = position
        for strip, window in enumerate(windows):
            position = _served_by(rows[strip :: len(windows)], window, block_size, position)
    return position


def _served_by(rows: Several[int], window: int, block_size: int, most: int) -> int:
    if window == 1:
        return most  # a token that begins a block sees itself alone
    position, row = most, -(-most // block_size) - 1
    while row >= (max(0, position - window + 1) // block_size if window else 0) and position:
        if rows[row] == NO_BLOCK:
            position = row * block_size
        row -= 1
    return position
