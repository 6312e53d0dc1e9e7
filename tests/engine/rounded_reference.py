"""transformers with a narrow cache: its models keep keys and values rounded as the cache stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from bequest.engine.kernels.kv_format import FP8, UNSCALED, KvScales


def rounded(x: Tensor, scale: float, dtype: torch.dtype = FP8) -> Tensor:
    most = torch.finfo(dtype).max
    return (x / scale).clamp(-most, most).to(dtype).to(x.dtype) * scale


def round_caches(patch: pytest.MonkeyPatch, scales: KvScales = UNSCALED, dtype: torch.dtype = FP8) -> None:
    """From here on every model of transformers, with the same scales in all layers."""

    def rounding(update: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Mapping[str, Any]) -> Any:
            narrow = rounded(keys, scales.key, dtype), rounded(values, scales.value, dtype)
            return update(self, *narrow, *args, **kwargs)

        return wrapped

    for kind in (DynamicLayer, DynamicSlidingWindowLayer):
        patch.setattr(kind, "update", rounding(kind.__dict__["update"]))
