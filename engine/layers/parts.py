"""What layers are made of beside weights: activations, norms, the geometry of attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bequest.engine.kernels.kv_format import UNSCALED, KvScales
from bequest.engine.types.activation import Activation as Activation


@dataclass(frozen=True, slots=True)
class Norm:
    """Of rows: by their root mean square, or, with a bias, less their mean and by their deviation."""

    weight: Tensor  # [H]
    eps: float
    bias: Tensor | None = None  # [H]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Of query and key heads, by their root mean square."""

    q_weight: Tensor  # [D]
    k_weight: Tensor  # [D]
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How queries meet keys."""

    num_heads: int  # of queries; the cache knows those of keys and their size
    scale: float  # of scores
    cache_layer: int  # where keys and values lie
    window: int = 0  # how many tokens back a query sees, itself included; 0: all
    norm: HeadNorm | None = None
    rope: Tensor | None = None  # [P, R] float32: R / 2 cosines, then sines; None: positions turn nothing
    bias: Tensor | None = None  # [NQ, 2 R + 1] float32 on the scores: by key position less query's, within [-R, R]
    kv_scales: KvScales = UNSCALED  # of an fp8 cache
