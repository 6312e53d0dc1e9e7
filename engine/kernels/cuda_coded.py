"""Products of bfloat16 rows with weights in codes on a GPU: a batch of rows is multiplied with the codes, in tiles on
chips that have them (csrc/ops/cuda/tile_linear.h, coded_linear.h); for more the weight becomes bfloat16 on its way
(coded_rows.h).

Dims: T rows, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda, cuda_tiles
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cuda_tiles import TileFormat
from bequest.engine.kernels.streams import current_stream

GROUP = 128  # values of a row that share a scale
_MOST_ROWS = 64  # csrc/ops/cuda/coded_linear.h
_BF16 = torch.bfloat16
_BF16_CODE = 1  # csrc/core/dtype.h
_STORE, _ADD, _GATE = range(3)  # SkinnyResult


@dataclass(frozen=True, slots=True)
class CodedRows:
    """value = scale · (code - zero), where a group of 128 along a row has a scale and a zero."""

    codes: Tensor  # [N, K / 2] uint8 (engine.kernels.cuda_int4)
    scales: Tensor  # [N, at least G] int32: float32 with zeros in their last 8 bits

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    @property
    def depth(self) -> int:
        return 2 * self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def is_tiled(self, num_tokens: int) -> bool:
        """Whether so many rows are multiplied with the codes in tiles, where more than the product is one kernel."""
        return cuda_tiles.is_tile_product(num_tokens, self.num_rows, self.depth, TileFormat.INT4)

    def multiply_tiles(self, x: Tensor, bias: Tensor | None, out: Tensor, finish: tuple[int, int]) -> None:
        """x [T, K] · Wᵀ + bias [N], stored in or added to out [T, N], or gated to [T, N / 2]; `finish`: a SkinnyResult
        and its activation. REQUIRES: is_tiled"""
        cuda_tiles.multiply(x, self._product(bias), out, finish)

    def has_kernel(self, num_tokens: int) -> bool:
        """Whether so many rows are multiplied with the codes, in tiles or not."""
        if self.is_tiled(num_tokens):
            return True
        return 0 < num_tokens <= _MOST_ROWS and _C.cuda_can_multiply_codes(self.num_rows, self.depth)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] · Wᵀ + bias [N] → [T, N]. REQUIRES: has_kernel"""
        num_tokens, outputs = x.shape[0], self.num_rows
        out = torch.empty(num_tokens, outputs, dtype=_BF16, device=x.device)
        if self.is_tiled(num_tokens):
            self.multiply_tiles(x, bias, out, (_STORE, 0))
            return out
        splits = _C.cuda_coded_splits(outputs, self.depth)
        parts = torch.empty(splits if splits > 1 else 0, num_tokens, outputs, dtype=torch.float32, device=x.device)
        product, pitch = self._product(bias), self.scales.shape[1]
        _C.cuda_coded_linear(self._rows(x), product, pitch, parts.data_ptr(), out.data_ptr(), current_stream())
        return out

    def numbers(self) -> Tensor:
        """[N, K] bfloat16"""
        out = torch.empty(self.num_rows, self.depth, dtype=_BF16, device=self.codes.device)
        _C.cuda_coded_rows(self._product(None), self.scales.shape[1], out.data_ptr(), current_stream())
        return out

    def _rows(self, x: Tensor) -> _C.Matrix:
        return cuda.address_of(x, _BF16, x.shape[0], self.depth), x.shape[0], self.depth, _BF16_CODE

    def _product(self, bias: Tensor | None) -> _C.Product:
        assert self.codes.is_contiguous() and self.scales.is_contiguous()
        bias_address = 0 if bias is None else cuda.address_of(bias, _BF16, self.num_rows)
        return self.codes.data_ptr(), bias_address, self.num_rows, self.depth, 0, self.scales.data_ptr()


def linear(x: Tensor, rows: CodedRows, bias: Tensor | None) -> Tensor:
    """x [T, K] · Wᵀ + bias [N] → [T, N]"""
    return rows.multiply(x, bias) if rows.has_kernel(len(x)) else F.linear(x, rows.numbers(), bias)


def gated_linear(x: Tensor, rows: CodedRows, bias: Tensor | None, activation: str) -> Tensor:
    """f(gate) * up → [T, N / 2] of gate and up in one weight. REQUIRES: is_tiled"""
    out = torch.empty(len(x), rows.num_rows // 2, dtype=_BF16, device=x.device)
    rows.multiply_tiles(x, bias, out, (_GATE, ACTIVATION_CODES[activation]))
    return out


def linear_into(x: Tensor, rows: CodedRows, bias: Tensor | None, residual: Tensor) -> None:
    """residual [T, N] += x [T, K] · Wᵀ + bias [N]. REQUIRES: is_tiled"""
    rows.multiply_tiles(x, bias, residual, (_ADD, 0))
