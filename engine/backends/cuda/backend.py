"""A GPU as a backend: our kernels, cuBLAS for large products; decoder layers are chained for a few rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bequest.engine.backends.cuda.chain import ChainCompiler
from bequest.engine.backends.cuda.experts import DenseExperts, check_experts, place_experts
from bequest.engine.backends.cuda.ops import CudaOps
from bequest.engine.backends.cuda.weights import DenseWeight
from bequest.engine.layers.codes import Codes
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.program import Stack, compile_layers
from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.weight import Table, Weight


class CudaBackend:
    """A Backend. Activations and weights are in one dtype, bfloat16 or float32; the cache is in the same or in fp8."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ops = CudaOps()
        self._chain = ChainCompiler(self.ops, device)

    def head_sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
        return (64, 128, 256) if dtype is torch.bfloat16 else ()

    def weight(self, matrices: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Weight:
        """Copied straight to their place on the device: the stack is never made on the host."""
        rows = sum(matrix.shape[0] for matrix in matrices)
        stacked = torch.empty(rows, matrices[0].shape[1], dtype=dtype, device=self.device)
        begin = 0
        for matrix in matrices:
            stacked[begin : begin + matrix.shape[0]].copy_(matrix, non_blocking=True)
            begin += matrix.shape[0]
        return DenseWeight(stacked, bias, self.ops)

    def code_types(self, dtype: torch.dtype) -> tuple[type[Codes], ...]:
        return ()

    def quantised_weight(self, matrices: Sequence[Codes], bias: Tensor | None) -> Weight | None:
        return None

    def expert_weights(
        self, matrices: Iterable[Sequence[Tensor]], num_experts: int, bias: Tensor | None, dtype: torch.dtype
    ) -> ExpertWeights:
        placed = place_experts(matrices, num_experts, dtype, self.device)
        return DenseExperts(placed, None if bias is None else bias.to(self.device))

    def quantised_expert_weights(
        self, matrices: Iterable[Sequence[Codes]], num_experts: int, bias: Tensor | None
    ) -> ExpertWeights | None:
        return None

    def table(self, rows: Tensor, dtype: torch.dtype) -> Table:
        return self.weight([rows], None, dtype)

    def vector(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(self.device, dtype)

    def offset_vector(self, values: Tensor, offset: float, dtype: torch.dtype) -> tuple[Tensor, float]:
        """bfloat16 has too few bits for the sum."""
        if dtype is torch.float32:
            return (values.float() + offset).to(self.device), 0.0
        return values.to(self.device, dtype), offset

    def compile(self, layers: Sequence[LayerSpec]) -> Stack:
        check_experts(layers)
        return compile_layers(layers, self.ops, [self._chain])
