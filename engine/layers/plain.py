"""Layers kernel by kernel: what every backend can do, and what faster ways of running a layer are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from bequest.engine.layers.adapted import adapted, given_by_experts
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.source import Rows, Source, source_of
from bequest.engine.layers.spec import Attention, CrossAttention, DeltaNet, Experts, FeedForward, LayerSpec, Sublayer
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
    is_narrow = kinds[0] is Attention and others and others <= {FeedForward, Experts}
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
        for layer in self._layers:
            self.run_layer(layer, stream, step)

    def run_layer(self, layer: LayerSpec, stream: Stream, step: LayerStep) -> None:
        narrow = step.read is not None and layer is self._narrowing
        # Each of the hidden states between layers is seen once: where a layer begins, or by the norm that ends it.
        tap = None if layer.ends_normed else step.tap_of_state(layer.index)
        source: Source | None = None
        for sublayer, following in pairwise((*layer.sublayers, None)):
            assert sublayer is not None
            if source is None or not sublayer.beside:
                is_shared = following is not None and following.beside
                source = source_of(sublayer.before, stream, tap, is_shared=is_shared)
            source = apply(sublayer, source, stream, step, narrow=narrow)
            tap = None
            if sublayer.after is not None:
                last = following is None
                stream.become_normed(sublayer.after, step.tap_of_output(layer.index + 1) if last else None)


def apply(sublayer: Sublayer, source: Source, stream: Stream, step: LayerStep, *, narrow: bool = False) -> Source:
    """All of a sublayer but its norms `before` and `after`. Returns the source, with the rows that the stream has."""
    mixer, ops, adapters = sublayer.mixer, stream.ops, step.adapters
    match mixer:
        case Attention():
            gathered = _attended(mixer, source, stream, step, narrow=narrow)
            source = source.keep(step.read.rows) if narrow and step.read is not None else source
            _add(sublayer, adapted(mixer.output, adapters), stream, gathered)
        case CrossAttention(heads=heads):
            gathered = ops.attend_cross(source.product(adapted(mixer.q, adapters)), heads, step)
            _add(sublayer, adapted(mixer.output, adapters), stream, gathered)
        case DeltaNet(rule=rule):
            gathered = ops.delta_net(source.product(adapted(mixer.rows, adapters)), rule, step)
            _add(sublayer, adapted(mixer.output, adapters), stream, gathered)
        case FeedForward():
            inner = source.gated if mixer.gated else source.activated
            result = inner(adapted(mixer.up, adapters), mixer.activation)
            _add(sublayer, adapted(mixer.down, adapters), stream, result)
        case Experts():
            _add_given(sublayer, stream, _of_experts(mixer, source.rows(), ops, adapters))
    return source


def _attended(mixer: Attention, source: Source, stream: Stream, step: LayerStep, *, narrow: bool) -> Tensor:
    """[T, NQ D], or [R, NQ D] where the stream goes on with the rows that are read."""
    gate = None
    if mixer.gate is not None:
        source = Rows(source.rows())
        gate = source.product(adapted(mixer.gate, step.adapters))
    qkv = source.product(adapted(mixer.qkv, step.adapters))
    if narrow and step.read is not None:
        gathered = stream.ops.attend_read(qkv, mixer.heads, step)
        stream.keep(step.read.rows)
        gate = None if gate is None else gate[step.read.rows]
    else:
        gathered = stream.ops.attend(qkv, mixer.heads, step)
        if step.together is not None:
            step.together.attend(gathered, qkv, mixer.heads, step.kv_cache)
    return gathered if gate is None else stream.ops.sigmoid_gate(gathered, gate)


def _add(sublayer: Sublayer, last: Weight, stream: Stream, x: Tensor) -> None:
    """The product that ends a mixer, to the stream."""
    if sublayer.behind is None and sublayer.factor == 1.0 and sublayer.ranks.size == 1:
        last.add_to(stream, x)
    else:
        _add_given(sublayer, stream, last(x))


def _of_experts(mixer: Experts, x: Tensor, ops: Ops, adapters: StepAdapters | None) -> Tensor:
    """[T, H] → [T, H]"""
    chosen = ops.route(adapted(mixer.router, adapters)(x), mixer.routing)
    total = given_by_experts(mixer, x, chosen, adapters)
    if mixer.shared is None:
        return total
    shared, up = mixer.shared, adapted(mixer.shared.up, adapters)
    inner = up.gated(x, shared.activation) if shared.gated else up.activated(x, shared.activation)
    added = adapted(shared.down, adapters)(inner)
    if mixer.shared_gate is None:
        return total.add_(added)
    return ops.add_weighed(total, added, adapted(mixer.shared_gate, adapters)(x))


def _add_given(sublayer: Sublayer, stream: Stream, given: Tensor) -> None:
    given = sublayer.ranks.sum(given)
    if sublayer.behind is not None:
        given = stream.ops.norm(given, sublayer.behind, None, None)
    stream.add(given if sublayer.factor == 1.0 else given.mul_(sublayer.factor))
