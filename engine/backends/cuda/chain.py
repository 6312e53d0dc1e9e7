"""Decoder layers for a few rows: all products between two attentions are one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bequest.engine.backends.cuda.experts import DenseExperts
from bequest.engine.backends.cuda.weights import DenseWeight, row_norm
from bequest.engine.kernels import cuda_chain
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Heads, Norm
from bequest.engine.layers.plain import PlainProgram
from bequest.engine.layers.spec import Attention, Experts, FeedForward, LayerSpec, Sublayer
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
        formats = {weight.format for weight in layer.weights}
        if len(formats) > 1 or not all(_is_chained(weight) for weight in layer.weights):
            return f"weights in {', '.join(sorted(formats))}"
        match layer.sublayers:
            case (Sublayer(mixer=Attention(gate=Weight())), *_):
                return "an attention with a gate"
            case (Sublayer(mixer=Attention(output=output)), Sublayer(mixer=FeedForward(gated=True, down=down))):
                has_kernel = _has_kernel(output, down)
            case (Sublayer(mixer=Attention(output=output)), Sublayer(mixer=Experts() as experts)):
                if (refusal := _refusal_of_experts(experts)) is not None:
                    return refusal
                has_kernel = _has_expert_kernel(output, experts)
            case _:
                return "not an attention and a gated feed-forward layer or experts"
        if not all(_is_chained_norm(sublayer) for sublayer in layer.sublayers):
            return "norms other than root-mean-square ones before each sublayer"
        if any(sublayer.factor != 1.0 for sublayer in layer.sublayers):
            return "what it adds has a factor"
        return None if has_kernel else "no kernel for these sizes"

    def compile(self, layers: Sequence[LayerSpec], *, ends: bool) -> ChainProgram:
        return ChainProgram(
            [_linked(layer) for layer in layers], PlainProgram(layers, self._ops, ends=ends), self._scratch
        )


def _is_chained(weight: Weight) -> bool:
    return type(weight) is DenseWeight and weight.matrix.dtype is not torch.float32


def _has_kernel(output: Weight, down: Weight) -> bool:
    in_codes = isinstance(down, DenseWeight) and down.scales is not None
    return cuda_chain.has_kernel(output.in_features, down.out_features, down.in_features, in_codes=in_codes)


def _refusal_of_experts(experts: Experts) -> str | None:
    routing = experts.routing
    if experts.shared is not None:
        return "an expert that all tokens take"
    if routing.scoring != "softmax" or routing.bias is not None or routing.num_groups > 1:
        return "a choice of experts other than by a softmax"
    if not _is_bfloat16_of_experts(experts.up) or not _is_bfloat16_of_experts(experts.down):
        return "experts that have biases or are not in bfloat16"
    return None


def _is_bfloat16_of_experts(weights: ExpertWeights) -> bool:
    if type(weights) is not DenseExperts:
        return False
    return weights.matrices.weight.dtype is torch.bfloat16 and weights.matrices.bias is None


def _has_expert_kernel(output: Weight, experts: Experts) -> bool:
    down = experts.down
    sizes = (output.in_features, down.out_features, down.in_features)
    return cuda_chain.has_expert_kernel(*sizes, down.num_experts, experts.routing.top_k)


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

    def project(self, stream: Stream, step: LayerStep) -> Tensor:
        """Queries, keys and values, by a product of their own."""
        return self.qkv.normed(stream, self.attention_norm, step.tap_of_state(self.index))


class ChainProgram:
    """A Program."""

    def __init__(self, links: Sequence[Link], plain: PlainProgram, scratch: Tensor) -> None:
        self._links = links
        self._plain = plain
        self._scratch = scratch
        self._most_rows = min(link.tail.most_rows for link in links)

    def run_from(self, start: StartRows, step: LayerStep) -> Stream:
        stream = start.stream(self._plain.ops)
        self.run(stream, step)
        return stream

    def run(self, stream: Stream, step: LayerStep) -> None:
        """A step of more rows, one of which some rows are read, or one with adapters goes kernel by kernel."""
        is_wide = len(step.positions) > self._most_rows
        if is_wide or step.read is not None or step.adapters is not None:
            self._plain.run(stream, step)
        else:
            self._run_chained(stream, step)

    def _run_chained(self, stream: Stream, step: LayerStep) -> None:
        qkv = self._links[0].project(stream, step)
        residual = stream.state()
        for link, following in pairwise([*self._links, None]):
            assert link is not None
            gathered = stream.ops.attend(qkv, link.heads, step)
            projected = cuda_chain.run(gathered, residual, link.tail, _head(link, following, step), self._scratch)
            if following is not None:
                qkv = following.project(stream, step) if projected is None else projected


def _head(link: Link, following: Link | None, step: LayerStep) -> cuda_chain.Head | None:
    """What a chain goes on to: the projection of the next layer, if that is in the same format."""
    if following is None or following.qkv.format != link.qkv.format:
        return None
    norm = row_norm(following.attention_norm, step.tap_of_state(following.index))
    return cuda_chain.Head(norm, _product(following.qkv))


def _linked(layer: LayerSpec) -> Link:
    attention, mlp = (sublayer.mixer for sublayer in layer.sublayers)
    norms = [sublayer.before for sublayer in layer.sublayers]
    assert isinstance(attention, Attention) and isinstance(mlp, FeedForward | Experts)
    assert norms[0] is not None and norms[1] is not None and isinstance(attention.qkv, DenseWeight)
    return Link(layer.index, norms[0], attention.qkv, attention.heads, _tail(attention.output, norms[1], mlp))


def _tail(output: Weight, norm: Norm, mlp: FeedForward | Experts) -> cuda_chain.Tail:
    if isinstance(mlp, FeedForward):
        up, down, choice = _product(mlp.up), _product(mlp.down), None
    else:
        up, down = _expert_product(mlp.up), _expert_product(mlp.down)
        routing = mlp.routing
        choice = cuda_chain.Choice(_product(mlp.router), routing.top_k, routing.renormalises, routing.factor)
    return cuda_chain.Tail(_product(output), row_norm(norm), up, mlp.activation, down, choice)


def _expert_product(weights: ExpertWeights) -> cuda_chain.Product:
    assert isinstance(weights, DenseExperts)
    return cuda_chain.Product(weights.matrices.weight)


def _product(weight: Weight) -> cuda_chain.Product:
    assert isinstance(weight, DenseWeight)
    return cuda_chain.Product(weight.matrix, weight.bias, weight.scales)
