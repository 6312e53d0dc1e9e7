"""Weights in codes of 4 bits on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bequest.engine.kernels import cuda_int4
from bequest.engine.kernels.cuda_int4 import Int4Rows
from bequest.engine.layers.codes import IntegerRows
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Activation
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight


class Int4Weight(Weight):
    """Few rows are multiplied with the codes; for more it becomes bfloat16 on its way."""

    def __init__(self, packed: Int4Rows, bias: Tensor | None, ops: Ops, scratch: Tensor) -> None:
        """scratch: of the chain, whose kernel multiplies few rows"""
        self.packed, self.bias = packed, bias
        self.ops = ops
        self._scratch = scratch

    @property
    def out_features(self) -> int:
        return self.packed.num_rows

    @property
    def in_features(self) -> int:
        return self.packed.depth

    @property
    def nbytes(self) -> int:
        return self.packed.codes.nbytes + self.packed.groups.nbytes

    @property
    def format(self) -> str:
        return "int4"

    def with_bias(self, bias: Tensor) -> Weight:
        return Int4Weight(self.packed, bias, self.ops, self._scratch)

    def __call__(self, x: Tensor) -> Tensor:
        return cuda_int4.linear(x, self.packed, self.bias, self._scratch)

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        raise AssertionError("tables stay in numbers")

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if cuda_int4.is_few(x):
            return cuda_int4.gated_linear(x, self.packed, self.bias, activation, self._scratch)
        return super().gated(x, activation)

    def add_to(self, stream: Stream, x: Tensor) -> None:
        if cuda_int4.is_few(x):
            cuda_int4.linear_into(x, self.packed, self.bias, stream.state(), self._scratch)
        else:
            super().add_to(stream, x)


def packed(matrices: Sequence[IntegerRows], device: torch.device) -> Int4Rows | None:
    """The matrices one under the other; None where no kernel takes such codes."""
    if not all(map(_has_kernel, matrices)):
        return None
    parts = [_packed(part, device) for part in matrices]
    return Int4Rows(torch.cat([part.codes for part in parts]), torch.cat([part.groups for part in parts]))


def _has_kernel(part: IntegerRows) -> bool:
    depth = part.codes.shape[1]
    if part.bits != 4 or part.order is not None or not cuda_int4.has_kernel(depth):
        return False
    return (part.group % cuda_int4.GROUP == 0 or part.group == depth) and cuda_int4.can_pack(part.zeros)


def _packed(part: IntegerRows, device: torch.device) -> Int4Rows:
    times = part.group // cuda_int4.GROUP
    count = part.codes.shape[1] // cuda_int4.GROUP
    scales, zeros = (
        values.to(device).repeat_interleave(times, dim=1)[:, :count] for values in (part.scales, part.zeros)
    )
    return cuda_int4.pack(part.codes.to(device), scales, zeros)
