"""Decoder layers for a few rows: all products between two attentions are one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bequest.engine.backends.cuda.weights import DenseWeight, row_norm
from bequest.engine.kernels import cuda_chain
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Heads, Norm
from bequest.engine.layers.plain import PlainProgram
from bequest.engine.layers.spec import Attention, FeedForward, LayerSpec, Sublayer
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight


class ChainCompiler:
    """A Compiler."""

    name = "chained"

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._scratch = cuda_chain.make_scratch(device)

    def refusal(self, layer: LayerSpec) -> str | None:
        if others := {weight.format for weight in layer.weights if not _is_bfloat16(weight)}:
            return f"weights in {', '.join(sorted(others))}"
        match layer.sublayers:
            case (Sublayer(mixer=Attention(gate=Weight())), *_):
                return "an attention with a gate"
            case (Sublayer(mixer=Attention(output=output)), Sublayer(mixer=FeedForward(gated=True, down=down))):
                pass
            case _:
                return "not an attention and a gated feed-forward layer"
        if not all(_is_chained_norm(sublayer) for sublayer in layer.sublayers):
            return "norms other than root-mean-square ones before each sublayer"
        if any(sublayer.factor != 1.0 for sublayer in layer.sublayers):
            return "what it adds has a factor"
        if not cuda_chain.has_kernel(output.in_features, down.out_features, down.in_features):
            return "no kernel for these sizes"
        return None

    def compile(self, layers: Sequence[LayerSpec], *, ends: bool) -> ChainProgram:
        return ChainProgram(
            [_linked(layer) for layer in layers], PlainProgram(layers, self._ops, ends=ends), self._scratch
        )


def _is_bfloat16(weight: Weight) -> bool:
    return type(weight) is DenseWeight and weight.matrix.dtype is torch.bfloat16


def _is_chained_norm(sublayer: Sublayer) -> bool:
    norm = sublayer.before
    is_plain = norm is not None and norm.bias is None and norm.offset == 0.0
    return is_plain and sublayer.behind is None and sublayer.after is None


@dataclass(frozen=True, slots=True)
class Link:
    """A layer as the chain takes it."""

    index: int
    attention_norm: Norm
    qkv: DenseWeight
    heads: Heads
    tail: cuda_chain.Tail


class ChainProgram:
    """A Program."""

    def __init__(self, links: Sequence[Link], plain: PlainProgram, scratch: Tensor) -> None:
        self._links = links
        self._plain = plain
        self._scratch = scratch

    def run_from(self, start: StartRows, step: LayerStep) -> Stream:
        stream = start.stream(self._plain.ops)
        self.run(stream, step)
        return stream

    def run(self, stream: Stream, step: LayerStep) -> None:
        """A step of more rows, or one of which some rows are read, goes kernel by kernel."""
        if len(step.positions) > cuda_chain.MOST_CHAINED_ROWS or step.read is not None:
            self._plain.run(stream, step)
        else:
            self._run_chained(stream, step)

    def _run_chained(self, stream: Stream, step: LayerStep) -> None:
        first = self._links[0]
        qkv: Tensor | None = first.qkv.normed(stream, first.attention_norm, step.tap_of_state(first.index))
        residual = stream.state()
        for link, following in pairwise([*self._links, None]):
            assert link is not None and qkv is not None
            gathered = stream.ops.attend(qkv, link.heads, step)
            qkv = cuda_chain.run(gathered, residual, link.tail, _head(following, step), self._scratch)


def _head(link: Link | None, step: LayerStep) -> cuda_chain.Head | None:
    """What a chain goes on to: the projection of the next layer."""
    if link is None:
        return None
    norm = row_norm(link.attention_norm, step.tap_of_state(link.index))
    return cuda_chain.Head(norm, _product(link.qkv))


def _linked(layer: LayerSpec) -> Link:
    attention, feed_forward = (sublayer.mixer for sublayer in layer.sublayers)
    norms = [sublayer.before for sublayer in layer.sublayers]
    assert isinstance(attention, Attention) and isinstance(feed_forward, FeedForward)
    assert norms[0] is not None and norms[1] is not None and isinstance(attention.qkv, DenseWeight)
    tail = cuda_chain.Tail(
        _product(attention.output),
        row_norm(norms[1]),
        _product(feed_forward.up),
        feed_forward.activation,
        _product(feed_forward.down),
    )
    return Link(layer.index, norms[0], attention.qkv, attention.heads, tail)


def _product(weight: Weight) -> cuda_chain.Product:
    assert isinstance(weight, DenseWeight)
    return cuda_chain.Product(weight.matrix, weight.bias)
