"""Low-rank deltas on the CPU (csrc/ops/cpu/lora.h): what adapters add to products, for the rows that have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cpu_experts import PackedExperts, chosen_experts


@dataclass(frozen=True, slots=True)
class LoraPart:
    """y[:, first_column:] += scale · (x Aᵀ) B, of one matrix of a checkpoint. Of a table x Aᵀ is a column of A."""

    a: Tensor  # [R, K] float32; of a table [R, V]
    b: Tensor  # [R, C] float32, the transpose of what checkpoints hold
    first_column: int  # of the product
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class LoraMatrices:
    """An adapter by the numbers of the products that it adds to."""

    def __init__(self, sites: Mapping[int, Sequence[LoraPart]]) -> None:
        self._sites = sites  # the extension has addresses of what they hold
        self._adapter = _C.Adapter({site: [_part(part) for part in parts] for site, parts in sites.items()})

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self._sites.values() for part in parts)


class LoraRows:
    """Which rows of a step have which adapter; each row has one or none."""

    def __init__(self, groups: Sequence[tuple[LoraMatrices, Sequence[int]]]) -> None:
        """Rows ascend."""
        self._groups = groups  # the extension has addresses of their adapters
        self._rows = _C.StepAdapters([(adapter._adapter, list(rows)) for adapter, rows in groups])

    def is_at(self, site: int) -> bool:
        """Whether something is added to a row of this product."""
        return bool(self.rows_at(site))

    def rows_at(self, site: int) -> list[int]:
        return self._rows.rows_at(site)

    def finished(self, site: int, fused: Callable[[], Tensor], plain: Callable[[], Tensor]) -> Tensor:
        """`plain` where something is added to a row, else `fused`, [T, …] both."""
        rows = torch.tensor(self.rows_at(site), dtype=torch.int64)
        result = fused()
        result[rows] = plain()[rows]
        return result

    def is_among(self, up: int, down: int) -> bool:
        """Whether something may be added to a product of some expert."""
        return self._rows.is_among(up, down)

    def experts(
        self,
        up_and_down: tuple[PackedExperts, PackedExperts],
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        activation: str,
    ) -> Tensor:
        """x [T, H] → what the experts ids [T, K] make of it, times weights [T, K], added by rank: [T, H]."""
        assert x.dtype is torch.float32 and x.is_contiguous() and x.dim() == 2, x.shape
        out = torch.empty(ids.shape[0], up_and_down[1].each[0].out_features)
        matrices = (up_and_down[0]._matrices, up_and_down[1]._matrices)
        chosen = chosen_experts(ids, weights)
        self._rows.experts(matrices, chosen, x.data_ptr(), ACTIVATION_CODES[activation], out.data_ptr())
        return out

    def begun(self, site: int, x: Tensor) -> Tensor | None:
        return None

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        """To the product y [T, N] of x [T, K], in place."""
        for rows in (x, y):
            assert rows.dtype is torch.float32 and rows.is_contiguous() and rows.dim() == 2, rows.shape
        self._rows.add(site, x.data_ptr(), x.shape[1], y.data_ptr(), y.shape[1])

    def add_rows(self, site: int, ids: Tensor, last_tokens: Tensor | None, y: Tensor) -> None:
        """To rows y [T, K] of a table by the tokens ids [T] int32, in place."""
        assert last_tokens is None, "on the CPU the runner resolves them"
        assert ids.dtype is torch.int32 and ids.is_contiguous() and ids.shape == y.shape[:1], ids.shape
        assert y.dtype is torch.float32 and y.is_contiguous() and y.dim() == 2, y.shape
        self._rows.add_rows(site, ids.data_ptr(), y.data_ptr(), y.shape[1])

    def of(self, rows: Sequence[int]) -> LoraRows:
        """Of these rows alone, ascending: what was row rows[i] is row i."""
        places = {row: place for place, row in enumerate(rows)}
        kept = [(adapter, [places[row] for row in own if row in places]) for adapter, own in self._groups]
        return LoraRows([(adapter, own) for adapter, own in kept if own])


def _part(part: LoraPart) -> tuple[int, int, int, int, int, int, float]:
    a, b = part.a, part.b
    for matrix in (a, b):
        assert matrix.dtype is torch.float32 and matrix.is_contiguous() and matrix.dim() == 2, matrix.shape
    assert a.shape[0] == b.shape[0], (a.shape, b.shape)
    return (a.data_ptr(), b.data_ptr(), *a.shape, part.first_column, b.shape[1], part.scale)
