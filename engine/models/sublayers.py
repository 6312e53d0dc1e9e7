"""What the layers of encoder-decoder models are made of: self and cross attention, and a feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bequest.engine.kernels.cpu_stack import StackProduct, can_store_in_cache, linear_into_cache
from bequest.engine.models.backend import Activation, AttentionWork, CpuBackend, Matrix, Projected
from bequest.engine.models.layers import LayerNorm, Linear, RMSNorm

Norm = LayerNorm | RMSNorm


@dataclass(frozen=True, slots=True)
class SelfKeys:
    """Where a layer's keys and values go and what its queries see of them."""

    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int64
    kv_cache: Tensor  # [NB, L, 2, NKV, BS, D]
    layer: int
    work: AttentionWork
    bias: Tensor | None  # [NQ, 2 R + 1] float32


class SelfAttention:
    def __init__(self, qkv: Linear, output: Linear, num_heads: int, scale: float) -> None:
        self.qkv = qkv  # [3 NQ D, H]
        self.output = output
        self.num_heads = num_heads
        self.scale = scale

    def __call__(self, x: Tensor, keys: SelfKeys) -> Tensor:
        """[T, H] → [T, H]"""
        backend = self.qkv.backend
        projected = Projected(self.qkv(x), keys.positions, keys.slots, keys.kv_cache, keys.layer)
        q = backend.prepare_qkv(projected, self.num_heads, None, None)  # [T, NQ, D]
        attended = backend.attention(q, keys.kv_cache, keys.layer, keys.work, self.scale, keys.bias)
        return self.output(attended.flatten(1))

    @property
    def matrices(self) -> list[Matrix]:
        return [self.qkv.weight, self.output.weight]


class CrossAttention:
    def __init__(self, q: Linear, kv: Linear, output: Linear, num_heads: int, scale: float, layer: int) -> None:
        self.q = q
        self.kv = kv  # [2 NQ D, H]
        self.output = output
        self.num_heads = num_heads
        self.scale = scale
        self.layer = layer

    def write(self, states: Tensor, slots: Tensor, kv_cache: Tensor) -> None:
        """Keys and values of states [E, H] to slots [E]."""
        if isinstance(self.kv.backend, CpuBackend) and can_store_in_cache(self.kv.weight, kv_cache):
            linear_into_cache(states, StackProduct(self.kv.weight, self.kv.bias), kv_cache, self.layer, slots)
            return
        heads = self.kv(states).view(states.shape[0], 2 * self.num_heads, -1)  # [E, 2 NQ, D]
        keys, values = heads[:, : self.num_heads], heads[:, self.num_heads :]
        self.kv.backend.write_kv(keys, values, kv_cache, self.layer, slots)

    def __call__(self, x: Tensor, kv_cache: Tensor, work: AttentionWork) -> Tensor:
        """[T, H] → [T, H]"""
        q = self.q(x).view(x.shape[0], self.num_heads, -1)  # [T, NQ, D]
        attended = self.q.backend.attention(q, kv_cache, self.layer, work, self.scale)
        return self.output(attended.flatten(1))

    @property
    def matrices(self) -> list[Matrix]:
        return [self.q.weight, self.kv.weight, self.output.weight]


class FeedForward:
    def __init__(self, up: Linear, down: Linear, activation: Activation, gated: bool) -> None:
        self.up = up  # [I, H], or gate and up [2 I, H]
        self.down = down  # [H, I]
        self.activation = activation
        self.gated = gated

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H]"""
        return self.up.backend.feed_forward(x, self.up.product, self.down.product, self.activation, self.gated)

    @property
    def matrices(self) -> list[Matrix]:
        return [self.up.weight, self.down.weight]


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm
    mlp: FeedForward

    @property
    def matrices(self) -> list[Matrix]:
        return self.attention.matrices + self.mlp.matrices


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """Of a decoder."""

    attention_norm: Norm
    attention: SelfAttention
    cross_norm: Norm
    cross: CrossAttention
    mlp_norm: Norm
    mlp: FeedForward

    @property
    def matrices(self) -> list[Matrix]:
        return self.attention.matrices + self.cross.matrices + self.mlp.matrices
