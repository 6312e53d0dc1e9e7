"""What a product leaves for the norm that reads the stream next: who may leave something, who finds it, and that nobody
finds what is not of the stream any more. The weights here leave and take wherever they may, by the slowest means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.kernels.weighed_rows import SQUARED, WeighedRows
from bequest.engine.layers.parts import Activation, Norm
from bequest.engine.layers.plain import PlainProgram
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight
from tests.models.test_cpu_layers import HIDDEN, KINDS, LAYERS, Maker, Shape, World

pytestmark = pytest.mark.usefixtures("two_threads")


class LeavingWeight(Weight):
    """Around a weight of the CPU."""

    def __init__(self, inner: Weight, taken: list[Norm]) -> None:
        self._inner, self._taken, self.ops = inner, taken, inner.ops

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    @property
    def format(self) -> str:
        return self._inner.format

    @property
    def out_features(self) -> int:
        return self._inner.out_features

    @property
    def in_features(self) -> int:
        return self._inner.in_features

    def with_bias(self, bias: Tensor) -> Weight:
        return LeavingWeight(self._inner.with_bias(bias), self._taken)

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        return self._inner.rows(ids, last_tokens)

    def __call__(self, x: Tensor) -> Tensor:
        return self._inner(x)

    def add_to(self, stream: Stream, x: Tensor) -> None:
        norm, state = stream.ahead, stream.state()
        state.add_(self(x))
        if norm is None or norm.bias is not None:
            stream.leave(None)
            return
        squares = state.square().view(len(state), -1, SQUARED).sum(2)
        stream.leave(WeighedRows(state * (norm.weight + norm.offset), squares, state, norm.eps))

    def normed(self, stream: Stream, norm: Norm, tap: LayerTap | None = None) -> Tensor:
        found = self._found(stream, norm, tap)
        return super().normed(stream, norm, tap) if found is None else self(found)

    def normed_gated(self, stream: Stream, norm: Norm, activation: Activation, tap: LayerTap | None = None) -> Tensor:
        found = self._found(stream, norm, tap)
        return super().normed_gated(stream, norm, activation, tap) if found is None else self.gated(found, activation)

    def _found(self, stream: Stream, norm: Norm, tap: LayerTap | None) -> Tensor | None:
        left = stream.left_for(norm)
        if left is None:
            return None
        self._taken.append(norm)
        assert torch.equal(left.before, stream.total), "it is of the stream as it is"
        if tap is not None:
            self.ops.tap(left.before, tap)
        factor = torch.rsqrt(left.squares.sum(1, keepdim=True) / HIDDEN + left.eps)
        return left.rows * factor


class LeavingMaker(Maker):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.taken: list[Norm] = []

    def weight(self, n: int, k: int) -> Weight:
        return LeavingWeight(super().weight(n, k), self.taken)


def results_of(maker: Maker, num_tokens: int, num_read: int | None) -> tuple[Tensor, Tensor, Tensor]:
    program = PlainProgram([maker.layer(index) for index in range(LAYERS)], maker.backend.ops, ends=True)
    world = World(maker, num_tokens, num_read)
    stream = Stream(maker.backend.ops, maker.values(num_tokens, HIDDEN))
    return world.run(program, stream)


# Norms that find something: all but the first, of those in front of a product alone. Experts follow the first layer:
# what they add is no product's, and they read rows.
TAKEN = {"llama": 2 * LAYERS - 1, "qwen3": 2 * LAYERS - 1, "t5": 3 * LAYERS - 1, "gpt-oss": 2 * LAYERS - 1}
TAKEN |= {"experts": 2, "experts-gated": 2}


@pytest.mark.parametrize(("num_tokens", "num_read"), [(1, None), (9, None), (17, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_is_the_norms(kind: str, num_tokens: int, num_read: int | None) -> None:
    shape = replace(Shape(), **KINDS[kind])  # type: ignore[arg-type]
    maker = LeavingMaker(shape)
    found = results_of(maker, num_tokens, num_read)
    expected = results_of(Maker(shape), num_tokens, num_read)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-3, atol=1e-4)
    if num_read is None and kind in TAKEN:
        assert len(maker.taken) == TAKEN[kind]
    if not shape.rms or shape.place != "before" or shape.factor != 1.0 or shape.parallel:
        assert maker.taken == []


def test_whatever_touches_the_stream_forgets_what_was_left() -> None:
    maker = LeavingMaker(Shape())
    norm, other = maker.norm(), maker.norm()
    weight = maker.weight(HIDDEN, HIDDEN)
    touches: dict[str, Callable[[Stream], object]] = {
        "state": lambda stream: stream.state(),
        "add": lambda stream: stream.add(maker.values(4, HIDDEN)),
        "scale": lambda stream: stream.scale(2.0),
        "keep": lambda stream: stream.keep(torch.arange(2)),
        "norm": lambda stream: stream.become_normed(other),
    }
    for name, touch in touches.items():
        stream = Stream(maker.backend.ops, maker.values(4, HIDDEN))
        stream.ahead = norm
        weight.add_to(stream, maker.values(4, HIDDEN))
        assert stream.left_for(norm) is not None and stream.left_for(other) is None
        stream.normed(norm)
        assert stream.left_for(norm) is not None, "a norm leaves the stream as it is"
        touch(stream)
        assert stream.left_for(norm) is None, name
