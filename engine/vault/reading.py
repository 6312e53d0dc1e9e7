"""Brings the bytes of leases from where they are kept, by several threads. Event-loop thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bequest.engine.estates import EstateDesk
from bequest.engine.types.blocks import BlockBytes
from bequest.engine.types.estate import NO_BLOCK, ChoiceBytes, Manifest
from bequest.engine.vault.shelving import Found, Keep, Shelving

_THREADS = max(2, min(8, os.cpu_count() or 1))  # a checksum takes longer than a copy
_PART_BYTES = 32 << 20  # that one of them reads at a time


class Reader:
    def __init__(self, shelf: Shelving, desk: EstateDesk) -> None:
        self._shelf = shelf
        self._desk = desk
        self._threads = ThreadPoolExecutor(_THREADS, "bequest-estates-read")

    async def find(self, tenant: str, reference: str, keep: Keep) -> Found | None:
        """As Shelving.find. Raises OSError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._shelf.find, tenant, reference, keep)

    async def choice(self, manifest: Manifest, index: int) -> ChoiceBytes:
        """Raises OSError or BrokenBlocks."""
        deed = manifest.deed
        choice = next(c for c in deed.choices if c.index == index)
        rows = [row for row in choice.rows if row != NO_BLOCK]
        encoder = () if deed.encoder is None else deed.encoder.rows
        content = await self.rows(manifest, [*rows, *encoder, *(r for state in choice.states for r in state.rows)])
        end = len(rows) + len(encoder)
        states: dict[int, BlockBytes] = {}
        for state in choice.states:
            states[state.position] = self._desk.state_in(content[end : end + len(state.rows)])
            end += len(state.rows)
        return ChoiceBytes(choice, content[: len(rows)], content[len(rows) : len(rows) + len(encoder)], states)

    async def rows(self, manifest: Manifest, rows: Iterable[int]) -> BlockBytes:
        """Of the content of a lease. Raises OSError or BrokenBlocks."""
        blocks = [manifest.blocks[row] for row in rows]
        content = np.empty((len(blocks), self._desk.block_bytes), np.uint8)
        size = max(1, _PART_BYTES // self._desk.block_bytes)
        loop = asyncio.get_running_loop()
        parts = [
            loop.run_in_executor(self._threads, self._shelf.read, blocks[i : i + size], content[i : i + size])
            for i in range(0, len(blocks), size)
        ]
        for failed in filter(None, await asyncio.gather(*parts, return_exceptions=True)):
            raise failed
        return content

    def close(self) -> None:
        self._threads.shutdown(wait=False)
