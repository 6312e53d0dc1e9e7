"""Layers kernel by kernel: what every backend can do, and what faster ways of running a layer are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.spec import Attention, CrossAttention, DeltaNet, Experts, FeedForward, LayerSpec, Sublayer
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.step import LayerStep
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
        for number, sublayer in enumerate(layer.sublayers):
            # Of the hidden states between layers one tap sees each: the norm that begins a layer, or the one that ends
            # the layer before.
            before = step.tap_of_state(layer.index) if number == 0 else None
            apply(sublayer, stream, step, before, narrow=narrow)
            if sublayer.after is not None:
                last = number == len(layer.sublayers) - 1
                stream.become_normed(sublayer.after, step.tap_of_output(layer.index + 1) if last else None)


def apply(sublayer: Sublayer, stream: Stream, step: LayerStep, tap: LayerTap | None, *, narrow: bool = False) -> None:
    """All of a sublayer but its norm `after`; the tap is for its norm `before`."""
    mixer, ops = sublayer.mixer, stream.ops
    match mixer:
        case Attention():
            _add(sublayer, mixer.output, stream, _attended(sublayer, mixer, stream, step, tap, narrow=narrow))
        case CrossAttention(q=weight, heads=heads):
            q = weight(stream.state()) if sublayer.before is None else weight.normed(stream, sublayer.before, tap)
            _add(sublayer, mixer.output, stream, ops.attend_cross(q, heads, step))
        case DeltaNet(rows=weight, rule=rule):
            rows = weight(stream.state()) if sublayer.before is None else weight.normed(stream, sublayer.before, tap)
            _add(sublayer, mixer.output, stream, ops.delta_net(rows, rule, step))
        case FeedForward():
            _add(sublayer, mixer.down, stream, _inner(sublayer, mixer, stream, tap))
        case Experts():
            x = stream.state() if sublayer.before is None else stream.normed(sublayer.before, tap)
            _add_given(sublayer, stream, _of_experts(mixer, x, ops))


def _attended(
    sublayer: Sublayer, mixer: Attention, stream: Stream, step: LayerStep, tap: LayerTap | None, *, narrow: bool
) -> Tensor:
    """[T, NQ D], or [R, NQ D] where the stream goes on with the rows that are read."""
    qkv, gate = _projected(sublayer, mixer, stream, tap)
    if narrow and step.read is not None:
        gathered = stream.ops.attend_read(qkv, mixer.heads, step)
        stream.keep(step.read.rows)
        gate = None if gate is None else gate[step.read.rows]
    else:
        gathered = stream.ops.attend(qkv, mixer.heads, step)
    return gathered if gate is None else stream.ops.sigmoid_gate(gathered, gate)


def _projected(
    sublayer: Sublayer, mixer: Attention, stream: Stream, tap: LayerTap | None
) -> tuple[Tensor, Tensor | None]:
    """Queries, keys and values [T, (NQ + 2 NKV) D], and the gate [T, NQ D] where there is one."""
    norm, weight, gate = sublayer.before, mixer.qkv, mixer.gate
    if gate is None:
        return weight(stream.state()) if norm is None else weight.normed(stream, norm, tap), None
    x = stream.state() if norm is None else stream.normed(norm, tap)
    return weight(x), gate(x)


def _inner(sublayer: Sublayer, mixer: FeedForward, stream: Stream, tap: LayerTap | None) -> Tensor:
    """[T, I]"""
    norm, up, activation = sublayer.before, mixer.up, mixer.activation
    if mixer.gated:
        if norm is not None:
            return up.normed_gated(stream, norm, activation, tap)
        return up.gated(stream.state(), activation)
    return up.activated(stream.state() if norm is None else stream.normed(norm, tap), activation)


def _add(sublayer: Sublayer, last: Weight, stream: Stream, x: Tensor) -> None:
    """The product that ends a mixer, to the stream."""
    if sublayer.behind is None and sublayer.factor == 1.0:
        last.add_to(stream, x)
    else:
        _add_given(sublayer, stream, last(x))


def _of_experts(mixer: Experts, x: Tensor, ops: Ops) -> Tensor:
    """[T, H] → [T, H]"""
    chosen = ops.route(mixer.router(x), mixer.routing)
    total = mixer.down.summed(mixer.up.gated(x, chosen, mixer.activation), chosen)
    if mixer.shared is None:
        return total
    shared = mixer.shared
    inner = shared.up.gated(x, shared.activation) if shared.gated else shared.up.activated(x, shared.activation)
    added = shared.down(inner)
    return total.add_(added) if mixer.shared_gate is None else ops.add_weighed(total, added, mixer.shared_gate(x))


def _add_given(sublayer: Sublayer, stream: Stream, given: Tensor) -> None:
    if sublayer.behind is not None:
        given = stream.ops.norm(given, sublayer.behind, None, None)
    stream.add(given if sublayer.factor == 1.0 else given.mul_(sublayer.factor))
