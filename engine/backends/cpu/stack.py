"""Layers in one call: between small kernels the interpreter would take a quarter of a step."""

from __future__ import annotations

from collections.abc import Sequence

from bequest.engine.backends.cpu.experts import CpuExperts
from bequest.engine.backends.cpu.ops import lora_rows_of, plan_of, rule_of
from bequest.engine.backends.cpu.weights import CpuRows, CpuWeight
from bequest.engine.kernels import cpu_stack
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Heads, Norm
from bequest.engine.layers.plain import narrows
from bequest.engine.layers.spec import (
    Attention,
    Branches,
    CrossAttention,
    DeltaNet,
    Experts,
    FeedForward,
    LayerSpec,
    Mixer,
    Sublayer,
    TokenInput,
)
from bequest.engine.layers.start import StartRows
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight


class StackCompiler:
    """A Compiler."""

    name = "in one call"

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def refusal(self, layer: LayerSpec) -> str | None:
        others = {type(weight).__name__ for weight in layer.weights if type(weight) is not CpuWeight}
        if others:
            return f"a weight is a {', '.join(sorted(others))}"
        if layer.is_shared_out:
            return "a sum over ranks"
        mixers = [sublayer.mixer for sublayer in layer.sublayers]
        if any(isinstance(mixer, DeltaNet) for mixer in mixers):
            return "a recurrent layer"
        if any(isinstance(mixer, Attention) and mixer.gate is not None for mixer in mixers):
            return "an attention with a gate"
        attentions = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        if any(_is_centred(mixer.heads) for mixer in attentions):
            return "heads with a layer norm"
        if any(not mixer.is_own for mixer in attentions):
            return "keys or values that are others'"
        if any(mixer.heads.norm is not None and mixer.heads.norm.v_weight is not None for mixer in attentions):
            return "values with a norm"
        if layer.factor != 1.0 or any(isinstance(mixer, Branches | TokenInput) for mixer in mixers):
            return "a factor of the stream, branches or what is of tokens"
        if any(experts.router_norm is not None or experts.routing.scales is not None for experts in layer.experts):
            return "experts whose router has a norm or scales"
        return None

    def compile(self, layers: Sequence[LayerSpec], *, ends: bool) -> StackProgram:
        return StackProgram(layers, self._ops, ends=ends)


def _is_centred(heads: Heads) -> bool:
    return heads.norm is not None and heads.norm.centred


class StackProgram:
    """A Program."""

    def __init__(self, layers: Sequence[LayerSpec], ops: Ops, *, ends: bool) -> None:
        self._layers = layers  # the stack has addresses of what they hold
        self._ops = ops
        self._hidden = next(iter(layers[0].weights)).in_features
        self._narrows = ends and narrows(layers[-1])
        self._stack = cpu_stack.LayerStack(self._hidden, narrows=self._narrows)
        for layer in layers:
            self._stack.add(layer.index, [self._sublayer(sublayer) for sublayer in layer.sublayers])

    def run(self, stream: Stream, step: LayerStep) -> None:
        stream.total, stream.added = self._stack.run(
            self._step(step), stream.total, stream.added, self._ops.experts_read
        )

    def run_from(self, start: StartRows, step: LayerStep) -> Stream:
        table, positions = start.table, start.position_table
        # A weight with something of its own, as an adapter has, looks its rows up itself; so do tokens of images.
        alone = start.overlay is None and start.inputs is None
        fused = alone and (positions is None or type(positions) is CpuRows)
        if type(table) is not CpuWeight or not fused:
            stream = start.stream(self._ops)
            self.run(stream, step)
            return stream
        assert start.last_tokens is None, "on the CPU the runner resolves them"
        rows = positions.values if type(positions) is CpuRows else None
        embedding = cpu_stack.embedding(start.ids, table.packed, start.factor, rows)
        return Stream(self._ops, *self._stack.run_from(self._step(step), embedding, self._ops.experts_read))

    def _step(self, step: LayerStep) -> cpu_stack.StackStep:
        plans = [plan_of(work) for work in step.attention]
        cross = None if step.cross is None else plan_of(step.cross)
        made = cpu_stack.step(step.slot_mapping, step.kv_cache, plans, cross)
        cpu_stack.set_positions(made, step.positions)
        if self._narrows and step.read is not None:
            assert step.read.attention is not None
            cpu_stack.set_read(made, step.read.rows, plan_of(step.read.attention))
        if step.tap is not None:
            cpu_stack.set_tap(made, step.tap, self._hidden)
        if step.adapters is not None:
            cpu_stack.set_adapters(made, lora_rows_of(step.adapters))
        return made

    def _sublayer(self, sublayer: Sublayer) -> cpu_stack.StackSublayer:
        norms = (_norm(sublayer.before), _norm(sublayer.behind), _norm(sublayer.after))
        return cpu_stack.StackSublayer(self._mixer(sublayer.mixer), norms, sublayer.factor, sublayer.beside)

    def _mixer(self, mixer: Mixer) -> cpu_stack.StackMixer:
        match mixer:
            case Attention(qkv, heads, output, None):
                return cpu_stack.StackAttention(_product(qkv), self._heads(heads), _product(output))
            case CrossAttention(q, _, heads, output):
                return cpu_stack.StackCross(_product(q), self._heads(heads, is_cross=True), _product(output))
            case FeedForward():
                return _feed_forward(mixer)
            case Experts():
                return _experts(mixer)
            case _:
                raise AssertionError(f"refused: {mixer}")

    def _heads(self, heads: Heads, *, is_cross: bool = False) -> cpu_stack.StackHeads:
        strip = 0 if is_cross else heads.strip
        made = cpu_stack.heads(heads.num_heads, heads.scale, heads.cache_layer, strip, heads.kv_scales)
        made.soft_cap = heads.soft_cap
        if (norm := heads.norm) is not None:
            assert norm.offset == 0.0, "the backend adds it when it loads a weight"
            assert norm.k_weight is not None, "refused: keys that are others'"
            cpu_stack.set_head_norms(made, norm.q_weight, norm.k_weight, norm.eps, over_rows=norm.over_rows)
        if heads.rope is not None:
            cpu_stack.set_rope(made, heads.rope)
        if heads.query_scales is not None:
            cpu_stack.set_query_scales(made, heads.query_scales)
        if heads.bias is not None:
            cpu_stack.set_bias(made, heads.bias)
        if heads.sinks is not None:
            cpu_stack.set_sinks(made, heads.sinks)
        return made


def _norm(norm: Norm | None) -> cpu_stack.StackNorm:
    if norm is None:
        return cpu_stack.StackNorm()
    assert norm.offset == 0.0, "the backend adds it when it loads a weight"
    return cpu_stack.norm(norm.weight, norm.bias, norm.eps)


def _feed_forward(mixer: FeedForward) -> cpu_stack.StackFeedForward:
    activation = ACTIVATION_CODES[mixer.activation]
    return cpu_stack.StackFeedForward(_product(mixer.up), activation, _product(mixer.down), mixer.gated)


def _experts(mixer: Experts) -> cpu_stack.StackExperts:
    up, down, shared = mixer.up, mixer.down, mixer.shared
    assert isinstance(up, CpuExperts) and isinstance(down, CpuExperts)
    gate = None if mixer.shared_gate is None else _product(mixer.shared_gate)
    return cpu_stack.experts(
        _product(mixer.router),
        rule_of(mixer.routing),
        up.packed,
        mixer.activation,
        down.packed,
        None if shared is None else (_feed_forward(shared), gate),
    )


def _product(weight: Weight) -> cpu_stack.StackProduct:
    assert isinstance(weight, CpuWeight)
    return cpu_stack.product(weight.packed, weight.bias, weight.site)
