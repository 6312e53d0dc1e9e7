"""The residual stream that layers read and add to."""

from __future__ import annotations

from torch import Tensor

from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.kernels.weighed_rows import WeighedRows
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Norm


class Stream:
    """A sum [T, H], and what the last sublayer adds to it: a norm adds it on its way, which saves a pass."""

    __slots__ = ("_left", "added", "ahead", "inputs", "ops", "total")

    def __init__(self, ops: Ops, total: Tensor, added: Tensor | None = None, inputs: Tensor | None = None) -> None:
        self.ops = ops
        self.total = total  # [T, H]; changed in place
        self.added = added  # [T, H], or None: the sum has it
        self.inputs = inputs  # [T, L, P]: what layers get of each token beside the stream; None: nothing
        # The norm that a product reads the stream through when the sublayer has added to it, if that is known.
        self.ahead: Norm | None = None
        self._left: tuple[Norm, WeighedRows] | None = None

    def state(self, tap: LayerTap | None = None) -> Tensor:
        """[T, H]: what the layers so far have made."""
        self._left = None  # the caller may change it
        if self.added is not None:
            self.total.add_(self.added)
            self.added = None
        if tap is not None:
            self.ops.tap(self.total, tap)
        return self.total

    def add(self, x: Tensor) -> None:
        """x [T, H], which is the stream's from now on."""
        self.state()
        self.added = x

    def normed(self, norm: Norm, tap: LayerTap | None = None) -> Tensor:
        """[T, H]; the stream stays as it is. The tap sees the state, or with `of_output` the result."""
        added = self.take_added()
        if added is None:
            return self.ops.norm(self.total, norm, None, tap)
        return self.ops.norm(added, norm, self.total, tap)

    def leave(self, rows: WeighedRows | None) -> None:
        """What an addition has left for the norm ahead."""
        self._left = None if rows is None or self.ahead is None else (self.ahead, rows)

    def left_for(self, norm: Norm) -> WeighedRows | None:
        """What the last addition has left for this norm: a product may take that for its x."""
        return self._left[1] if self._left is not None and self._left[0] is norm else None

    def take_added(self) -> Tensor | None:
        """What is still to be added: the caller adds it to the total."""
        added, self.added = self.added, None
        return added

    def become_normed(self, norm: Norm, tap: LayerTap | None = None) -> None:
        """The stream is its normed state from here on."""
        self.total = self.normed(norm, tap)
        self._left = None

    def scale(self, factor: float) -> None:
        """The stream is so many times its state from here on."""
        self.state().mul_(factor)

    def keep(self, rows: Tensor) -> None:
        """Goes on with some of its rows: [R] int64."""
        self.total = self.state()[rows]
        self.inputs = None if self.inputs is None else self.inputs[rows]

    def narrow(self, rows: Tensor) -> None:
        """Keeps the rows [R] int64, unless it has no others any more."""
        if len(rows) < len(self.total):
            self.keep(rows)
