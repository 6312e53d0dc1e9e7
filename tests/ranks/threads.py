"""Ranks that are threads of one process: the arithmetic of several ranks without their start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from bequest.engine.types.blocks import BlockBytes

T = TypeVar("T")

_PATIENCE = 60.0  # seconds; a rank that failed keeps the others waiting


class _Table:
    def __init__(self, size: int) -> None:
        self.values: list[object] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)


class ThreadRanks:
    """Ranks."""

    def __init__(self, rank: int, size: int, table: _Table) -> None:
        self.rank, self.size = rank, size
        self._table = table

    @classmethod
    def alone(cls, size: int) -> ThreadRanks:
        """The first of so many, whose others never come."""
        return cls(0, size, _Table(size))

    def sum(self, part: Tensor) -> Tensor:
        return torch.stack([*self._all(part)]).sum(0)

    def joined(self, part: Tensor) -> Tensor:
        return torch.cat(self._all(part), dim=1)

    def least(self, value: int) -> int:
        return min(self._all(value))

    def bytes_of_all(self, content: BlockBytes) -> list[BlockBytes] | None:
        parts = self._all(content)
        return None if self.rank else parts

    def _all(self, value: T) -> list[T]:
        self._table.values[self.rank] = value
        self._table.barrier.wait()
        found = [other for other in self._table.values if isinstance(other, type(value))]
        self._table.barrier.wait()
        return found


def on_ranks(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What each of so many ranks makes of it."""
    table = _Table(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, size, table))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
