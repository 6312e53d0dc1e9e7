"""Arrays in host memory as the extension takes them: an address, and sizes that were checked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bequest.engine._C import address

HostInts = npt.NDArray[np.int32] | Tensor
FLOAT32 = 0  # csrc/core/dtype.h

__all__ = ["FLOAT32", "HostInts", "address", "host_ints", "logit_stride"]


def logit_stride(logits: Tensor) -> int:
    """Elements between the rows of logits f32 [N, V]."""
    stride = logits.stride()
    assert logits.dtype == torch.float32 and stride[1] == 1
    return stride[0]


def host_ints(array: HostInts) -> tuple[int, tuple[int, ...]]:
    """Address and shape of a contiguous int32 host array."""
    if isinstance(array, Tensor):
        assert array.dtype == torch.int32 and array.is_contiguous() and array.device.type == "cpu"
        return array.data_ptr(), tuple(array.shape)
    assert array.dtype == np.int32 and array.flags.c_contiguous
    return address(array), array.shape
