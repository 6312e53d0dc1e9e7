"""Whether a product of a batch of rows is multiplied in tiles (csrc/ops/cuda/tile_linear.h)."""

from __future__ import annotations

from enum import IntEnum

from bequest.engine import _C


class TileFormat(IntEnum):
    """What is multiplied: the weight, and rows where these are not in bfloat16."""

    BFLOAT16, FLOAT8, FLOAT8_ROWS, INT4 = range(4)


def is_tile_product(num_tokens: int, outputs: int, depth: int, format: TileFormat, *, normed: bool = False) -> bool:
    """Of rows [T, K] with a weight [N, K]; `normed`: with a norm in front."""
    return _C.cuda_is_tile_product(num_tokens, outputs, depth, format, normed)
