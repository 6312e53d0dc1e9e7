"""A weight is more than a tensor: a matrix in some format with its bias, and what can be fused with its product.

A backend has a subclass for each format that it multiplies. Only the product itself must be there. The methods behind
it fuse what stands around a product: a format that can do better overrides them, and one that cannot (codes that a
kernel does not read in that place, an adapter whose delta comes in between) declines by leaving them alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Activation, Heads, Norm
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.stream import Stream


class Stored(ABC):
    """What takes memory on a device."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @property
    @abstractmethod
    def format(self) -> str:
        """What its values are kept in, for people."""


class Table(Stored):
    """Rows [N, K] by number."""

    @abstractmethod
    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        """[T] int32 → [T, K]; -(row + 1) is the last token of sampler row `row` where `last_tokens` is given."""


class Weight(Table):
    """y = x Wᵀ + b with W [N, K]. Matrices of a checkpoint that read the same x are one here, stacked along N."""

    ops: Ops
    site: int | None = None  # the number that adapters know it by; None: no adapter can add to it

    @property
    @abstractmethod
    def out_features(self) -> int: ...

    @property
    @abstractmethod
    def in_features(self) -> int: ...

    @abstractmethod
    def with_bias(self, bias: Tensor) -> Weight:
        """The same matrix, in the same memory, with this bias [N]."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] → [T, N]"""

    def activated(self, x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        """[T, K] → [T, N]: the activation of the product. Rows of x may overlap; `out` may be where it goes."""
        result = self.ops.activate(self(x.contiguous()), activation)
        return result if out is None else out.copy_(result)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """[T, K] → [T, N / 2]: the activation of the product's first half times its second one."""
        return self.ops.gated_activation(self(x), activation)

    def normed(self, stream: Stream, norm: Norm, tap: LayerTap | None = None) -> Tensor:
        """The product of the normed stream, [T, N]. The tap sees the stream."""
        return self(stream.normed(norm, tap))

    def normed_gated(self, stream: Stream, norm: Norm, activation: Activation, tap: LayerTap | None = None) -> Tensor:
        """The same of `gated`, [T, N / 2]."""
        return self.gated(stream.normed(norm, tap), activation)

    def add_to(self, stream: Stream, x: Tensor) -> None:
        """The stream [T, N] gets the product of x [T, K]."""
        stream.add(self(x))

    def attend_to(self, stream: Stream, qkv: Tensor, heads: Heads, step: LayerStep) -> None:
        """The stream [T, N] gets the product of what queries gather (`Ops.attend`)."""
        self.add_to(stream, self.ops.attend(qkv, heads, step))

    def can_add(self, x: Tensor) -> bool:
        """Whether `add_product` takes no longer than the product of x [T, K] alone."""
        return False

    def add_product(self, x: Tensor, y: Tensor) -> None:
        """y [T, N] gets the product of x [T, K]. REQUIRES: can_add"""
        raise NotImplementedError

    def store(self, states: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
        """The product of states [E, K] is keys and values, [E, 2 NKV D]: to slots [E] int64 of the cache."""
        heads = self(states).view(states.shape[0], 2 * kv_cache.shape[3], -1)  # [E, 2 NKV, D]
        keys, values = heads.chunk(2, dim=1)
        self.ops.write_kv(keys, values, kv_cache, layer, slots)
