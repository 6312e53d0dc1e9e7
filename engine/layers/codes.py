"""Matrices in the codes of a checkpoint: a backend may keep them so, and `values` is what they stand for.

Scales are by row, so that rows can be taken out of a matrix or stacked without a look at its format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bequest.engine.kernels.cpu_weights import QuantisedRows


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """value = scale · code, where a code is a float of 8 bits (e4m3)."""

    codes: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [N, G] float32
    group: int  # neighbours along K that share a scale; the last ones may be fewer

    def __post_init__(self) -> None:
        _check_groups(self.codes, self.scales, self.group)

    @property
    def kind(self) -> tuple[object, ...]:
        """Matrices of the same kind can be one weight."""
        return (Float8Rows, self.group)

    def take(self, rows: slice) -> Float8Rows:
        return replace(self, codes=self.codes[rows], scales=self.scales[rows])

    def take_columns(self, columns: slice) -> Float8Rows | None:
        """None: these begin or end within a group."""
        groups = _groups_of(columns, self.group, self.codes.shape[1])
        if groups is None:
            return None
        codes = self.codes[:, columns]
        return replace(self, codes=codes, scales=self.scales[:, groups], group=min(self.group, codes.shape[1]))

    def values(self) -> Tensor:
        """[N, K] float32"""
        return self.codes.float() * _spread(self.scales, self.group, self.codes.shape[1])


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """value = scale · (code - zero)."""

    bits: int  # of a code
    codes: Tensor  # [N, K] uint8
    scales: Tensor  # [N, G] float32
    zeros: Tensor  # [N, G] int16
    group: int  # neighbours along K that share a scale; the last ones may be fewer
    order: Tensor | None = None  # [K] int64: the group of each column, where these are not neighbours

    def __post_init__(self) -> None:
        assert self.zeros.shape == self.scales.shape, (self.zeros.shape, self.scales.shape)
        _check_groups(self.codes, self.scales, self.group)

    @property
    def kind(self) -> tuple[object, ...]:
        """Matrices of the same kind can be one weight."""
        has_offset = self.bits > 4 and not bool((self.zeros == 1 << (self.bits - 1)).all())
        return (IntegerRows, self.bits, self.group, self.order is None, has_offset)

    def take(self, rows: slice) -> IntegerRows:
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=self.zeros[rows])

    def take_columns(self, columns: slice) -> IntegerRows | None:
        """None: these begin or end within a group, or groups are not of neighbours."""
        groups = _groups_of(columns, self.group, self.codes.shape[1])
        if groups is None or self.order is not None:
            return None
        codes, scales, zeros = self.codes[:, columns], self.scales[:, groups], self.zeros[:, groups]
        return replace(self, codes=codes, scales=scales, zeros=zeros, group=min(self.group, codes.shape[1]))

    def values(self) -> Tensor:
        """[N, K] float32"""
        scales, zeros = (self._of_columns(part.float()) for part in (self.scales, self.zeros))
        return (self.codes.float() - zeros) * scales

    def _of_columns(self, groups: Tensor) -> Tensor:
        if self.order is not None:
            return groups[:, self.order]
        return _spread(groups, self.group, self.codes.shape[1])


Codes = QuantisedRows | Float8Rows | IntegerRows


def _check_groups(codes: Tensor, scales: Tensor, group: int) -> None:
    num_rows, depth = codes.shape
    assert scales.shape == (num_rows, -(-depth // group)), (codes.shape, scales.shape, group)


def _groups_of(columns: slice, group: int, depth: int) -> slice | None:
    """Those of all K columns that these are; None: not whole ones."""
    if group >= depth:  # one for all: a part of it has the same scale
        return slice(0, 1)
    if columns.start % group or (columns.stop % group and columns.stop != depth):
        return None
    return slice(columns.start // group, -(-columns.stop // group))


def _spread(groups: Tensor, group: int, depth: int) -> Tensor:
    """[N, G] → [N, K]"""
    return groups if groups.shape[1] == 1 else torch.repeat_interleave(groups, group, dim=1)[:, :depth]
