"""What a model computes with. Two implementations of one contract: our CPU kernels, and CUDA with torch's products.

A model is written once against this; a tensor's place and type are the backend's business. Dims as in engine.kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.kernels.kv_format import UNSCALED, KvScales
from bequest.engine.models.config import Activation as Activation

# A matrix in the form that the backend multiplies; it tells its `nbytes`.
Matrix = Any
# The work of one step's attention, made by the runner of the same backend.
AttentionWork = Any


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norms of query and key heads: weights [D]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class StreamNorm:
    """A root-mean-square norm of the residual, where a sublayer begins: weight [H]. A tap sees it before the norm."""

    weight: Tensor
    eps: float
    tap: LayerTap | None = None


@dataclass(frozen=True, slots=True)
class Product:
    weight: Matrix  # [N, K]
    bias: Tensor | None  # [N]


@dataclass(frozen=True, slots=True)
class LayerHead:
    """What a layer does before its attention."""

    norm: StreamNorm
    qkv: Product


@dataclass(frozen=True, slots=True)
class LayerTail:
    """What a layer does behind its attention."""

    output: Product
    norm: StreamNorm
    gate_up: Product
    activation: Activation
    down: Product


@dataclass(frozen=True, slots=True)
class Projected:
    """The fused projection of a step's tokens on its way to attention, and where its keys and values go."""

    qkv: Tensor  # [T, (NQ + 2 NKV) D]
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [T] int64
    kv_cache: Tensor  # [NB, L, 2, NKV, BS, D]
    layer: int
    scales: KvScales = UNSCALED


class Backend(Protocol):
    @property
    def device(self) -> torch.device: ...

    def head_sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
        """The head dims that attention serves in this dtype; empty: any."""
        ...

    def matrix(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Matrix:
        """Matrices [N_i, K] stacked along N, as `linear` and `embedding` want them."""
        ...

    def quantised_matrix(self, weights: Sequence[kernels.QuantisedRows]) -> Matrix | None:
        """The same of matrices in codes of the same width; None where it multiplies none of these."""
        ...

    def vector(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A bias, or the weight of a norm."""
        ...

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        """[T, K] → [T, N]"""
        ...

    def embedding(self, ids: Tensor, weight: Matrix, last_tokens: Tensor | None) -> Tensor:
        """[T] int32 → [T, H]; -(row + 1) is the last token of sampler row `row` where `last_tokens` is given."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, tap: LayerTap | None = None
    ) -> Tensor:
        """residual += x in place, if there is one; the normed sum, [T, H]. A tap stores hidden states on the way."""
        ...

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None, tap: LayerTap | None = None
    ) -> Tensor:
        """residual += x in place, if there is one; the sum less its mean, normed, times weight, plus bias: [T, H]."""
        ...

    def prepare_qkv(
        self, projected: Projected, num_heads: int, cos_sin: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        """Norms and rotates queries and keys (if given), stores keys and values; the queries [T, NQ, D]."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
        """Stores k, v [T, NKV, D] (views of a fused row are fine) at slots [T] int64; -1 is nowhere."""
        ...

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
        """[T, NQ, D] → [T, NQ, D]. `bias` [NQ, 2 R + 1] float32 is added to the scaled scores of a head, by distance:
        key position less query position, clamped to [-R, R]."""
        ...

    def self_attention(
        self,
        projected: Projected,
        num_heads: int,
        cos_sin: Tensor | None,
        norm: HeadNorm | None,
        work: AttentionWork,
        scale: float,
    ) -> Tensor:
        """`prepare_qkv` and the `attention` of all its queries, [T, NQ, D]."""
        ...

    def activated_linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, activation: Activation) -> Tensor:
        """[T, K] → [T, N]: the activation of the product."""
        ...

    def gated_linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, activation: Activation) -> Tensor:
        """[T, K] → [T, I]: the product with gate and up [2 I, K], and the activation of the one times the other."""
        ...

    def feed_forward(self, x: Tensor, up: Product, down: Product, activation: Activation, gated: bool) -> Tensor:
        """[T, H] → [T, H]: the product with `down` of what `activated_linear` or `gated_linear` makes with `up`."""
        ...

    # The three of a residual stream [T, H]. What a sublayer adds to it is either in it already, or is the `added` that
    # the next norm adds: who does it is the backend's choice.

    def normed_linear(
        self, added: Tensor | None, residual: Tensor, norm: StreamNorm, weight: Matrix, bias: Tensor | None
    ) -> Tensor:
        """residual += added in place, if there is one; the product of the normed sum, [T, N]."""
        ...

    def normed_gated_linear(
        self,
        added: Tensor | None,
        residual: Tensor,
        norm: StreamNorm,
        weight: Matrix,
        bias: Tensor | None,
        activation: Activation,
    ) -> Tensor:
        """The same of `gated_linear`, [T, I]."""
        ...

    def linear_into(self, x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor) -> Tensor | None:
        """[T, K] → what is still to be added to the residual, [T, H]; None: the residual has it."""
        ...

    def can_chain(self, attended: Tensor, tail: LayerTail) -> bool:
        """Whether `chain` does a layer's tail, and the next one's head, for this many rows [T, A]."""
        ...

    def chain(self, attended: Tensor, residual: Tensor, tail: LayerTail, head: LayerHead | None) -> Tensor | None:
        """residual [T, H] += all that the tail adds; what the next layer's head projects, [T, N], if there is one."""
        ...


class CpuBackend:
    """Activations in float32, weights packed into panels or tiles."""

    device = torch.device("cpu")

    def head_sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
        return ()

    def matrix(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Matrix:
        return kernels.pack_weights(weights, dtype)

    def quantised_matrix(self, weights: Sequence[kernels.QuantisedRows]) -> Matrix | None:
        return kernels.pack_quantised(weights)

    def vector(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.float().clone()

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        return kernels.linear(x, weight, bias)

    def embedding(self, ids: Tensor, weight: Matrix, last_tokens: Tensor | None) -> Tensor:
        assert last_tokens is None, "on the CPU the runner resolves them"
        return kernels.embedding(ids, weight)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, tap: LayerTap | None = None
    ) -> Tensor:
        return kernels.rms_norm(x, weight, eps, residual, tap=tap)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None, tap: LayerTap | None = None
    ) -> Tensor:
        return kernels.layer_norm(x, weight, bias, eps, residual, tap)

    def prepare_qkv(
        self, projected: Projected, num_heads: int, cos_sin: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        num_kv_heads, head_dim = projected.kv_cache.shape[3], projected.kv_cache.shape[5]
        heads = projected.qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
        if norm is not None:
            kernels.head_rms_norm(q, norm.q_weight, norm.eps)
            kernels.head_rms_norm(k, norm.k_weight, norm.eps)
        if cos_sin is not None:
            kernels.rotary(q, k, projected.positions, cos_sin)
        kernels.write_kv(k, v, projected.kv_cache, projected.layer, projected.slot_mapping, projected.scales)
        return q

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
        kernels.write_kv(k, v, kv_cache, layer, slot_mapping)

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
        return kernels.paged_attention(q, kv_cache, layer, work, scale, bias=bias, scales=scales)

    def self_attention(
        self,
        projected: Projected,
        num_heads: int,
        cos_sin: Tensor | None,
        norm: HeadNorm | None,
        work: AttentionWork,
        scale: float,
    ) -> Tensor:
        q = self.prepare_qkv(projected, num_heads, cos_sin, norm)
        return self.attention(q, projected.kv_cache, projected.layer, work, scale, scales=projected.scales)

    def activated_linear(
        self, x: Tensor, weight: Matrix, bias: Tensor | None, activation: Activation, out: Tensor | None = None
    ) -> Tensor:
        """Rows of x may be apart or overlap here."""
        if weight.can_activate:
            return kernels.activated_linear(x, weight, activation, bias, out)
        return kernels.activate(kernels.linear(x, weight, bias, out), activation)

    def gated_linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, activation: Activation) -> Tensor:
        if weight.can_gate:
            return kernels.gated_linear(x, weight, activation, bias)
        return kernels.gated_activation(kernels.linear(x, weight, bias), activation)

    def feed_forward(self, x: Tensor, up: Product, down: Product, activation: Activation, gated: bool) -> Tensor:
        if up.weight.tiles and (up.weight.can_gate or not gated):
            return kernels.feed_forward(x, up.weight, up.bias, down.weight, down.bias, activation, gated)
        first = self.gated_linear if gated else self.activated_linear
        return self.linear(first(x, up.weight, up.bias, activation), down.weight, down.bias)

    def normed_linear(
        self, added: Tensor | None, residual: Tensor, norm: StreamNorm, weight: Matrix, bias: Tensor | None
    ) -> Tensor:
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
        return self.gated_linear(_normed(added, residual, norm), weight, bias, activation)

    def linear_into(self, x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor) -> Tensor | None:
        return self.linear(x, weight, bias)

    def can_chain(self, attended: Tensor, tail: LayerTail) -> bool:
        return False

    def chain(self, attended: Tensor, residual: Tensor, tail: LayerTail, head: LayerHead | None) -> Tensor | None:
        raise AssertionError("nothing to chain")


def _normed(added: Tensor | None, residual: Tensor, norm: StreamNorm) -> Tensor:
    if added is None:
        return kernels.rms_norm(residual, norm.weight, norm.eps, tap=norm.tap)
    return kernels.rms_norm(added, norm.weight, norm.eps, residual, tap=norm.tap)
