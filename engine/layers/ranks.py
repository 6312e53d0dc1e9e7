"""Ranks: processes that compute one model together, each with a part of its heads, inner features and vocabulary.

All of them run the same steps in the same order. So each asks for the same sums at the same time, and nobody has to say
which one it is.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bequest.engine.types.blocks import BlockBytes


class Ranks(Protocol):
    """Those who compute a model, as one of them sees it."""

    @property
    def rank(self) -> int:
        """Its own number, in [0, size)."""
        ...

    @property
    def size(self) -> int: ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum of every rank's part, [T, H]: the same bits on all. May be in the memory of the part."""
        ...

    def joined(self, part: Tensor) -> Tensor:
        """Every rank's part [R, N] side by side, by rank: [R, size N]."""
        ...

    def least(self, value: int) -> int:
        """The smallest value that any rank has."""
        ...

    def bytes_of_all(self, content: BlockBytes) -> list[BlockBytes] | None:
        """Every rank's [N, bytes], of the same shape on all: by rank, on the first one; None on the others."""
        ...


class Solo:
    """One rank that computes all."""

    rank, size = 0, 1

    def sum(self, part: Tensor) -> Tensor:
        return part

    def joined(self, part: Tensor) -> Tensor:
        return part

    def least(self, value: int) -> int:
        return value

    def bytes_of_all(self, content: BlockBytes) -> list[BlockBytes] | None:
        return [content]


SOLO = Solo()
