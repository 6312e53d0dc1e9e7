"""The tier in the host's memory: steps reach it as it is, so that its tickets are done at once.

The memory belongs to the runner (engine/runner/cpu.py, engine/runner/host_cache.py). Owned by the event-loop thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from bequest.engine._C import BlockPool
from bequest.engine.cache.tiers.ticket import Ticket, done
from bequest.engine.cache.tiers.tier import BlockPairs, Moves


class HostTier:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        # Of the next step. By destination: of two moves to one block the earlier one's content is not needed any more.
        self._out: dict[int, int] = {}  # host block → device block
        self._into: dict[int, int] = {}  # device block → host block

    def read(self, blocks: Sequence[int]) -> Ticket:
        return done()

    def bring(self, pairs: BlockPairs) -> None:
        for host, device in pairs:
            self._into[device] = host

    def write(self, pairs: BlockPairs) -> Ticket:
        for device, host in pairs:
            self._out[host] = device
        return done()

    def take_moves(self) -> Moves:
        out = [(device, host) for host, device in self._out.items()]
        into = [(host, device) for device, host in self._into.items()]
        self._out.clear()
        self._into.clear()
        return Moves(out, into)

    def going_out(self, block: int) -> int | None:
        """The device block whose content the next step brings to this one."""
        return self._out.get(block)
