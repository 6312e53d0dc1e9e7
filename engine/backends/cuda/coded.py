"""Weights that stay in the codes of a checkpoint on a GPU, in groups of 128 along their rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bequest.engine.backends.cuda.in_codes import WeightInCodes
from bequest.engine.kernels import cuda_coded, cuda_int4
from bequest.engine.kernels.cuda_chain import Product
from bequest.engine.kernels.cuda_coded import GROUP, CodedRows
from bequest.engine.layers.codes import IntegerRows
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Activation
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight


class Int4Weight(WeightInCodes[CodedRows]):
    """Up to 256 rows are multiplied with the codes (64 on chips without tiles). For more it becomes bfloat16 on its
    way."""

    def __init__(self, packed: CodedRows, bias: Tensor | None, ops: Ops, scratch: Tensor) -> None:
        super().__init__(packed, bias, ops, scratch, cuda_int4.most_rows(packed.depth))

    @property
    def format(self) -> str:
        return "int4"

    def with_bias(self, bias: Tensor) -> Weight:
        return Int4Weight(self.packed, bias, self.ops, self._scratch)

    def product(self) -> Product:
        return cuda_int4.product(self.packed, self.bias, self.site)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if self._is_tiled(x):
            return cuda_coded.gated_linear(x, self.packed, self.bias, activation)
        return super().gated(x, activation)

    def add_to(self, stream: Stream, x: Tensor) -> None:
        if self._is_tiled(x):
            cuda_coded.linear_into(x, self.packed, self.bias, stream.state())
        else:
            super().add_to(stream, x)

    def _multiply_many(self, x: Tensor) -> Tensor:
        return cuda_coded.linear(x, self.packed, self.bias)

    def _is_tiled(self, x: Tensor) -> bool:
        return not self._is_few(x) and self.packed.is_tiled(len(x))


def int4_groups(matrices: Sequence[IntegerRows], device: torch.device) -> CodedRows | None:
    """Codes of up to 4 bits, one matrix under the other; None where no kernel takes such groups."""
    if not all(map(_has_int4_kernel, matrices)):
        return None
    parts = [_packed(part, device) for part in matrices]
    return CodedRows(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))


def _has_int4_kernel(part: IntegerRows) -> bool:
    depth = part.codes.shape[1]
    if part.bits > 4 or part.order is not None or depth % (2 * GROUP):
        return False
    return (part.group % GROUP == 0 or part.group == depth) and cuda_int4.can_pack(part.zeros)


def _packed(part: IntegerRows, device: torch.device) -> CodedRows:
    times, count = part.group // GROUP, part.codes.shape[1] // GROUP
    scales, zeros = (
        values.to(device).repeat_interleave(times, dim=1)[:, :count] for values in (part.scales, part.zeros)
    )
    return cuda_int4.pack(part.codes.to(device), scales, zeros)
