"""What towers are made of: tensors by name, affine maps, norms, activations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.kernels.pixels import copy_bytes
from bequest.engine.layers.parts import Norm
from bequest.engine.models.reader import Reader
from bequest.engine.models.towers.config import TowerActivation

Sent = npt.NDArray[np.uint8] | npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.float32]


def sent(array: Sent, device: torch.device) -> Tensor:
    """On the device, without waiting for what it works on."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    given = np.ascontiguousarray(array)
    pinned = torch.empty(given.shape, dtype=torch.from_numpy(given[:0]).dtype, pin_memory=True)
    copy_bytes(pinned.view(-1).view(torch.uint8).numpy(), given.reshape(-1).view(np.uint8))
    return pinned.to(device, non_blocking=True)


class Tensors:
    """Reads tensors by name, in the dtype that a tower computes in."""

    def __init__(self, read: Reader, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """`device`: "meta" for who wants the shapes alone; None: the reader's."""
        self._read = read
        self._device = device
        self.dtype = dtype

    def under(self, prefix: str) -> Tensors:
        return Tensors(self._read.under(prefix), self.dtype, self._device)

    def get(self, name: str, *shape: int) -> Tensor:
        return self._read.placed(self._read.tensor(name, shape)).to(device=self._device, dtype=self.dtype)

    def placed(self, values: Tensor) -> Tensor:
        """On the device, in float32."""
        return self._read.placed(values)


class Affine:
    """A matrix and its bias; or several of the same shape that read the same rows, one below another.

    Zeros fill rows up to a multiple of `whole_rows`, and columns to one of `whole_columns`: products of other sizes,
    those of Qwen2.5-VL's inner layers say, do not reach a GPU's fast kernels.
    """

    def __init__(
        self,
        read: Tensors,
        name: str | Sequence[str],
        rows: int,
        columns: int,
        *,
        has_bias: bool = True,
        whole_rows: int = 1,
        whole_columns: int = 1,
    ) -> None:
        names = (name,) if isinstance(name, str) else name
        more, wider = -rows % whole_rows, -columns % whole_columns
        self._matrix = _stacked([read.get(f"{one}.weight", rows, columns) for one in names], more, wider)
        self._bias = _stacked([read.get(f"{one}.bias", rows) for one in names], more) if has_bias else None

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._matrix, self._bias)


def _stacked(parts: Sequence[Tensor], more: int, wider: int = 0) -> Tensor:
    """One below another, each with so many rows and columns of zeros. Made by hand: for `torch.cat` of shapes alone
    torch imports its compiler, which takes longer than all the rest of a small model's start."""
    rows, *columns = parts[0].shape
    shape = (len(parts) * (rows + more), *(size + wider for size in columns))
    whole = parts[0].new_zeros(shape) if more or wider else parts[0].new_empty(shape)
    for number, part in enumerate(parts):
        begin = number * (rows + more)
        whole[(slice(begin, begin + rows), *map(slice, columns))].copy_(part)
    return whole


class TowerNorm:
    """Subtracts the mean and has a bias; or neither, by the root of the mean square."""

    def __init__(self, read: Tensors, name: str, size: int, eps: float, *, centred: bool = True) -> None:
        bias = read.get(f"{name}.bias", size) if centred else None
        self.norm = Norm(read.get(f"{name}.weight", size), eps, bias)  # for whoever adds to the rows on the way

    def __call__(self, rows: Tensor) -> Tensor:
        weight, bias, eps = self.norm.weight, self.norm.bias, self.norm.eps
        if bias is not None:
            return functional.layer_norm(rows, weight.shape, weight, bias, eps)
        return functional.rms_norm(rows, weight.shape, weight, eps)


def activated(rows: Tensor, kind: TowerActivation) -> Tensor:
    if kind == "quick_gelu":
        return rows * torch.sigmoid(1.702 * rows)
    if kind == "silu":
        return functional.silu(rows)
    if kind == "relu":
        return functional.relu(rows)
    return functional.gelu(rows, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none")
