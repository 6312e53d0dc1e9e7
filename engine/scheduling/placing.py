"""Finds a waiting sequence its place in the cache: what it starts from, and room for the rest."""

from __future__ import annotations

from collections.abc import Collection

from bequest.engine.cache.kv_cache import KvCache
from bequest.engine.cache.placement import Placement
from bequest.engine.cache.tiers.ticket import Ticket
from bequest.engine.state.leased import may_owe_blocks
from bequest.engine.state.sequence import Lane, Sequence


class Placer:
    """Knows which waiting sequences have blocks on the host (shared ones stayed on the device): when nothing runs, they
    must make room."""

    def __init__(self, cache: KvCache, most_beams: int) -> None:
        """`most_beams`: that may run, of all groups."""
        self._cache = cache
        self._most_beams = most_beams
        self._swapped: dict[Sequence, None] = {}  # an ordered set

    def take_blocks(self, sequence: Sequence) -> bool:
        """Moves its blocks to the host, if they fit there, or drops them. False: it has to keep them for now."""
        if self._cache.try_swap_out(sequence):
            self._cache.states.let_go(sequence)
            self._swapped[sequence] = None
        elif may_owe_blocks(sequence):
            return False
        else:
            self.drop_blocks(sequence)
        return True

    def forget(self, sequence: Sequence) -> None:
        """It runs, or it is gone."""
        self._swapped.pop(sequence, None)

    def drop_blocks(self, sequence: Sequence) -> None:
        sequence.table.free()
        self._cache.states.let_go(sequence)
        sequence.num_computed = 0
        self._cache.release_cross(sequence.group)

    def place(self, sequence: Sequence, running: Collection[Sequence]) -> Placement | Ticket | None:
        """Where it starts from, with room for it beside those that run; None if there is none. A ticket: its bytes are
        on their way, and it holds nothing new meanwhile."""
        if not self._cache.states.has_room(sequence):
            return None
        placement = self._cache.place(sequence)
        if placement.ticket.pending:
            return self._await(placement, sequence)
        needed = placement.needed
        if sequence.group.kind.lane is Lane.EXTRACTION:
            needed += _unread(running)
        if self._is_roomy(needed, running):
            return placement
        growth = sum(s.work.growth(s) for s in running) * self._cache.pool.num_strips
        if self._cache.make_room(needed + growth):
            return placement
        if not running and self._make_room_alone(placement, sequence):
            return placement
        if placement.table is not sequence.table:
            placement.drop()
        if running or any(may_owe_blocks(s) for s in self._swapped):
            return None
        return self._place_anew(sequence)

    def _is_roomy(self, needed: int, running: Collection[Sequence]) -> bool:
        """Whether there is room however those that run grow, mostly: who does need not be counted."""
        pool = self._cache.pool
        return pool.num_free >= needed + (len(running) + self._most_beams) * pool.num_strips

    def _make_room_alone(self, placement: Placement, sequence: Sequence) -> bool:
        """Alone it must be able to run. Luxuries are then the copy of a partly filled block, unless a lease promises
        it, and what other waiting sequences left here and on the host when they were swapped out."""
        cache = self._cache
        if placement.lease is None and cache.trim(placement, sequence) and cache.make_room(placement.needed):
            return True
        for other in sorted(self._swapped, key=lambda s: s.urgency, reverse=True):
            if other is not sequence and not may_owe_blocks(other):
                del self._swapped[other]
                self.drop_blocks(other)
                if placement.lost_cross(sequence):
                    return False
                if cache.make_room(placement.needed):
                    return True
        return False

    def _await(self, placement: Placement, sequence: Sequence) -> Ticket:
        if placement.table is not sequence.table:
            placement.drop()
        return placement.ticket

    def _place_anew(self, sequence: Sequence) -> Placement | Ticket | None:
        """What it has, or would share, is in the way of leases that should move to the host: they move first."""
        cache = self._cache
        self._swapped.pop(sequence, None)
        self.drop_blocks(sequence)
        own = -(-len(sequence.tokens) // cache.pool.block_size) * cache.pool.num_strips
        cache.make_room(own + cache.cross.num_blocks(sequence.group.request.encoder))
        placement = cache.place(sequence)
        if placement.ticket.pending:
            return self._await(placement, sequence)
        if cache.make_room(placement.needed):
            return placement
        if cache.trim(placement, sequence) and cache.make_room(placement.needed):
            return placement
        placement.drop()
        return None


def _unread(running: Collection[Sequence]) -> int:
    """Blocks that prompts of generations, which run, will still take. An extraction leaves them these: it has its share
    of a step before they have theirs, so that each would take the other's blocks again and again."""
    prompts = (s for s in running if s.num_pending > 1 and s.group.kind.lane is Lane.GENERATION)
    return sum(s.table.blocks_needed(s.num_computed, len(s.tokens)) for s in prompts)
