"""A stack of layers as the CPU runs it, in one call."""

from __future__ import annotations

from collections.abc import Sequence

from bequest.engine.kernels.cpu_stack import LayerStack, StackNorm, StackProduct
from bequest.engine.models.backend import CpuBackend
from bequest.engine.models.layers import LayerNorm, Linear, RMSNorm
from bequest.engine.models.sublayers import CrossLayer, EncoderLayer


def stack_of(layers: Sequence[EncoderLayer | CrossLayer], hidden_size: int) -> LayerStack | None:
    """None where another backend runs them, kernel by kernel. REQUIRES: norms stand before sublayers"""
    attention, mlp = layers[0].attention, layers[0].mlp
    if not isinstance(attention.qkv.backend, CpuBackend):
        return None
    num_heads = attention.num_heads
    head_dim = attention.qkv.weight.out_features // (3 * num_heads)
    has_cross = isinstance(layers[0], CrossLayer)
    stack = LayerStack(hidden_size, num_heads, head_dim, attention.scale, mlp.activation, mlp.gated, has_cross)
    for layer in layers:
        norms, linears = [layer.attention_norm], [layer.attention.qkv, layer.attention.output]
        if isinstance(layer, CrossLayer):
            norms.append(layer.cross_norm)
            linears += [layer.cross.q, layer.cross.output]
        norms.append(layer.mlp_norm)
        linears += [layer.mlp.up, layer.mlp.down]
        stack.add([_norm(norm) for norm in norms], [_product(linear) for linear in linears])
    return stack


def _norm(norm: LayerNorm | RMSNorm) -> StackNorm:
    return StackNorm(norm.weight, norm.bias if isinstance(norm, LayerNorm) else None, norm.eps)


def _product(linear: Linear) -> StackProduct:
    return StackProduct(linear.weight, linear.bias)
