"""Whether products of 5 to 128 rows are multiplied in tiles (csrc/ops/cuda/tile_linear.h).

Tiles were timed alone, not in an engine. Until they are, only tests and benchmarks turn them on.
"""

from __future__ import annotations

from bequest.engine import _C

enabled = False


def is_tile_product(num_tokens: int, outputs: int, depth: int, bits: int, *, normed: bool = False) -> bool:
    """Of rows [T, K] with a weight [N, K] of so many bits; `normed`: with a norm in front."""
    return enabled and _C.cuda_is_tile_product(num_tokens, outputs, depth, bits, normed)
