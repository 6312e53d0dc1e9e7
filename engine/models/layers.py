"""The building blocks of a model: weights in the form that the device multiplies, behind plain calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import kernels
from engine.kernels import PackedWeight
from engine.models.weights import WeightSource


class Linear:
    """y = x Wᵀ + b. Several matrices of the checkpoint that read the same x are one here, stacked along the output."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        self.weight = weight  # [N, K]
        self.bias = bias  # [N] float32

    @classmethod
    def load(cls, source: WeightSource, names: Sequence[str], dtype: torch.dtype, has_bias: bool) -> Linear:
        weight = kernels.pack_weights([source.load(f"{name}.weight") for name in names], dtype)
        if not has_bias:
            return cls(weight)
        return cls(weight, torch.cat([source.load(f"{name}.bias").float() for name in names]))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] → [T, N]"""
        return kernels.linear(x, self.weight, self.bias)


class Embedding:
    """A table of rows; `as_linear` makes the tied output projection of it, in the same memory."""

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight  # [V, H]

    @classmethod
    def load(cls, source: WeightSource, name: str, dtype: torch.dtype) -> Embedding:
        return cls(kernels.pack_weight(source.load(f"{name}.weight"), dtype))

    def __call__(self, ids: Tensor) -> Tensor:
        """[T] int32 → [T, H] float32"""
        return kernels.embedding(ids, self.weight)

    def as_linear(self) -> Linear:
        return Linear(self.weight)


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight  # [H] float32
        self.eps = eps

    @classmethod
    def load(cls, source: WeightSource, name: str, eps: float) -> RMSNorm:
        return cls(source.load(f"{name}.weight").float().clone(), eps)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, H] → [T, H]. With a residual, x is first added to it, in place, and the sum is normed."""
        return kernels.rms_norm(x, self.weight, self.eps, residual)

    def per_head(self, x: Tensor) -> None:
        """[T, heads, D], in place, each head by itself."""
        kernels.head_rms_norm(x, self.weight, self.eps)
