"""What a mixer reads of the residual stream."""

from __future__ import annotations

from torch import Tensor

from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.layers.parts import Activation, Norm
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight


class Rows:
    """What a mixer reads: x [T, H]."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def product(self, weight: Weight) -> Tensor:
        return weight(self.x)

    def gated(self, weight: Weight, activation: Activation) -> Tensor:
        return weight.gated(self.x, activation)

    def activated(self, weight: Weight, activation: Activation) -> Tensor:
        return weight.activated(self.x, activation)

    def rows(self) -> Tensor:
        return self.x

    def keep(self, rows: Tensor) -> Rows:
        return Rows(self.x[rows])


class NormedStream:
    """The same of the normed stream, for one product: a weight may take the norm in."""

    def __init__(self, stream: Stream, norm: Norm, tap: LayerTap | None) -> None:
        self._stream, self._norm, self._tap = stream, norm, tap

    def product(self, weight: Weight) -> Tensor:
        return weight.normed(self._stream, self._norm, self._tap)

    def gated(self, weight: Weight, activation: Activation) -> Tensor:
        return weight.normed_gated(self._stream, self._norm, activation, self._tap)

    def activated(self, weight: Weight, activation: Activation) -> Tensor:
        return weight.activated(self.rows(), activation)

    def rows(self) -> Tensor:
        """[T, H]"""
        return self._stream.normed(self._norm, self._tap)

    def keep(self, rows: Tensor) -> NormedStream:
        return self


Source = Rows | NormedStream


def source_of(before: Norm | None, stream: Stream, tap: LayerTap | None, *, is_shared: bool) -> Source:
    """The stream, or with a norm the normed stream, which `is_shared` by two mixers."""
    if before is None:
        return Rows(stream.state(tap))
    return Rows(stream.normed(before, tap)) if is_shared else NormedStream(stream, before, tap)
