"""Layers that are ready to run, and who makes them: a part of a stack goes to the first compiler that takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol

from torch import Tensor

from bequest.engine.layers.ops import Ops
from bequest.engine.layers.plain import PlainProgram
from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.start import FixedOverlay, Overlay, StartRows
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.stream import Stream


class Program(Protocol):
    """Some consecutive layers of a stack."""

    def run(self, stream: Stream, step: LayerStep) -> None:
        """All of its layers, one after another. With `step.read` the layer that ends a stack may drop the other rows
        (engine.layers.plain.narrows): the stream then has these alone."""
        ...

    def run_from(self, start: StartRows, step: LayerStep) -> Stream:
        """The same over a stream that begins here."""
        ...


class Compiler(Protocol):
    """A faster way than kernel by kernel, for the layers that it takes."""

    @property
    def name(self) -> str: ...

    def refusal(self, layer: LayerSpec) -> str | None:
        """Why it cannot take a layer; None: it can."""
        ...

    def compile(self, layers: Sequence[LayerSpec], *, ends: bool) -> Program:
        """`ends`: no other layers follow. REQUIRES: there is no refusal of any of them"""
        ...


class Stack:
    """All layers of an encoder or a decoder."""

    def __init__(
        self, layers: Sequence[LayerSpec], programs: Sequence[Program], ops: Ops, notes: Sequence[str]
    ) -> None:
        self.layers = tuple(layers)
        self.notes = tuple(notes)  # which layers run kernel by kernel, and why
        self._programs = programs
        self._plain = PlainProgram(layers, ops, ends=True)

    def run(self, stream: Stream, step: LayerStep) -> None:
        for program in self._programs:
            program.run(stream, step)

    def run_from(self, start: StartRows, step: LayerStep) -> Stream:
        overlay = start.overlay
        if overlay is not None and (overlay.deep or overlay.together is not None):
            return self._run_overlaid(start, overlay, step)
        stream = self._programs[0].run_from(start, step)
        for program in self._programs[1:]:
            program.run(stream, step)
        return stream

    def _run_overlaid(self, start: StartRows, overlay: Overlay | FixedOverlay, step: LayerStep) -> Stream:
        """Kernel by kernel: something is added to some rows between layers, or some see what others do not."""
        stream = start.stream(self._plain.ops)
        if overlay.together is not None:
            step = replace(step, together=overlay.together, read=None)  # the stream is narrowed when it has ended
        for layer in self.layers:
            self._plain.run_layer(layer, stream, step)
            if layer.index < len(overlay.deep):
                overlay.deepen(stream.state(), layer.index)
        return stream

    def run_watched(self, stream: Stream, step: LayerStep, watch: Callable[[int, Tensor], None]) -> None:
        """Kernel by kernel; `watch` is called with the number of a layer and the state [T, H] that it begins with. The
        state is valid during the call."""
        for layer in self.layers:
            watch(layer.index, stream.state())
            self._plain.run_layer(layer, stream, step)


def compile_layers(layers: Sequence[LayerSpec], ops: Ops, compilers: Sequence[Compiler]) -> Stack:
    """Each part of the layers by the first of the compilers that takes it; what none takes runs kernel by kernel."""
    chosen = [_choose(layer, compilers) for layer in layers]
    programs: list[Program] = []
    notes = []
    begin = 0
    for (compiler, refusals), group in groupby(chosen):
        part = layers[begin : begin + len(list(group))]
        begin += len(part)
        ends = begin == len(layers)
        if compiler is None:
            programs.append(PlainProgram(part, ops, ends=ends))
            notes.append(f"{_numbers(part)} kernel by kernel ({refusals})")
        else:
            programs.append(compiler.compile(part, ends=ends))
    return Stack(layers, programs, ops, notes)


def _choose(layer: LayerSpec, compilers: Sequence[Compiler]) -> tuple[Compiler | None, str]:
    """The compiler of a layer, or none and what each had against it."""
    refusals = []
    for compiler in compilers:
        refusal = compiler.refusal(layer)
        if refusal is None:
            return compiler, ""
        refusals.append(f"{compiler.name}: {refusal}")
    return None, "; ".join(refusals)


def _numbers(layers: Sequence[LayerSpec]) -> str:
    first, last = layers[0].index, layers[-1].index
    return f"layer {first}" if first == last else f"layers {first} to {last}"
