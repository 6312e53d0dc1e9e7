"""Products of a reference in bfloat16 that do not depend on the chip.

On aarch64 torch gives products of bfloat16 to oneDNN first. On a chip without instructions for them oneDNN refuses.
torch then warns ("mkldnn_matmul failed, switching to BLAS gemm"), turns oneDNN off for the rest of the process, and
multiplies by itself. Warnings are errors in these tests, and what one test turns off must not change the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_products() -> Iterator[None]:
    """Without oneDNN: torch multiplies by itself on every chip.

    `torch.backends.mkldnn.flags` would set more than this, and warns about some of it.
    """
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled
