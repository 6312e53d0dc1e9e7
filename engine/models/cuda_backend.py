"""The CUDA side of the backend contract: our kernels, and torch (cuBLAS) for large matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bequest.engine.kernels import cuda, cuda_attention, cuda_chain, cuda_linear
from bequest.engine.kernels.cpu_weights import QuantisedRows
from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.kernels.kv_format import UNSCALED, KvScales
from bequest.engine.models.backend import (
    Activation,
    AttentionWork,
    HeadNorm,
    LayerHead,
    LayerTail,
    Matrix,
    Product,
    Projected,
    StreamNorm,
)


class CudaBackend:
    """Activations and weights in one dtype, bfloat16 or float32; the cache in the same or in fp8."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chain_scratch = cuda_chain.make_scratch(device)

    def head_sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
        return (64, 128, 256) if dtype is torch.bfloat16 else ()

    def matrix(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Matrix:
        """Copied straight to their place on the device: the stack is never made on the host."""
        rows = sum(weight.shape[0] for weight in weights)
        stacked = torch.empty(rows, weights[0].shape[1], dtype=dtype, device=self.device)
        begin = 0
        for weight in weights:
            stacked[begin : begin + weight.shape[0]].copy_(weight, non_blocking=True)
            begin += weight.shape[0]
        return stacked

    def quantised_matrix(self, weights: Sequence[QuantisedRows]) -> Matrix | None:
        return None

    def vector(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(self.device, dtype)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        return cuda_linear.linear(x, weight, bias)

    def embedding(self, ids: Tensor, weight: Matrix, last_tokens: Tensor | None) -> Tensor:
        return cuda.embedding(ids, weight, last_tokens)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, tap: LayerTap | None = None
    ) -> Tensor:
        return cuda.rms_norm(x, weight, eps, residual, tap=tap)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None, tap: LayerTap | None = None
    ) -> Tensor:
        return cuda.layer_norm(x, weight, bias, eps, residual, tap)

    def prepare_qkv(
        self, projected: Projected, num_heads: int, cos_sin: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        return cuda.prepare_qkv(
            projected.qkv,
            num_heads,
            projected.kv_cache,
            projected.layer,
            projected.slot_mapping,
            projected.positions,
            cos_sin,
            _head_norm(norm),
            projected.scales,
        )

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
        cuda.write_kv(k, v, kv_cache, layer, slot_mapping)

    def attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        layer: int,
        work: AttentionWork,
        scale: float,
        bias: Tensor | None = None,
        scales: KvScales = UNSCALED,
    ) -> Tensor:
        return cuda_attention.paged_attention(q, kv_cache, layer, work, scale, bias=bias, scales=scales)

    def self_attention(
        self,
        projected: Projected,
        num_heads: int,
        cos_sin: Tensor | None,
        norm: HeadNorm | None,
        work: AttentionWork,
        scale: float,
    ) -> Tensor:
        kv_cache, layer, scales = projected.kv_cache, projected.layer, projected.scales
        if not work.single_token:
            q = self.prepare_qkv(projected, num_heads, cos_sin, norm)
            return self.attention(q, kv_cache, layer, work, scale, scales=scales)
        return cuda_attention.attend_token(
            projected.qkv,
            kv_cache,
            layer,
            work,
            scale,
            projected.slot_mapping,
            projected.positions,
            cos_sin,
            _head_norm(norm),
            scales,
        )

    def activated_linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, activation: Activation) -> Tensor:
        return cuda.activate(self.linear(x, weight, bias), activation)

    def gated_linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, activation: Activation) -> Tensor:
        if cuda_linear.is_fused(x, weight):
            return cuda_linear.gated_linear(x, weight, bias, activation, None)
        return cuda.gated_activation(cuda_linear.linear(x, weight, bias), activation)

    def feed_forward(self, x: Tensor, up: Product, down: Product, activation: Activation, gated: bool) -> Tensor:
        first = self.gated_linear if gated else self.activated_linear
        return self.linear(first(x, up.weight, up.bias, activation), down.weight, down.bias)

    def normed_linear(
        self, added: Tensor | None, residual: Tensor, norm: StreamNorm, weight: Matrix, bias: Tensor | None
    ) -> Tensor:
        if added is None and cuda_linear.is_fused(residual, weight, normed=True):
            return cuda_linear.normed_linear(residual, _row_norm(norm), weight, bias)
        return self.linear(_normed(added, residual, norm), weight, bias)

    def normed_gated_linear(
        self,
        added: Tensor | None,
        residual: Tensor,
        norm: StreamNorm,
        weight: Matrix,
        bias: Tensor | None,
        activation: Activation,
    ) -> Tensor:
        if added is None and cuda_linear.is_fused(residual, weight, normed=True):
            return cuda_linear.gated_linear(residual, weight, bias, activation, _row_norm(norm))
        return self.gated_linear(_normed(added, residual, norm), weight, bias, activation)

    def linear_into(self, x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor) -> Tensor | None:
        """Where the product is our own, it adds; else the norm that follows does."""
        if not cuda_linear.is_fused(x, weight):
            return self.linear(x, weight, bias)
        cuda_linear.linear_into(x, weight, bias, residual)
        return None

    def can_chain(self, attended: Tensor, tail: LayerTail) -> bool:
        return cuda_chain.can_chain(attended, tail.down.weight)

    def chain(self, attended: Tensor, residual: Tensor, tail: LayerTail, head: LayerHead | None) -> Tensor | None:
        chained = cuda_chain.Tail(
            _product(tail.output), _row_norm(tail.norm), _product(tail.gate_up), tail.activation, _product(tail.down)
        )
        following = None if head is None else cuda_chain.Head(_row_norm(head.norm), _product(head.qkv))
        return cuda_chain.run(attended, residual, chained, following, self._chain_scratch)


def _product(product: Product) -> cuda_chain.Product:
    return cuda_chain.Product(product.weight, product.bias)


def _head_norm(norm: HeadNorm | None) -> cuda.QkNorm | None:
    return None if norm is None else cuda.QkNorm(norm.q_weight, norm.k_weight, norm.eps)


def _row_norm(norm: StreamNorm) -> cuda_linear.RowNorm:
    return cuda_linear.RowNorm(norm.weight, norm.eps, norm.tap)


def _normed(added: Tensor | None, residual: Tensor, norm: StreamNorm) -> Tensor:
    if added is None:
        return cuda.rms_norm(residual, norm.weight, norm.eps, tap=norm.tap)
    return cuda.rms_norm(added, norm.weight, norm.eps, residual, tap=norm.tap)
