"""What a KV cache is stored in, and what the kernels are told about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
KV_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, FP8: 2, torch.float16: 3}  # csrc/core/dtype.h, half.h


@dataclass(frozen=True, slots=True)
class KvScales:
    """What a layer's stored keys and values are to be multiplied by. An fp8 cache holds what was computed divided by
    it, within ±448; in other caches both are 1."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KvScales()
