"""Whether a product of a batch of rows is multiplied in tiles (csrc/ops/cuda/tile_linear.h)."""

from __future__ import annotations

from bequest.engine import _C


def is_tile_product(num_tokens: int, outputs: int, depth: int, bits: int, *, normed: bool = False) -> bool:
    """Of rows [T, K] with a weight [N, K] of so many bits; `normed`: with a norm in front."""
    return _C.cuda_is_tile_product(num_tokens, outputs, depth, bits, normed)
