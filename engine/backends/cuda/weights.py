"""Weights on a GPU: our own kernels multiply a few rows, with what stands around a product, cuBLAS the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine.backends.cuda.ops import attend_rounded
from bequest.engine.kernels import cuda, cuda_linear
from bequest.engine.kernels.cuda_attention import MOST_ROUNDED
from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.kernels.weighed_rows import GainAhead, WeighedRows, can_leave
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Activation, Heads, Norm
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight


class DenseWeight(Weight):
    """Float32 or bfloat16, as states are; or float8 beside states in bfloat16, with a scale for each row."""

    def __init__(self, matrix: Tensor, bias: Tensor | None, ops: Ops, scales: Tensor | None = None) -> None:
        self.matrix = matrix  # [N, K]
        self.bias = bias  # [N]
        self.scales = scales  # [N] float32, of float8
        self.ops = ops

    @property
    def out_features(self) -> int:
        return self.matrix.shape[0]

    @property
    def in_features(self) -> int:
        return self.matrix.shape[1]

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def format(self) -> str:
        return str(self.matrix.dtype).removeprefix("torch.") if self.scales is None else "fp8_e4m3"

    def with_bias(self, bias: Tensor) -> Weight:
        return DenseWeight(self.matrix, bias, self.ops, self.scales)

    def __call__(self, x: Tensor) -> Tensor:
        return cuda_linear.linear(x, self.matrix, self.bias, self.scales)

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        assert self.scales is None, "tables stay in numbers"
        return cuda.embedding(ids, self.matrix, last_tokens)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if cuda_linear.is_fused(x, self.matrix):
            return cuda_linear.gated_linear(x, self.matrix, self.bias, activation, None, self.scales)
        return super().gated(x, activation)

    def gates_apart(self, stream: Stream) -> bool:
        return not cuda_linear.is_fused(stream.total, self.matrix)

    def gate_to(self, stream: Stream, gate_up: Tensor, activation: Activation) -> None:
        """Where the product takes rows in float8 and is not our own, the activation rounds them."""
        if cuda_linear.is_rounded(gate_up, self.matrix) and not cuda_linear.is_fused(gate_up, self.matrix):
            assert self.scales is not None
            rows = cuda_linear.gated_float8_rows(gate_up, activation)
            stream.add(cuda_linear.rounded_linear(rows, self.matrix, self.bias, self.scales))
        else:
            super().gate_to(stream, gate_up, activation)

    def normed(self, stream: Stream, norm: Norm, tap: LayerTap | None = None) -> Tensor:
        if (left := self._left_for(stream, norm)) is not None:
            return cuda_linear.normed_linear(left, row_norm(norm, tap), self.matrix, self.bias, self.scales)
        if self._takes_norm(stream, norm):
            return cuda_linear.normed_linear(stream.total, row_norm(norm, tap), self.matrix, self.bias, self.scales)
        if (rows := self._rounded(stream, norm, tap)) is not None:
            assert self.scales is not None
            return cuda_linear.rounded_linear(rows, self.matrix, self.bias, self.scales)
        return super().normed(stream, norm, tap)

    def normed_gated(self, stream: Stream, norm: Norm, activation: Activation, tap: LayerTap | None = None) -> Tensor:
        if (left := self._left_for(stream, norm)) is not None:
            normed = row_norm(norm, tap)
            return cuda_linear.gated_linear(left, self.matrix, self.bias, activation, normed, self.scales)
        if self._takes_norm(stream, norm):
            normed = row_norm(norm, tap)
            return cuda_linear.gated_linear(stream.total, self.matrix, self.bias, activation, normed, self.scales)
        if (rows := self._rounded(stream, norm, tap)) is not None:
            assert self.scales is not None
            return cuda_linear.rounded_gated_linear(rows, self.matrix, self.bias, activation, self.scales)
        return super().normed_gated(stream, norm, activation, tap)

    def _left_for(self, stream: Stream, norm: Norm) -> WeighedRows | None:
        left = stream.left_for(norm)
        return left if left is not None and cuda_linear.takes_weighed(left, self.matrix) else None

    def _rounded(self, stream: Stream, norm: Norm, tap: LayerTap | None) -> cuda_linear.Float8Rows | None:
        """The normed stream, where the product takes rows in float8: the norm rounds them, too."""
        if norm.bias is not None or not cuda_linear.is_rounded(stream.total, self.matrix):
            return None
        added, normed = stream.take_added(), row_norm(norm, tap)
        if added is None:
            return cuda_linear.normed_float8_rows(stream.total, normed, None)
        return cuda_linear.normed_float8_rows(added, normed, stream.total)

    def add_to(self, stream: Stream, x: Tensor) -> None:
        """Where the product is our own, it adds; else the norm that follows does."""
        if cuda_linear.is_fused(x, self.matrix):
            ahead = gain_ahead(stream)
            stream.leave(cuda_linear.linear_into(x, self.matrix, self.bias, stream.state(), self.scales, ahead))
        else:
            super().add_to(stream, x)

    def attend_to(self, stream: Stream, qkv: Tensor, heads: Heads, step: LayerStep) -> None:
        """Where the product is our own and of rows in float8, attention rounds them."""
        fits = self.in_features <= MOST_ROUNDED and qkv.dtype is torch.bfloat16
        if fits and cuda_linear.takes_float8_tiles(len(qkv), self.matrix):
            rows = attend_rounded(qkv, heads, step)
            cuda_linear.linear_into(rows, self.matrix, self.bias, stream.state(), self.scales)
        else:
            super().attend_to(stream, qkv, heads, step)

    def can_add(self, x: Tensor) -> bool:
        if cuda_linear.is_fused(x, self.matrix):
            return True
        return self.bias is None and self.scales is None and not cuda_linear.is_skinny(x, self.matrix)

    def add_product(self, x: Tensor, y: Tensor) -> None:
        if cuda_linear.is_fused(x, self.matrix):
            cuda_linear.linear_into(x, self.matrix, self.bias, y, self.scales)
        else:
            y.addmm_(x, self.matrix.t())

    def _takes_norm(self, stream: Stream, norm: Norm) -> bool:
        """What is still to be added to the stream would have to be added first. Tiles behind a norm of its own are
        faster than a product of more rows that takes it in."""
        ready = stream.added is None and norm.bias is None and norm.offset == 0.0
        if not ready or cuda_linear.tile_format(stream.total, self.matrix) is not None:
            return False
        return cuda_linear.is_fused(stream.total, self.matrix, normed=True)


def gain_ahead(stream: Stream) -> GainAhead | None:
    """Of the norm that a product reads the stream through next, if kernels can leave something for it."""
    norm = stream.ahead
    if norm is None or norm.bias is not None or not can_leave(*stream.total.shape):
        return None
    return GainAhead(norm.weight, norm.offset, norm.eps)


def row_norm(norm: Norm, tap: LayerTap | None = None) -> cuda_linear.RowNorm:
    return cuda_linear.RowNorm(norm.weight, norm.eps, tap, norm.offset)
