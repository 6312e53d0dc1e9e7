"""What towers are made of: tensors by name, affine maps, norms, activations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.models.reader import Reader
from bequest.engine.models.towers.config import TowerActivation


class Tensors:
    """Reads tensors by name, in the dtype that a tower computes in."""

    def __init__(self, read: Reader, dtype: torch.dtype) -> None:
        self._read = read
        self.dtype = dtype

    def under(self, prefix: str) -> Tensors:
        return Tensors(self._read.under(prefix), self.dtype)

    def get(self, name: str, *shape: int) -> Tensor:
        return self._read.placed(self._read.tensor(name, shape)).to(self.dtype)

    def placed(self, values: Tensor) -> Tensor:
        """On the device, in float32."""
        return self._read.placed(values)


class Affine:
    """A matrix and its bias."""

    def __init__(self, read: Tensors, name: str, rows: int, columns: int, *, has_bias: bool = True) -> None:
        self._matrix = read.get(f"{name}.weight", rows, columns)
        self._bias = read.get(f"{name}.bias", rows) if has_bias else None

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._matrix, self._bias)


class TowerNorm:
    """Subtracts the mean and has a bias; or neither, by the root of the mean square."""

    def __init__(self, read: Tensors, name: str, size: int, eps: float, *, centred: bool = True) -> None:
        self._weight = read.get(f"{name}.weight", size)
        self._bias = read.get(f"{name}.bias", size) if centred else None
        self._eps = eps

    def __call__(self, rows: Tensor) -> Tensor:
        if self._bias is not None:
            return functional.layer_norm(rows, self._weight.shape, self._weight, self._bias, self._eps)
        return functional.rms_norm(rows.float(), self._weight.shape, eps=self._eps).to(rows.dtype) * self._weight


def activated(rows: Tensor, kind: TowerActivation) -> Tensor:
    if kind == "quick_gelu":
        return rows * torch.sigmoid(1.702 * rows)
    if kind == "silu":
        return functional.silu(rows)
    if kind == "relu":
        return functional.relu(rows)
    return functional.gelu(rows, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none")
