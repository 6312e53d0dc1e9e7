"""A layer as data: which norms stand where, what mixes tokens or features, with which weights.

A layer is a row of sublayers over a residual stream [T, H]. A sublayer reads the stream (through its norm `before`),
makes something of it, and adds that (through its norm `behind`, times a factor) to the stream (which its norm `after`
may norm again).
A family fills these in (engine.models.families); a backend compiles them (engine.layers.program).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from bequest.engine.kernels.kv_format import UNSCALED
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.parts import Activation, DeltaRule, Heads, Norm, Routing
from bequest.engine.layers.ranks import SOLO, Ranks
from bequest.engine.layers.weight import Weight


@dataclass(frozen=True, slots=True)
class Attention:
    """Of the tokens of a sequence, or of an encoder's input, to each other."""

    qkv: Weight  # [(NQ + 2 NKV) D, H]
    heads: Heads
    output: Weight  # [H, NQ D]
    gate: Weight | None = None  # [NQ D, H]: what queries gather is multiplied by the logistic function of it
    keys_are_values: bool = False  # `qkv` is without values: those are the keys, before they are normed and turned

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.qkv, self.output) if self.gate is None else (self.qkv, self.gate, self.output)

    @property
    def is_own(self) -> bool:
        """Whether its queries, keys and values are three products of what it reads, and it stores the latter two."""
        return self.heads.stores and not self.keys_are_values


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Of a decoder's tokens to the states of an encoder, whose keys and values are in the cache already."""

    q: Weight  # [NQ D, H]
    kv: Weight  # [2 NQ D, H], of the states
    heads: Heads
    output: Weight  # [H, NQ D]

    def __post_init__(self) -> None:
        assert self.heads.kv_scales == UNSCALED, "what `kv` stores is not scaled"

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.q, self.kv, self.output)


@dataclass(frozen=True, slots=True)
class FeedForward:
    up: Weight  # [I, H], or gate and up [2 I, H]
    activation: Activation
    down: Weight  # [H, I]
    gated: bool

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.up, self.down)


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated feed-forward layers of which each token takes a few, and perhaps one that all tokens take."""

    router: Weight  # [E, H]
    routing: Routing
    up: ExpertWeights  # gate and up, [E, 2 I, H]
    activation: Activation
    down: ExpertWeights  # [E, H, I]
    shared: FeedForward | None = None
    shared_gate: Weight | None = None  # [1, H]: its sigmoid is what the shared one counts; None: it counts whole
    router_norm: Norm | None = None  # of the stream, which the router reads; None: it reads what the experts read

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Those that all tokens take."""
        shared = () if self.shared is None else self.shared.weights
        return (self.router, *shared, *(() if self.shared_gate is None else (self.shared_gate,)))


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Of a token and all before it, of which a state of fixed size is left."""

    rows: Weight  # [C + HV DV + 2 HV, H]: queries, keys and values; z; b, a
    rule: DeltaRule
    output: Weight  # [H, HV DV]

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.rows, self.output)


@dataclass(frozen=True, slots=True)
class Branch:
    mixer: FeedForward | Experts
    before: Norm
    behind: Norm


@dataclass(frozen=True, slots=True)
class Branches:
    """Mixers that read the stream side by side, each through norms of its own; what they give is added up."""

    parts: tuple[Branch, ...]

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(weight for part in self.parts for weight in part.mixer.weights)


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Of what the layer gets of each token beside the stream (engine.layers.start.TokenInputs): the activation of a
    product decides what of it counts."""

    gate: Weight  # [P, H]
    activation: Activation
    output: Weight  # [H, P]
    layer: int  # whose part it is

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.gate, self.output)


Mixer = Attention | CrossAttention | DeltaNet | FeedForward | Experts | Branches | TokenInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    mixer: Mixer
    before: Norm | None = None  # of what the mixer reads; the stream stays as it is
    behind: Norm | None = None  # of what the mixer gives, before it is added
    after: Norm | None = None  # of the stream, when it has been added: this is then the stream
    factor: float = 1.0  # of what is added
    ranks: Ranks = SOLO  # whose mixers each give a part: their sum is what this one gives
    beside: bool = False  # reads what the sublayer before it read


@dataclass(frozen=True, slots=True)
class LayerSpec:
    index: int  # in its stack; hidden state i is what layer i begins with
    sublayers: tuple[Sublayer, ...]
    factor: float = 1.0  # of the stream, when all has been added

    def __post_init__(self) -> None:
        assert not self.sublayers[0].beside, "the first sublayer has none before it"
        for first, second in pairwise(self.sublayers):
            shares = first.before is not None and first.behind is first.after is second.before is None
            assert shares or not second.beside, "two sublayers that read the same have one norm, before the first"
        assert self.factor == 1.0 or not self.ends_normed, "a norm at the end takes a factor back"

    @property
    def is_shared_out(self) -> bool:
        """Whether some of its sums are over several ranks."""
        return any(sublayer.ranks.size > 1 for sublayer in self.sublayers)

    @property
    def ends_normed(self) -> bool:
        """Whether a norm at its end sees the state between it and the next one; else it is seen where that begins."""
        return self.sublayers[-1].after is not None

    @property
    def weights(self) -> Iterator[Weight]:
        for sublayer in self.sublayers:
            yield from sublayer.mixer.weights

    @property
    def experts(self) -> Iterator[Experts]:
        for sublayer in self.sublayers:
            mixer = sublayer.mixer
            parts = [part.mixer for part in mixer.parts] if isinstance(mixer, Branches) else [mixer]
            yield from (part for part in parts if isinstance(part, Experts))
