"""Decoder layers for a few rows: all products between two attentions are one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bequest.engine.backends.cuda.coded import Int4Weight
from bequest.engine.backends.cuda.experts import DenseExperts
from bequest.engine.backends.cuda.fine import FineWeight
from bequest.engine.backends.cuda.in_codes import WeightInCodes
from bequest.engine.backends.cuda.weights import DenseWeight, row_norm
from bequest.engine.kernels import cuda_chain
from bequest.engine.kernels.cuda_lora import LoraRows
from bequest.engine.layers.adapted import adapted
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Norm
from bequest.engine.layers.plain import PlainProgram
from bequest.engine.layers.spec import Attention, DeltaNet, Experts, FeedForward, LayerSpec, Sublayer
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight

_NARROW_HEAD = 128  # up to here the attention of a token fits beside a chain


class ChainCompiler:
    """A Compiler."""

    name = "chained"

    def __init__(self, ops: Ops, scratch: Tensor) -> None:
        """scratch: of this device's chains"""
        self._ops = ops
        self._scratch = scratch

    def refusal(self, layer: LayerSpec) -> str | None:
        if layer.is_shared_out:
            return "a sum over ranks"
        formats = {weight.format for weight in layer.weights}
        if len(formats) > 1 or not all(_is_chained(weight) for weight in layer.weights):
            return f"weights in {', '.join(sorted(formats))}"
        match [sublayer.mixer for sublayer in layer.sublayers]:
            case [Attention(gate=None) as mixer, FeedForward(gated=True) as feed_forward]:
                refusal = _refusal_of_dense(layer, mixer, feed_forward)
            case [Attention() | DeltaNet() as mixer, Experts() as experts]:
                refusal = _refusal_of_gate(mixer) or _refusal_of_experts(mixer, experts)
            case _:
                return "neither an attention and a gated feed-forward layer, nor experts"
        if not all(_is_chained_norm(sublayer) for sublayer in layer.sublayers):
            return "norms other than root-mean-square ones before each sublayer"
        if layer.factor != 1.0 or any(sublayer.factor != 1.0 for sublayer in layer.sublayers):
            return "what it adds has a factor"
        if isinstance(mixer, Attention) and not mixer.is_own:
            return "keys or values that are others'"
        return refusal

    def compile(self, layers: Sequence[LayerSpec], *, ends: bool) -> ChainProgram:
        return ChainProgram(
            [_linked(layer) for layer in layers], PlainProgram(layers, self._ops, ends=ends), self._scratch
        )


def _is_chained(weight: Weight) -> bool:
    if type(weight) is FineWeight:
        return weight.columns is None and weight.packed.is_chained
    return type(weight) is Int4Weight or (type(weight) is DenseWeight and weight.matrix.dtype is not torch.float32)


def _refusal_of_dense(layer: LayerSpec, mixer: Attention, feed_forward: FeedForward) -> str | None:
    if any(sublayer.before is not None and sublayer.before.offset for sublayer in layer.sublayers):
        return "norms whose weights have an offset"
    down = feed_forward.down
    sizes = (mixer.output.in_features, down.out_features, down.in_features)
    product = _product(down)
    has_kernel = cuda_chain.has_kernel(*sizes, bits=product.bits, fine=product.fine_codec > 0)
    return None if has_kernel else "no kernel for these sizes"


def _refusal_of_gate(mixer: Attention | DeltaNet) -> str | None:
    """Its rows and those of queries, keys and values are made by one product."""
    if isinstance(mixer, DeltaNet) or mixer.gate is None:
        return None
    weights = (mixer.gate, mixer.qkv)
    biased = any(isinstance(weight, DenseWeight) and weight.bias is not None for weight in weights)
    return "an attention with a gate and biases" if biased else None


def _refusal_of_experts(mixer: Attention | DeltaNet, experts: Experts) -> str | None:
    routing, shared, down = experts.routing, experts.shared, experts.down
    if _product(mixer.output).bits < 16:
        return "experts beside weights in codes"
    if routing.scales is not None or experts.router_norm is not None:
        return "experts whose router has a norm or scales"
    if routing.scoring != "softmax" or routing.bias is not None or routing.num_groups > 1:
        return "a choice of experts other than by a softmax"
    if not _is_bfloat16_of_experts(experts.up) or not _is_bfloat16_of_experts(down):
        return "experts that have biases or are not in bfloat16"
    if shared is not None and not _is_like_the_others(experts, shared):
        return "an expert that all tokens take and that is not as the others are"
    sizes = (mixer.output.in_features, down.out_features, down.in_features)
    if not cuda_chain.has_expert_kernel(sizes, down.num_experts, routing.top_k, has_shared=shared is not None):
        return "no kernel for these sizes"
    return None


def _is_bfloat16_of_experts(weights: ExpertWeights) -> bool:
    if type(weights) is not DenseExperts:
        return False
    return weights.matrices.weight.dtype is torch.bfloat16 and weights.matrices.bias is None


def _is_like_the_others(experts: Experts, shared: FeedForward) -> bool:
    gate = experts.shared_gate
    if gate is None or not shared.gated or shared.activation != experts.activation:
        return False
    weights = [weight for weight in (experts.router, gate, shared.up, shared.down) if isinstance(weight, DenseWeight)]
    return shared.down.in_features == experts.down.in_features and all(weight.bias is None for weight in weights)


def _is_chained_norm(sublayer: Sublayer) -> bool:
    norm = sublayer.before
    return norm is not None and norm.bias is None and sublayer.behind is None and sublayer.after is None


@dataclass(frozen=True, slots=True)
class Link:
    """A layer as the chain takes it."""

    index: int
    norm: Norm
    rows: Weight  # what the mixer begins with
    mixer: Attention | DeltaNet
    tail: cuda_chain.Tail

    def project(self, stream: Stream, step: LayerStep) -> Tensor:
        """What the mixer begins with, by a product of its own."""
        return adapted(self.rows, step.adapters).normed(stream, self.norm, step.tap_of_state(self.index))

    def takes(self, deltas: cuda_chain.Deltas, most_rank: int) -> bool:
        """Whether the chain has a kernel for it with these; most_rank: of slots, rounded"""
        tail = self.tail
        if tail.choice is not None or tail.down.bits < 16:
            return False
        hidden, inner = tail.down.weight.shape
        products = (tail.output, tail.gate_up, tail.down, _product(self.rows))
        has_kernel = cuda_chain.has_delta_kernel(tail.output.in_features, hidden, inner, most_rank)
        return has_kernel and all(deltas.fits(product) for product in products)

    def mixed(self, rows: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        """[T, A]"""
        if isinstance(self.mixer, DeltaNet):
            return ops.delta_net(rows, self.mixer.rule, step)
        if self.mixer.gate is None:
            return ops.attend(rows, self.mixer.heads, step)
        size = self.mixer.gate.out_features  # one row: its parts follow each other
        return ops.sigmoid_gate(ops.attend(rows[:, size:], self.mixer.heads, step), rows[:, :size])


class ChainProgram:
    """A Program."""

    def __init__(self, links: Sequence[Link], plain: PlainProgram, scratch: Tensor) -> None:
        self._links = links
        self._plain = plain
        self._scratch = scratch
        self._most_rows = min(link.tail.most_rows for link in links)

    @property
    def ops(self) -> Ops:
        return self._plain.ops

    def run_from(self, start: StartRows, step: LayerStep) -> Stream:
        stream = start.stream(self._plain.ops)
        self.run(stream, step)
        return stream

    def run(self, stream: Stream, step: LayerStep) -> None:
        """A step of more rows, or one of which some rows are read, goes kernel by kernel."""
        is_wide = len(step.positions) > self._most_rows
        if is_wide or step.read is not None:
            self._plain.run(stream, step)
        elif step.adapters is None:
            self._run_chained(stream, step, None)
        elif (deltas := self._deltas(step.adapters)) is not None:
            self._run_chained(stream, step, deltas)
        else:
            self._plain.run(stream, step)

    def _deltas(self, adapters: StepAdapters) -> cuda_chain.Deltas | None:
        """None: the chain does not take them."""
        rows = adapters.rows
        assert isinstance(rows, LoraRows), "the runner of this backend has made it"
        deltas = cuda_chain.Deltas(rows.slots, rows.sites)
        return deltas if all(link.takes(deltas, rows.most_rank) for link in self._links) else None

    def _run_chained(self, stream: Stream, step: LayerStep, deltas: cuda_chain.Deltas | None) -> None:
        rows = self._links[0].project(stream, step)
        residual = stream.state()
        for link, following in pairwise([*self._links, None]):
            assert link is not None
            mixed, head = link.mixed(rows, stream.ops, step), _head(link, following, step)
            projected = cuda_chain.run(mixed, residual, link.tail, head, self._scratch, deltas, stream.ops.experts_read)
            if following is not None:
                rows = following.project(stream, step) if projected is None else projected


def _head(link: Link, following: Link | None, step: LayerStep) -> cuda_chain.Head | None:
    """What a chain goes on to: the projection of the next layer, if that is in the same format."""
    if following is None or following.rows.format != link.rows.format:
        return None
    norm = row_norm(following.norm, step.tap_of_state(following.index))
    gate_up = following.tail.gate_up if following.tail.choice is None else None
    return cuda_chain.Head(norm, _product(following.rows), gate_up)


def _linked(layer: LayerSpec) -> Link:
    mixer, mlp = (sublayer.mixer for sublayer in layer.sublayers)
    norms = [sublayer.before for sublayer in layer.sublayers]
    assert isinstance(mixer, Attention | DeltaNet) and isinstance(mlp, FeedForward | Experts)
    assert norms[0] is not None and norms[1] is not None
    return Link(layer.index, norms[0], _first_rows(mixer), mixer, _tail(mixer, norms[1], mlp))


def _first_rows(mixer: Attention | DeltaNet) -> Weight:
    if isinstance(mixer, DeltaNet):
        return mixer.rows
    return mixer.qkv if mixer.gate is None else _joined([mixer.gate, mixer.qkv])


def _joined(weights: Sequence[Weight]) -> DenseWeight:
    """One matrix of all rows, of which the given weights become parts: it takes no memory of its own."""
    parts = [weight for weight in weights if isinstance(weight, DenseWeight)]
    assert len(parts) == len(weights)
    whole = DenseWeight(torch.cat([part.matrix for part in parts]), None, parts[0].ops)
    begin = 0
    for part in parts:
        end = begin + part.out_features
        part.matrix, begin = whole.matrix[begin:end], end
    return whole


def _tail(mixer: Attention | DeltaNet, norm: Norm, mlp: FeedForward | Experts) -> cuda_chain.Tail:
    if isinstance(mlp, FeedForward):
        up, down, choice = _product(mlp.up), _product(mlp.down), None
    else:
        up, down = _expert_product(mlp.up), _expert_product(mlp.down)
        choice = _choice(mlp, _foresight(mixer, norm, mlp), beside_attention=_is_narrow(mixer))
    return cuda_chain.Tail(_product(mixer.output), row_norm(norm), up, mlp.activation, down, choice)


def _is_narrow(mixer: Attention | DeltaNet) -> bool:
    return isinstance(mixer, Attention) and mixer.output.in_features <= _NARROW_HEAD * mixer.heads.num_heads


def _foresight(mixer: Attention | DeltaNet, norm: Norm, experts: Experts) -> Tensor | None:
    """None: biases hide who is best from it."""
    output, router = mixer.output, experts.router
    assert isinstance(output, DenseWeight) and isinstance(router, DenseWeight)
    if output.bias is not None or router.bias is not None:
        return None
    return cuda_chain.make_foresight(router.matrix, row_norm(norm), output.matrix)


def _choice(experts: Experts, foresight: Tensor | None, *, beside_attention: bool) -> cuda_chain.Choice:
    routing, router, shared = experts.routing, experts.router, None
    if experts.shared is not None and experts.shared_gate is not None:
        router = _joined([router, experts.shared_gate])
        shared = (_product(experts.shared.up), _product(experts.shared.down))
    rule = (routing.top_k, routing.renormalises, routing.factor)
    return cuda_chain.Choice(_product(router), *rule, shared, beside_attention, foresight)


def _expert_product(weights: ExpertWeights) -> cuda_chain.Product:
    assert isinstance(weights, DenseExperts)
    return cuda_chain.Product(weights.matrices.weight)


def _product(weight: Weight) -> cuda_chain.Product:
    if isinstance(weight, WeightInCodes):
        return weight.product()
    assert isinstance(weight, DenseWeight)
    return cuda_chain.Product(weight.matrix, weight.bias, weight.scales, weight.site)
