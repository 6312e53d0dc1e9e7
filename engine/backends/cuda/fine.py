"""Weights that stay in the codes of a checkpoint on a GPU, with scales for groups of 32 of their rows, or fewer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from bequest.engine.backends.cuda.experts import PlannedExperts, choice_of
from bequest.engine.backends.cuda.fine_codes import columns_of, fine_float8, fine_integers, fine_stored
from bequest.engine.backends.cuda.in_codes import WeightInCodes
from bequest.engine.kernels import cuda_experts, cuda_fine
from bequest.engine.kernels.cuda_chain import Product
from bequest.engine.kernels.cuda_fine import FineRows
from bequest.engine.layers.codes import Codes, Float8Rows, IntegerRows
from bequest.engine.layers.joined import JoinedWeight
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Activation, Chosen
from bequest.engine.layers.weight import Weight

_FORMATS = {
    "offset4": "int4 in groups of 32",
    "offset8": "int8 in groups of 32",
    "scaled8": "int8 in groups of 16",
    "float8": "fp8_e4m3 in groups of 16",
    "float4": "mxfp4",
}


class FineWeight(WeightInCodes[FineRows]):
    """Up to 64 rows are multiplied with the codes. For more it becomes bfloat16 on its way."""

    def __init__(
        self, packed: FineRows, bias: Tensor | None, ops: Ops, scratch: Tensor, columns: Tensor | None = None
    ) -> None:
        """columns [K]: of x, in the order of the packed ones, where that is another"""
        super().__init__(packed, bias, ops, scratch, packed.most_chained_rows)
        self.columns = columns

    @property
    def format(self) -> str:
        return _FORMATS[self.packed.codec]

    def with_bias(self, bias: Tensor) -> Weight:
        return FineWeight(self.packed, bias, self.ops, self._scratch, self.columns)

    def product(self) -> Product:
        return self.packed.product(self.bias, self.site)

    def _multiply_many(self, x: Tensor) -> Tensor:
        return cuda_fine.linear(x, self.packed, self.bias)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.columns is None else x.index_select(1, self.columns)


_WIDENED_ROWS = 256  # of an expert, on average: making numbers of all of them then costs less than it gains
_MOST_WIDENED_BYTES = 2 << 30  # of memory that a step takes for a while


class FineExperts(PlannedExperts):
    """Rows are multiplied with the codes; those of experts that no row takes are not read. Where experts have many
    rows, all of them become bfloat16 on their way."""

    def __init__(self, packed: FineRows, bias: Tensor | None, ops: Ops) -> None:
        """The bias is [E, N] float32."""
        self.packed, self.bias = packed, bias
        self._ops = ops
        self._has_tiles = cuda_experts.has_tiles(packed.num_rows // 2, packed.depth)  # gated, or as they are

    @property
    def num_experts(self) -> int:
        return self.packed.codes.shape[0]

    @property
    def out_features(self) -> int:
        return self.packed.num_rows

    @property
    def in_features(self) -> int:
        return self.packed.depth

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def format(self) -> str:
        return _FORMATS[self.packed.codec]

    def gated(self, x: Tensor, chosen: Chosen, activation: Activation) -> Tensor:
        choice = choice_of(chosen)
        if self._is_widened(choice):
            return cuda_experts.gated(x, self._numbers(), choice, activation)
        if cuda_fine.has_expert_tiles(self.packed, choice):
            return cuda_fine.expert_gated(x, self.packed, self.bias, choice, activation)
        return self._ops.gated_activation(self.products(x, choice, shares_rows=True), activation)

    def summed(self, x: Tensor, chosen: Chosen) -> Tensor:
        choice = choice_of(chosen)
        return cuda_experts.sum_products(self.products(x, choice, shares_rows=False), choice)

    def _is_widened(self, choice: cuda_experts.ExpertChoice) -> bool:
        if choice.ids.numel() < _WIDENED_ROWS * self.num_experts or not self._has_tiles:
            return False
        return 2 * self.num_experts * self.out_features * self.in_features <= _MOST_WIDENED_BYTES

    def _numbers(self) -> cuda_experts.ExpertMatrices:
        return cuda_experts.ExpertMatrices(self.packed.numbers(), self.bias, is_fresh=True)

    def products(self, x: Tensor, choice: cuda_experts.ExpertChoice, *, shares_rows: bool) -> Tensor:
        if self._is_widened(choice):
            return cuda_experts.products(x, self._numbers(), choice, shares_rows=shares_rows)
        return cuda_fine.expert_linear(x, self.packed, self.bias, choice, shared=shares_rows)


def fine_weight(
    matrices: Sequence[Codes], bias: Tensor | None, ops: Ops, scratch: Tensor, device: torch.device
) -> Weight | None:
    """Matrices one under the other; None where no kernel takes such codes."""
    packed = [_fine(part, device) for part in matrices]
    found = [part for part in packed if part is not None]
    orders = [part.order if isinstance(part, IntegerRows) else None for part in matrices]
    if len(found) < len(packed) or not all(_are_equal(orders[0], order) for order in orders):
        return None
    columns = None if orders[0] is None else columns_of(orders[0].to(device))
    runs = [cuda_fine.stack(list(run)) for _, run in groupby(found, lambda part: part.codec)]
    if len(runs) == 1:
        return FineWeight(runs[0], bias, ops, scratch, columns)
    return JoinedWeight([FineWeight(run, None, ops, scratch, columns) for run in runs], bias)


def _fine(part: Codes, device: torch.device) -> FineRows | None:
    if isinstance(part, Float8Rows):
        return fine_float8(part, device)
    return fine_integers(part, device) if isinstance(part, IntegerRows) else fine_stored(part, device)


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def fine_experts(
    matrices: Iterable[Sequence[Codes]], num_experts: int, bias: Tensor | None, ops: Ops, device: torch.device
) -> FineExperts | None:
    """One expert after another, each packed straight to its place on the device."""
    placed: FineRows | None = None
    count = 0
    for of_expert in matrices:
        packed = _packed_expert(of_expert, device)
        if packed is None or (placed is not None and packed.codec != placed.codec):
            return None
        if placed is None:
            tensors = {
                name: (tensor := getattr(packed, name)).new_empty(num_experts, *tensor.shape)
                for name in ("codes", "words", "scales")
            }
            placed = replace(packed, **tensors)
        placed.codes[count], placed.words[count], placed.scales[count] = packed.codes, packed.words, packed.scales
        count += 1
    assert placed is not None and count == num_experts, (count, num_experts)
    return FineExperts(placed, None if bias is None else bias.to(device), ops)


def _packed_expert(matrices: Sequence[Codes], device: torch.device) -> FineRows | None:
    if any(isinstance(part, IntegerRows) and part.order is not None for part in matrices):
        return None
    packed = [_fine(part, device) for part in matrices]
    found = [part for part in packed if part is not None]
    one_codec = len(found) == len(packed) and len({part.codec for part in found}) == 1
    return cuda_fine.stack(found) if one_codec else None
