"""transformers with an fp8 cache: its models keep keys and values rounded as the cache stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from engine.kernels.kv_format import FP8, UNSCALED, KvScales


def rounded(x: Tensor, scale: float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(FP8).to(x.dtype) * scale


def round_caches(patch: pytest.MonkeyPatch, scales: KvScales = UNSCALED) -> None:
    """From here on every model of transformers, with the same scales in all layers."""

    def rounding(update: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Mapping[str, Any]) -> Any:
            return update(self, rounded(keys, scales.key), rounded(values, scales.value), *args, **kwargs)

        return wrapped

    for kind in (DynamicLayer, DynamicSlidingWindowLayer):
        patch.setattr(kind, "update", rounding(kind.__dict__["update"]))
