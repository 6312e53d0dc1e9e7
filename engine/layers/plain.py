"""Layers kernel by kernel: what every backend can do, and what faster ways of running a layer are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from bequest.engine.layers.adapted import adapted, given_by_experts
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Norm
from bequest.engine.layers.source import Rows, Source, source_of
from bequest.engine.layers.spec import (
    Attention,
    Branches,
    CrossAttention,
    DeltaNet,
    Experts,
    FeedForward,
    LayerSpec,
    Sublayer,
    TokenInput,
)
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight


def narrows(layer: LayerSpec) -> bool:
    """Whether rows that nobody reads can end in its attention, if no layer follows: no other attention does, and no
    norm that stores hidden states of them."""
    kinds = [type(sublayer.mixer) for sublayer in layer.sublayers]
    others = set(kinds[1:])
    is_narrow = kinds[0] is Attention and others and others <= {FeedForward, Experts, Branches, TokenInput}
    return bool(is_narrow) and layer.sublayers[-1].after is None


class PlainProgram:
    """A Program (engine.layers.program)."""

    def __init__(self, layers: Sequence[LayerSpec], ops: Ops, *, ends: bool) -> None:
        self._layers = layers
        self.ops = ops
        self._narrowing = layers[-1] if ends and narrows(layers[-1]) else None

    def run_from(self, start: StartRows, step: LayerStep) -> Stream:
        stream = start.stream(self.ops)
        self.run(stream, step)
        return stream

    def run(self, stream: Stream, step: LayerStep) -> None:
        for layer, following in pairwise((*self._layers, None)):
            assert layer is not None
            self.run_layer(layer, stream, step, following)
            if step.between is not None:
                step.between()

    def run_layer(self, layer: LayerSpec, stream: Stream, step: LayerStep, behind: LayerSpec | None = None) -> None:
        """behind: the layer that follows at once"""
        narrow = step.read is not None and layer is self._narrowing
        # Each of the hidden states between layers is seen once: where a layer begins, or by the norm that ends it.
        tap = None if layer.ends_normed else step.tap_of_state(layer.index)
        source: Source | None = None
        for sublayer, following in pairwise((*layer.sublayers, None)):
            assert sublayer is not None
            if source is None or not sublayer.beside:
                is_shared = following is not None and following.beside
                source = source_of(sublayer.before, stream, tap, is_shared=is_shared)
            stream.ahead = _norm_ahead(sublayer, following or _first_of(behind, layer))
            source = apply(sublayer, source, stream, step, narrow=narrow)
            stream.ahead, tap = None, None
            if sublayer.after is not None:
                last = following is None
                stream.become_normed(sublayer.after, step.tap_of_output(layer.index + 1) if last else None)
        if layer.factor != 1.0:
            stream.scale(layer.factor)


def _first_of(behind: LayerSpec | None, layer: LayerSpec) -> Sublayer | None:
    """What reads the stream as the layer leaves it, if that is so."""
    return None if behind is None or layer.factor != 1.0 else behind.sublayers[0]


def _norm_ahead(sublayer: Sublayer, following: Sublayer | None) -> Norm | None:
    """The norm through which a product reads what the sublayer leaves of the stream."""
    if following is None or following.beside or sublayer.after is not None:
        return None
    is_product = isinstance(following.mixer, Attention | CrossAttention | DeltaNet | FeedForward)
    return following.before if is_product else None


def apply(sublayer: Sublayer, source: Source, stream: Stream, step: LayerStep, *, narrow: bool = False) -> Source:
    """All of a sublayer but its norms `before` and `after`. Returns the source, with the rows that the stream has."""
    mixer, ops, adapters = sublayer.mixer, stream.ops, step.adapters
    match mixer:
        case Attention():
            output = adapted(mixer.output, adapters)
            if mixer.gate is None and not narrow and step.together is None and _is_added_plainly(sublayer):
                output.attend_to(stream, _projected(mixer, source, step), mixer.heads, step)
            else:
                gathered = _attended(mixer, source, stream, step, narrow=narrow)
                source = source.keep(step.read.rows) if narrow and step.read is not None else source
                _add(sublayer, output, stream, gathered)
        case CrossAttention(heads=heads):
            gathered = ops.attend_cross(source.product(adapted(mixer.q, adapters)), heads, step)
            _add(sublayer, adapted(mixer.output, adapters), stream, gathered)
        case DeltaNet(rule=rule):
            gathered = ops.delta_net(source.product(adapted(mixer.rows, adapters)), rule, step)
            _add(sublayer, adapted(mixer.output, adapters), stream, gathered)
        case FeedForward():
            up, down = adapted(mixer.up, adapters), adapted(mixer.down, adapters)
            if mixer.gated and up.gates_apart(stream) and _is_added_plainly(sublayer):
                down.gate_to(stream, source.product(up), mixer.activation)
            else:
                inner = source.gated if mixer.gated else source.activated
                _add(sublayer, down, stream, inner(up, mixer.activation))
        case Experts():
            rows = source.rows()
            _add_given(sublayer, stream, _of_experts(mixer, rows, rows, ops, adapters))
        case Branches():
            _add_given(sublayer, stream, _of_branches(mixer, source.rows(), ops, adapters))
        case TokenInput(layer=layer):
            assert stream.inputs is not None, "a model with such layers begins with what they get"
            inner_rows = source.activated(adapted(mixer.gate, adapters), mixer.activation).mul_(stream.inputs[:, layer])
            _add(sublayer, adapted(mixer.output, adapters), stream, inner_rows)
    return source


def _attended(mixer: Attention, source: Source, stream: Stream, step: LayerStep, *, narrow: bool) -> Tensor:
    """[T, NQ D], or [R, NQ D] where the stream goes on with the rows that are read."""
    gate = None
    if mixer.gate is not None:
        source = Rows(source.rows())
        gate = source.product(adapted(mixer.gate, step.adapters))
    qkv = _projected(mixer, source, step)
    if narrow and step.read is not None:
        gathered = stream.ops.attend_read(qkv, mixer.heads, step)
        stream.keep(step.read.rows)
        gate = None if gate is None else gate[step.read.rows]
    else:
        gathered = stream.ops.attend(qkv, mixer.heads, step)
        if step.together is not None:
            step.together.attend(gathered, qkv, mixer.heads, step.cache_of(mixer.heads.strip))
    return gathered if gate is None else stream.ops.sigmoid_gate(gathered, gate)


def _projected(mixer: Attention, source: Source, step: LayerStep) -> Tensor:
    """Queries, keys and values, [T, (NQ + 2 NKV) D]"""
    qkv = source.product(adapted(mixer.qkv, step.adapters))
    return torch.cat([qkv, qkv[:, mixer.output.in_features :]], dim=1) if mixer.keys_are_values else qkv


def _is_added_plainly(sublayer: Sublayer) -> bool:
    """Whether nothing is done to what a mixer gives before the stream gets it."""
    return sublayer.behind is None and sublayer.factor == 1.0 and sublayer.ranks.size == 1


def _add(sublayer: Sublayer, last: Weight, stream: Stream, x: Tensor) -> None:
    """The product that ends a mixer, to the stream."""
    if _is_added_plainly(sublayer):
        last.add_to(stream, x)
    else:
        _add_given(sublayer, stream, last(x))


def _of_branches(mixer: Branches, state: Tensor, ops: Ops, adapters: StepAdapters | None) -> Tensor:
    """The state of the stream [T, H] → [T, H]"""
    total: Tensor | None = None
    for part in mixer.parts:
        x = ops.norm(state, part.before, None, None)
        if isinstance(part.mixer, Experts):
            given = _of_experts(part.mixer, x, state, ops, adapters)
        else:
            given = _of_feed_forward(part.mixer, x, adapters)
        given = ops.norm(given, part.behind, None, None)
        total = given if total is None else total.add_(given)
    assert total is not None, "there is at least one"
    return total


def _of_feed_forward(mixer: FeedForward, x: Tensor, adapters: StepAdapters | None) -> Tensor:
    """[T, H] → [T, H]"""
    up = adapted(mixer.up, adapters)
    inner = up.gated(x, mixer.activation) if mixer.gated else up.activated(x, mixer.activation)
    return adapted(mixer.down, adapters)(inner)


def _of_experts(mixer: Experts, x: Tensor, state: Tensor, ops: Ops, adapters: StepAdapters | None) -> Tensor:
    """[T, H] → [T, H]. `state`: of the stream, which the router may read through a norm of its own"""
    seen = x if mixer.router_norm is None else ops.norm(state, mixer.router_norm, None, None)
    chosen = ops.route(adapted(mixer.router, adapters)(seen), mixer.routing)
    if (scales := mixer.routing.scales) is not None:
        chosen.weights.mul_(scales[chosen.ids.long()])
    total = given_by_experts(mixer, x, chosen, adapters)
    if mixer.shared is None:
        return total
    added = _of_feed_forward(mixer.shared, x, adapters)
    if mixer.shared_gate is None:
        return total.add_(added)
    return ops.add_weighed(total, added, adapted(mixer.shared_gate, adapters)(x))


def _add_given(sublayer: Sublayer, stream: Stream, given: Tensor) -> None:
    given = sublayer.ranks.sum(given)
    if sublayer.behind is not None:
        given = stream.ops.norm(given, sublayer.behind, None, None)
    stream.add(given if sublayer.factor == 1.0 else given.mul_(sublayer.factor))
