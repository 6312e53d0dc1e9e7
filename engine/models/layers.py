"""The building blocks of a model: weights in the form that the backend multiplies, behind plain calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.kernels.kv_format import UNSCALED, KvScales
from bequest.engine.models.backend import Backend, CpuBackend, Matrix, Product, StreamNorm
from bequest.engine.models.kv_scales import read_kv_scales
from bequest.engine.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Loader:
    """Brings tensors of a checkpoint to a backend, in the dtype they are stored in there."""

    source: WeightSource
    backend: Backend
    dtype: torch.dtype
    scales_kv: bool = False  # the cache is fp8

    def kv_scales(self, prefix: str) -> KvScales:
        """Of the layer whose attention's tensors begin with `prefix`."""
        return read_kv_scales(self.source, prefix) if self.scales_kv else UNSCALED

    def matrix(self, names: Sequence[str]) -> Matrix:
        """Stacked along the output. A float32 matrix stays in the codes of a quantised file, which are its values."""
        if self.dtype is torch.float32:
            codes = [self.source.load_codes(f"{name}.weight") for name in names]
            quantised = [part for part in codes if part is not None]
            if len(quantised) == len(names) and len({part.bits for part in quantised}) == 1:
                kept = self.backend.quantised_matrix(quantised)
                if kept is not None:
                    return kept
        return self.backend.matrix([self.source.load(f"{name}.weight") for name in names], self.dtype)

    def vector(self, names: Sequence[str]) -> Tensor:
        return self.backend.vector(torch.cat([self.source.load(name) for name in names]), self.dtype)


class Linear:
    """y = x Wᵀ + b. Several matrices of the checkpoint that read the same x are one here, stacked along the output."""

    def __init__(self, backend: Backend, weight: Matrix, bias: Tensor | None = None) -> None:
        self.backend = backend
        self.weight = weight  # [N, K]
        self.bias = bias  # [N]

    @property
    def product(self) -> Product:
        """For a backend that does more than one at a time."""
        return Product(self.weight, self.bias)

    @classmethod
    def load(cls, loader: Loader, names: Sequence[str], has_bias: bool) -> Linear:
        bias = loader.vector([f"{name}.bias" for name in names]) if has_bias else None
        return cls(loader.backend, loader.matrix(names), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] → [T, N]"""
        return self.backend.linear(x, self.weight, self.bias)

    def into(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """[T, K] → what is still to be added to the residual [T, N]; None: the residual has it."""
        return self.backend.linear_into(x, self.weight, self.bias, residual)


class Embedding:
    """A table of rows; `as_linear` makes the tied output projection of it, in the same memory."""

    def __init__(self, backend: Backend, weight: Matrix) -> None:
        self.backend = backend
        self.weight = weight  # [V, H]

    @classmethod
    def load(cls, loader: Loader, name: str) -> Embedding:
        return cls(loader.backend, loader.matrix([name]))

    def __call__(self, ids: Tensor, last_tokens: Tensor | None) -> Tensor:
        """[T] int32 → [T, H]"""
        return self.backend.embedding(ids, self.weight, last_tokens)

    def as_linear(self) -> Linear:
        return Linear(self.backend, self.weight)


class RowTable(Embedding):
    """A table on the CPU that nothing is multiplied with: its rows lie in one piece each, as float32."""

    def __init__(self, backend: CpuBackend, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__(backend, rows.to(dtype).float().contiguous())

    def __call__(self, ids: Tensor, last_tokens: Tensor | None) -> Tensor:
        assert last_tokens is None, "on the CPU the runner resolves them"
        return torch.index_select(self.weight, 0, ids)


class RMSNorm:
    def __init__(self, backend: Backend, weight: Tensor, eps: float) -> None:
        self.backend = backend
        self.weight = weight  # [H]
        self.eps = eps

    @classmethod
    def load(cls, loader: Loader, name: str, eps: float) -> RMSNorm:
        return cls(loader.backend, loader.vector([f"{name}.weight"]), eps)

    def __call__(self, x: Tensor | None, residual: Tensor, tap: LayerTap | None = None) -> Tensor:
        """[T, H] → [T, H]: x, if there is one, is added to the residual, in place, and the sum is normed."""
        if x is None:
            return self.backend.rms_norm(residual, self.weight, self.eps, None, tap)
        return self.backend.rms_norm(x, self.weight, self.eps, residual, tap)

    def tapped(self, tap: LayerTap | None) -> StreamNorm:
        """For products that begin with it."""
        return StreamNorm(self.weight, self.eps, tap)


class LayerNorm:
    def __init__(self, backend: Backend, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.backend = backend
        self.weight = weight  # [H]
        self.bias = bias  # [H]
        self.eps = eps

    @classmethod
    def load(cls, loader: Loader, name: str, eps: float) -> LayerNorm:
        return cls(loader.backend, loader.vector([f"{name}.weight"]), loader.vector([f"{name}.bias"]), eps)

    def __call__(self, x: Tensor, residual: Tensor | None, tap: LayerTap | None = None) -> Tensor:
        """[T, H] → [T, H]: x is added to the residual (if any), in place, and the sum is normed."""
        return self.backend.layer_norm(x, self.weight, self.bias, self.eps, residual, tap)
