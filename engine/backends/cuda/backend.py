"""A GPU as a backend: our kernels, cuBLAS for large products; decoder layers are chained for a few rows, and those of
small models stacked for one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bequest.engine.backends.cuda import coded, fine
from bequest.engine.backends.cuda.chain import ChainCompiler
from bequest.engine.backends.cuda.experts import DenseExperts, check_experts, place_experts
from bequest.engine.backends.cuda.ops import CudaOps
from bequest.engine.backends.cuda.stack import StackCompiler
from bequest.engine.backends.cuda.uploads import Uploads
from bequest.engine.backends.cuda.weights import DenseWeight
from bequest.engine.kernels import cuda_chain, cuda_stack
from bequest.engine.kernels.cpu_weights import QuantisedRows
from bequest.engine.kernels.cuda_attention import BROAD_HEAD
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.layers.codes import Codes, Float8Rows, IntegerRows
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.program import Stack, compile_layers
from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.weight import Table, Weight

_SCALED_UNIT = 16  # what products of many rows in float8 take of N and K


class CudaBackend:
    """A Backend. Activations are bfloat16 or float32, weights the same or, beside bfloat16, float8; the cache is in the
    same as activations or in fp8."""

    matmul, joins_codes, tables_in_codes = None, True, False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ops = CudaOps()
        self._scratch = cuda_chain.make_scratch(device)
        chain = ChainCompiler(self.ops, self._scratch)
        self._compiler = StackCompiler(chain, cuda_stack.make_scratch(device))
        self._uploads = Uploads()

    def head_sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
        return (64, 128, 256, BROAD_HEAD) if dtype is torch.bfloat16 else ()

    def weight(self, matrices: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Weight:
        return DenseWeight(self._stacked(matrices, dtype), bias, self.ops)

    def _stacked(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Copied straight to their place on the device: the stack is never made on the host."""
        stacked = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=dtype, device=self.device)
        begin = 0
        for part in parts:
            self._uploads.copy(stacked[begin : begin + len(part)], part)
            begin += len(part)
        return stacked

    def code_types(self, dtype: torch.dtype) -> tuple[type[Codes], ...]:
        return (Float8Rows, IntegerRows, QuantisedRows) if dtype is torch.bfloat16 else ()

    def quantised_weight(self, matrices: Sequence[Codes], bias: Tensor | None) -> Weight | None:
        """In kernels of their own integers of up to 4 bits in groups of 128, and float8 with a scale for each row."""
        integers = [part for part in matrices if isinstance(part, IntegerRows)]
        if len(integers) == len(matrices) and (packed := coded.int4_groups(integers, self.device)) is not None:
            return coded.Int4Weight(packed, bias, self.ops, self._scratch)
        rows = [part for part in matrices if isinstance(part, Float8Rows) and part.scales.shape[1] == 1]
        num_outputs = sum(len(part.codes) for part in rows)
        if len(rows) < len(matrices) or num_outputs % _SCALED_UNIT or rows[0].codes.shape[1] % _SCALED_UNIT:
            return fine.fine_weight(matrices, bias, self.ops, self._scratch, self.device)
        codes = self._stacked([part.codes for part in rows], FP8)
        scales = self._stacked([part.scales[:, 0] for part in rows], torch.float32)
        return DenseWeight(codes, bias, self.ops, scales)

    def expert_weights(
        self, matrices: Iterable[Sequence[Tensor]], num_experts: int, bias: Tensor | None, dtype: torch.dtype
    ) -> ExpertWeights:
        placed = place_experts(matrices, num_experts, dtype, self.device, self._uploads)
        return DenseExperts(placed, None if bias is None else bias.to(self.device))

    def quantised_expert_weights(
        self, matrices: Iterable[Sequence[Codes]], num_experts: int, bias: Tensor | None
    ) -> ExpertWeights | None:
        return fine.fine_experts(matrices, num_experts, bias, self.ops, self.device)

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
        return compile_layers(layers, self.ops, [self._compiler])
