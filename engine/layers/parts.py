"""What layers are made of beside weights: activations, norms, the geometry of attention, the choice of experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bequest.engine.kernels.delta_net import DeltaRule as DeltaRule
from bequest.engine.kernels.kv_format import UNSCALED, KvScales
from bequest.engine.types.activation import Activation as Activation
from bequest.engine.types.scoring import Scoring


@dataclass(frozen=True, slots=True)
class Norm:
    """Of rows: by their root mean square, or, with a bias, less their mean and by their deviation."""

    weight: Tensor  # [H]
    eps: float
    bias: Tensor | None = None  # [H]
    offset: float = 0.0  # what kernels add to the weight, in float32, if there is no bias


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Of query and key heads, by their root mean square, or less their mean and by their deviation; perhaps of value
    heads."""

    q_weight: Tensor  # [D]
    k_weight: Tensor | None  # [D]; None: the layer stores no keys
    eps: float
    offset: float = 0.0  # as in Norm
    over_rows: bool = False  # of all heads of a token at once: the weights are [NQ D] and [NKV D]
    centred: bool = False  # less their mean: the weights are float32 [NQ, D] and [NKV, D], without an offset
    v_weight: Tensor | None = None  # [D]: value heads are normed so, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How queries meet keys."""

    num_heads: int  # of queries; the cache knows those of keys and their size
    scale: float  # of scores
    cache_layer: int  # where keys and values lie: which of the layers in a block
    strip: int = 0  # and which of the blocks that hold a token (engine/models/strips.py)
    window: int = 0  # how many tokens back a query sees, itself included; 0: all
    norm: HeadNorm | None = None
    rope: Tensor | None = None  # [P, R] float32: R / 2 cosines, then sines; None: positions turn nothing
    query_scales: Tensor | None = None  # [P] float32: what turned queries are multiplied by at their position
    bias: Tensor | None = None  # [NQ, 2 R + 1] float32 on the scores: by key position less query's, within [-R, R]
    soft_cap: float = 0.0  # c: scores become c * tanh(score / c); 0: they stay
    sinks: Tensor | None = None  # [NQ] float32: a score per head that takes its share of the softmax and gives nothing
    kv_scales: KvScales = UNSCALED  # of an fp8 cache
    stores: bool = True  # False: there are queries alone, over keys and values that another layer has stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which experts a token goes to, and what each counts there.

    A score is the softmax of a token's E logits, or the sigmoid of each. A token takes the experts of the `top_k` best
    scores, by rank; of two that are equal the smaller number comes first. NaN is worse than everything else.
    """

    top_k: int
    scoring: Scoring = "softmax"
    bias: Tensor | None = None  # [E] float32, on scores while experts are chosen; what they count is without it
    num_groups: int = 1  # of E / num_groups experts that follow each other
    top_groups: int = 1  # only experts of the best groups can be chosen
    group_best: int = 1  # so many of a group's best scores, with the bias, add up to the group's
    renormalises: bool = False  # what a token's experts count is divided by its sum
    factor: float = 1.0  # of what they count, at last
    scales: Tensor | None = None  # [E] float32: of what each counts

    def __post_init__(self) -> None:
        assert self.top_k >= 1 and 1 <= self.top_groups <= self.num_groups, self
        assert self.group_best in (1, 2), self


@dataclass(frozen=True, slots=True)
class Chosen:
    """The experts of T tokens, best first, on the device."""

    ids: Tensor  # [T, K] int32
    weights: Tensor  # [T, K] float32
