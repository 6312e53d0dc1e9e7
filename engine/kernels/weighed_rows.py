"""What an addition to a stream leaves for the norm that reads it next.

The norm is then no pass of its own: the product behind it takes the rows that have been left, and what the squares come
to is a factor of its results. Dims: T rows, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SQUARED = 8  # neighbours whose squares are one sum
# Each block of a product adds the squares up again. Of more or longer rows that takes as long as a norm.
_MOST_ROWS, _MOST_COLUMNS = 64, 2048


@dataclass(frozen=True, slots=True)
class GainAhead:
    """The weight [H] of a root-mean-square norm, with what is added to it."""

    weight: Tensor
    offset: float
    eps: float


@dataclass(frozen=True, slots=True)
class WeighedRows:
    """Rows [T, H] times the weight of their norm."""

    rows: Tensor
    squares: Tensor  # [T, H / 8] float32: of the rows before, eight neighbours each
    before: Tensor  # [T, H]: these rows
    eps: float

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape


def can_leave(num_tokens: int, hidden: int) -> bool:
    """Whether it pays for so many rows."""
    return num_tokens <= _MOST_ROWS and hidden <= _MOST_COLUMNS and hidden % SQUARED == 0


def weighed_like(before: Tensor, ahead: GainAhead) -> WeighedRows:
    """Memory for what is left of rows [T, H]."""
    num_tokens, hidden = before.shape
    squares = torch.empty(num_tokens, hidden // SQUARED, dtype=torch.float32, device=before.device)
    return WeighedRows(torch.empty_like(before), squares, before, ahead.eps)
