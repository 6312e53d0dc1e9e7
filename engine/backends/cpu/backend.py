"""The CPU as a backend: states in float32, weights packed into panels or tiles, all layers in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby

import torch
from torch import Tensor

from bequest.engine.backends.cpu.codes import packable
from bequest.engine.backends.cpu.experts import CpuExperts
from bequest.engine.backends.cpu.ops import CpuOps
from bequest.engine.backends.cpu.stack import StackCompiler
from bequest.engine.backends.cpu.weights import CpuRows, CpuWeight
from bequest.engine.config import EngineConfig
from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels import cpu_experts
from bequest.engine.layers.backend import MatMul
from bequest.engine.layers.codes import Codes, IntegerRows
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.joined import JoinedWeight
from bequest.engine.layers.program import Stack, compile_layers
from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.weight import Table, Weight


class CpuBackend:
    """A Backend."""

    device = torch.device("cpu")
    joins_codes, tables_in_codes = True, True

    def __init__(self, *, fast: bool = False) -> None:
        """`fast`: codes of checkpoints are multiplied as integers, else as the float32 values that they stand for."""
        self.ops = CpuOps()
        self._fast = fast

    @classmethod
    def of(cls, config: EngineConfig) -> CpuBackend:
        return cls(fast=kernels.multiplies_integers(config.cpu_matmul))

    @property
    def matmul(self) -> MatMul:
        return "fast" if self._fast else "exact"

    def head_sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
        return ()

    def weight(self, matrices: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Weight:
        return CpuWeight(kernels.pack_weights(matrices, dtype), bias, self.ops)

    def code_types(self, dtype: torch.dtype) -> tuple[type[Codes], ...]:
        """Codes are float32 values in less memory; products in bfloat16 have kernels of their own."""
        return (kernels.QuantisedRows, IntegerRows) if dtype is torch.float32 else ()

    def quantised_weight(self, matrices: Sequence[Codes], bias: Tensor | None) -> Weight | None:
        kinds = [list(run) for _, run in groupby(matrices, lambda codes: codes.kind)]
        if len(kinds) == 1:
            return self._packed(matrices, bias)
        parts = [self._packed(run, None) for run in kinds]
        found = [part for part in parts if part is not None]
        return JoinedWeight(found, bias) if len(found) == len(parts) else None

    def _packed(self, matrices: Sequence[Codes], bias: Tensor | None) -> CpuWeight | None:
        rows = packable(matrices)
        return None if rows is None else CpuWeight(kernels.pack_quantised(rows, fast=self._fast), bias, self.ops)

    def expert_weights(
        self, matrices: Iterable[Sequence[Tensor]], num_experts: int, bias: Tensor | None, dtype: torch.dtype
    ) -> ExpertWeights:
        return CpuExperts(cpu_experts.pack_experts(matrices, num_experts, bias, dtype))

    def quantised_expert_weights(
        self, matrices: Iterable[Sequence[Codes]], num_experts: int, bias: Tensor | None
    ) -> ExpertWeights | None:
        each = map(packable, matrices)
        first = next(each)
        if first is None:
            return None
        rest = (rows for rows in each if rows is not None)  # of the same kind all are, or none
        packed = cpu_experts.pack_quantised_experts(chain([first], rest), num_experts, bias, fast=self._fast)
        return CpuExperts(packed)

    def table(self, rows: Tensor, dtype: torch.dtype) -> Table:
        return CpuRows(rows, dtype)

    def vector(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.float().clone()

    def offset_vector(self, values: Tensor, offset: float, dtype: torch.dtype) -> tuple[Tensor, float]:
        return values.float() + offset, 0.0

    def compile(self, layers: Sequence[LayerSpec]) -> Stack:
        return compile_layers(layers, self.ops, [StackCompiler(self.ops)])
