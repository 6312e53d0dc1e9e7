"""The table of tokens and the output matrix, as adapters meet them."""

from __future__ import annotations

import torch

from bequest.engine.layers.vocabulary import VocabularyPart
from bequest.engine.layers.weight import Weight
from bequest.engine.models.reader import Matrix
from bequest.engine.models.sites import OUTPUT, TABLE

_NUMBERS = ("float32", "bfloat16")  # formats whose values are a checkpoint's, but for rounding


def some_rows(count: int) -> list[int]:
    """Numbers of a few rows among so many: what tells two matrices apart."""
    return list(range(0, count, max(1, count // 16)))


def table_matrix(table: Weight, device: torch.device) -> Matrix:
    return _matrix(TABLE, table, device, is_table=True)


def output_matrix(output: Weight, device: torch.device) -> Matrix:
    return _matrix(OUTPUT, output, device, is_table=False)


def _matrix(site: int, weight: Weight, device: torch.device, *, is_table: bool) -> Matrix:
    known = None
    if weight.format in _NUMBERS and not isinstance(weight, VocabularyPart):
        rows = torch.tensor(some_rows(weight.out_features), dtype=torch.int32, device=device)
        known = weight.rows(rows).float().cpu()
    return Matrix(site, 0, weight.out_features, weight.in_features, is_table=is_table, known=known)
