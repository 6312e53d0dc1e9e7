"""Which rows of a step have which adapter, as products are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Finish = Callable[[], Tensor]


class AdapterRows(Protocol):
    """Of some rows; each has one adapter or none."""

    def is_at(self, site: int) -> bool:
        """Whether something is added to a row of the product with this number."""
        ...

    def is_among(self, up: int, down: int) -> bool:
        """The same of some expert's product, of the two matrices of experts whose first ones have these numbers."""
        ...

    def begun(self, site: int, x: Tensor) -> Tensor | None:
        """What is added to the product of x [T, K], [T, N], before there is the product, which adds itself to it. None:
        it has to be added behind it."""
        ...

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        """To the product y [T, N] of x [T, K], in place."""
        ...

    def add_rows(self, site: int, ids: Tensor, last_tokens: Tensor | None, y: Tensor) -> None:
        """To rows y [T, K] of a table by the tokens ids [T], as Table.rows takes them, in place."""
        ...

    def finished(self, site: int, fused: Finish, plain: Finish) -> Tensor:
        """What a layer makes of a product, [T, …]: `plain` has what adapters add, `fused` has not. Where the two round
        otherwise, rows without an adapter may be those of the second."""
        ...


class StepAdapters:
    """Of a step's T rows, and of those R of them that are read: a stream that has narrowed has these alone."""

    def __init__(self, rows: AdapterRows, num_rows: int, read: AdapterRows | None = None) -> None:
        self.rows = rows
        self._num_rows = num_rows
        self._read = read

    def of(self, num_rows: int) -> AdapterRows:
        """Of a stream with so many rows: T, or R."""
        return self.rows if num_rows == self._num_rows or self._read is None else self._read
