"""Weights in codes on a GPU: what does not depend on the codes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from bequest.engine.kernels import cuda_chain
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Activation
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight


class RowsInCodes(Protocol):
    """A matrix [N, K] in codes."""

    @property
    def num_rows(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


Packed = TypeVar("Packed", bound=RowsInCodes)


class WeightInCodes(Weight, Generic[Packed]):
    """A few rows are multiplied in the chain, or by its kernel, where they fit into shared memory; more as its codes
    allow."""

    def __init__(self, packed: Packed, bias: Tensor | None, ops: Ops, scratch: Tensor, most_few: int) -> None:
        """scratch: of the chain; most_few: rows that its kernel takes"""
        self.packed, self.bias = packed, bias
        self.ops = ops
        self._scratch = scratch
        self._most_few = most_few

    @abstractmethod
    def product(self) -> cuda_chain.Product:
        """As the chain takes it."""

    @abstractmethod
    def _multiply_many(self, x: Tensor) -> Tensor:
        """[T, K] → [T, N] of any number of rows."""

    @property
    def out_features(self) -> int:
        return self.packed.num_rows

    @property
    def in_features(self) -> int:
        return self.packed.depth

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_few(x):
            return cuda_chain.linear(self._ordered(x), self.product(), self._scratch)
        return self._multiply_many(self._ordered(x))

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        raise AssertionError("tables stay in numbers")

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if self._is_few(x):
            return cuda_chain.gated_linear(self._ordered(x), self.product(), activation, self._scratch)
        return super().gated(x, activation)

    def add_to(self, stream: Stream, x: Tensor) -> None:
        if self._is_few(x):
            cuda_chain.linear_into(self._ordered(x), self.product(), stream.state(), self._scratch)
        else:
            super().add_to(stream, x)

    def _is_few(self, x: Tensor) -> bool:
        return 0 < len(x) <= self._most_few

    def _ordered(self, x: Tensor) -> Tensor:
        """Its columns as those of the codes."""
        return x
