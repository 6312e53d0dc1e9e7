"""What a stream begins with: rows of a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Norm
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.together import Together
from bequest.engine.layers.weight import Table, Weight


@dataclass(frozen=True, slots=True)
class Overlay:
    """Rows that some tokens begin with in place of the table's: those of images, or of a request itself."""

    tokens: Tensor  # [M] int64 in [0, T)
    rows: Tensor  # [M, H]
    turns: Tensor | None = None  # [M, 3] int32: positions of rotation, where they are apart from those of tokens
    together: Together | None = None  # which of them see each other; None: they see what is before them
    deep: tuple[Tensor, ...] = ()  # [M, H] each: what is added to them behind the first layers, one after another

    def put(self, rows: Tensor, factor: float) -> Tensor:
        """The rows [T, H] with these among them, times the factor."""
        placed = self.rows.to(rows.dtype)
        rows[self.tokens] = placed if factor == 1.0 else placed * factor
        return rows

    def deepen(self, state: Tensor, layer: int) -> None:
        """Adds to the state [T, H] behind a layer what some tokens get there."""
        if layer < len(self.deep):
            state[self.tokens] += self.deep[layer].to(state.dtype)


@dataclass(frozen=True, slots=True)
class FixedOverlay:
    """The same at fixed places, which a graph knows: rows of all tokens, and which of them are to be taken."""

    rows: Tensor  # [T, H]
    marks: Tensor  # [T, 1] bool
    deep: tuple[Tensor, ...] = ()  # [T, H] each
    together: None = None  # no graph knows who sees whom

    def put(self, rows: Tensor, factor: float) -> Tensor:
        return torch.where(self.marks, self.rows if factor == 1.0 else self.rows * factor, rows)

    def deepen(self, state: Tensor, layer: int) -> None:
        if layer < len(self.deep):
            state += torch.where(self.marks, self.deep[layer], 0)


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What each layer gets of a token beside the stream: rows of a table, and a product of what the stream begins
    with."""

    table: Table  # [V, L P]
    table_factor: float
    product: Weight  # [L P, H]
    product_factor: float
    norm: Norm  # of a layer's part of the product, [P]
    factor: float  # of the sum

    def of(self, looked_up: Tensor, rows: Tensor, ops: Ops) -> Tensor:
        """Rows of the table [T, L P], and those that the stream begins with [T, H] → [T, L, P]"""
        size = len(self.norm.weight)
        made = self.product(rows).mul_(self.product_factor)
        normed = ops.norm(made.view(-1, size), self.norm, None, None)
        total = normed.view_as(looked_up).add_(looked_up.mul_(self.table_factor)).mul_(self.factor)
        return total.view(len(total), total.shape[1] // size, size)


@dataclass(frozen=True, slots=True)
class StartRows:
    """Rows of a table by token, and rows of another one by position that are added to them."""

    ids: Tensor  # [T] int32
    table: Table  # [V, H]
    last_tokens: Tensor | None = None  # as in Table.rows
    positions: Tensor | None = None  # [T] int32, where there is a table for them
    position_table: Table | None = None  # [P, H]
    factor: float = 1.0  # of the rows by token
    overlay: Overlay | FixedOverlay | None = None
    scales_overlay: bool = False  # the factor is that of its rows, too
    inputs: TokenInputs | None = None  # None: layers read the stream alone

    def stream(self, ops: Ops) -> Stream:
        rows = self.table.rows(self.ids, self.last_tokens)
        if self.factor != 1.0:
            rows = rows.mul_(self.factor)
        if self.overlay is not None:
            rows = self.overlay.put(rows, self.factor if self.scales_overlay else 1.0)
        if self.positions is not None and self.position_table is not None:
            rows = rows.add_(self.position_table.rows(self.positions))
        if self.inputs is None:
            return Stream(ops, rows)
        looked_up = self.inputs.table.rows(self.ids, self.last_tokens)
        return Stream(ops, rows, inputs=self.inputs.of(looked_up, rows, ops))
