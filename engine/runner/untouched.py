"""Memory that the process has only once it writes there.

Gigabytes that leases or drafts may come to need cost neither time nor memory at the start. torch.zeros writes its
zeros; NumPy has the system's.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_LINE = 64  # bytes of a line of the CPU's caches, where memory of torch begins, too


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _LINE, np.uint8)
    begin = -raw.ctypes.data % _LINE
    return torch.from_numpy(raw[begin : begin + size]).view(dtype).reshape(shape)
