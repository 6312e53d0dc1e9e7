"""Small decoders in bfloat16, one row: all layers are one kernel, attention included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bequest.engine.backends.cuda.chain import ChainCompiler, ChainProgram
from bequest.engine.backends.cuda.weights import DenseWeight
from bequest.engine.kernels import cuda_stack
from bequest.engine.kernels.cuda_attention import CudaAttentionPlan
from bequest.engine.kernels.cuda_stack import RowStack, StackedLayer, StackRule, StackShape
from bequest.engine.kernels.kv_format import UNSCALED
from bequest.engine.layers.parts import HeadNorm, Heads, Norm
from bequest.engine.layers.spec import Attention, FeedForward, LayerSpec
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight

_FEWEST_LAYERS = 4  # what a launch takes to begin and to end is that of half a layer


class StackCompiler:
    """A Compiler: that of chains, whose layers it stacks where there is a kernel for all of them. Steps of more rows,
    and of one that has more to it, are chained even so."""

    name = "chained"

    def __init__(self, chain: ChainCompiler, scratch: torch.Tensor) -> None:
        """scratch: of this device's stacks"""
        self._chain = chain
        self._scratch = scratch

    def refusal(self, layer: LayerSpec) -> str | None:
        return self._chain.refusal(layer)

    def compile(self, layers: Sequence[LayerSpec], *, ends: bool) -> ChainProgram | StackProgram:
        chained = self._chain.compile(layers, ends=ends)
        parts = [part for layer in layers if (part := _parts(layer)) is not None]
        if len(parts) < len(layers) or len(layers) < _FEWEST_LAYERS:
            return chained
        first = parts[0]
        if not all(part.is_like(first) for part in parts) or not cuda_stack.has_kernel(first.shape):
            return chained
        stack = RowStack(first.shape, first.rule(), [part.stacked() for part in parts], self._scratch)
        return StackProgram(stack, first.heads.strip, chained)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A layer as the kernel takes it."""

    layer: LayerSpec
    norms: tuple[Norm, Norm]
    attention: Attention
    feed_forward: FeedForward

    @property
    def head_dim(self) -> int:
        return self.attention.output.in_features // self.attention.heads.num_heads

    @property
    def heads(self) -> Heads:
        return self.attention.heads

    @property
    def shape(self) -> StackShape:
        heads, head_dim = self.heads.num_heads, self.head_dim
        kv_heads = (self.attention.qkv.out_features // head_dim - heads) // 2
        return StackShape(self.attention.qkv.in_features, self.feed_forward.down.in_features, heads, kv_heads, head_dim)

    def rule(self) -> StackRule:
        heads = self.heads
        assert heads.rope is not None
        head_eps = 0.0 if heads.norm is None else heads.norm.eps
        return StackRule(self.norms[0].eps, head_eps, self.feed_forward.activation, heads.scale, heads.rope)

    def is_like(self, other: _Parts) -> bool:
        mine, others = self.rule(), other.rule()
        is_same_rope = mine.rope is others.rope
        numbers = (mine.eps, self.norms[1].eps, mine.head_eps, mine.activation, mine.scale, self.heads.strip)
        expected = (others.eps, others.eps, others.head_eps, others.activation, others.scale, other.heads.strip)
        return is_same_rope and numbers == expected and self.shape == other.shape

    def stacked(self) -> StackedLayer:
        norm = self.heads.norm
        return StackedLayer(
            attention_norm=self.norms[0].weight,
            qkv=_matrix(self.attention.qkv),
            q_norm=None if norm is None else norm.q_weight,
            k_norm=None if norm is None else norm.k_weight,
            output=_matrix(self.attention.output),
            mlp_norm=self.norms[1].weight,
            gate_up=_matrix(self.feed_forward.up),
            down=_matrix(self.feed_forward.down),
            cache_layer=self.heads.cache_layer,
            index=self.layer.index,
        )


def _parts(layer: LayerSpec) -> _Parts | None:
    """Of a layer that the chain takes. None: it is of another kind, or not in plain bfloat16"""
    attention, feed_forward = (sublayer.mixer for sublayer in layer.sublayers)
    first, second = (sublayer.before for sublayer in layer.sublayers)
    if not isinstance(attention, Attention) or not isinstance(feed_forward, FeedForward):
        return None
    if first is None or second is None or not all(_is_plain(weight) for weight in layer.weights):
        return None
    if first.weight.dtype is not torch.bfloat16 or second.weight.dtype is not torch.bfloat16:
        return None
    parts = _Parts(layer, (first, second), attention, feed_forward)
    return parts if _are_plain_heads(attention.heads, parts.head_dim) else None


def _is_plain(weight: Weight) -> bool:
    return type(weight) is DenseWeight and weight.bias is None and weight.matrix.dtype is torch.bfloat16


def _matrix(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, DenseWeight)
    return weight.matrix


def _are_plain_heads(heads: Heads, head_dim: int) -> bool:
    """Turned whole, over all keys, which are stored as they are."""
    if heads.window or heads.bias is not None or heads.soft_cap or heads.sinks is not None:
        return False
    if heads.rope is None or heads.rope.shape[1] != head_dim or heads.query_scales is not None:
        return False
    return heads.kv_scales == UNSCALED and (heads.norm is None or _is_plain_norm(heads.norm))


def _is_plain_norm(norm: HeadNorm) -> bool:
    has_others = norm.over_rows or norm.centred or norm.v_weight is not None or norm.k_weight is None
    return not has_others and norm.offset == 0.0 and norm.q_weight.dtype is torch.bfloat16


class StackProgram:
    """A Program."""

    def __init__(self, stack: RowStack, strip: int, chained: ChainProgram) -> None:
        self._stack = stack
        self._strip = strip
        self._chained = chained

    def run_from(self, start: StartRows, step: LayerStep) -> Stream:
        stream = start.stream(self._chained.ops)
        self.run(stream, step)
        return stream

    def run(self, stream: Stream, step: LayerStep) -> None:
        plan, kv_cache = step.attention[self._strip], step.cache_of(self._strip)
        assert isinstance(plan, CudaAttentionPlan), "the runner of this backend has made it"
        if _is_plain_row(step) and self._stack.takes(kv_cache, plan) and self._stack.is_ready():
            slots = step.slot_mapping[self._strip]
            self._stack.run(stream.state(), kv_cache, plan, slots, step.positions, step.tap)
        else:
            self._chained.run(stream, step)


def _is_plain_row(step: LayerStep) -> bool:
    """Whether there is one row, and nothing but layers."""
    has_more = step.adapters is not None or step.read is not None or step.together is not None
    return len(step.positions) == 1 and not has_more
