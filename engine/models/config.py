"""What a decoder-only model is made of, whichever file described it (hf_config.py, gguf_config.py).

No torch here: a start checks its model's config before it waits for torch (look.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from bequest.engine.errors import ModelError
from bequest.engine.models.experts_config import ExpertsConfig
from bequest.engine.models.gemma4_config import Gemma4Config
from bequest.engine.models.quantised.described import Quantisation
from bequest.engine.models.strips import KvHeads, Place, Strips, divide
from bequest.engine.models.style import LLAMA, LayerStyle
from bequest.engine.models.towers.config import VisionConfig
from bequest.engine.types.activation import Activation as Activation
from bequest.engine.types.recurrent import DeltaSizes

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")

# Spellings of config.json.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields after `partial_factor` mean something for the named kinds only."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    partial_factor: float = 1.0  # the rotated share of a head; proportional: of its pairs, which lie half a head apart
    factor: float = 1.0  # linear, dynamic, llama3, yarn, proportional: how much longer than in training
    original_max_position: int = 0  # llama3, yarn, longrope: context length in training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    # With a length in training: a query is multiplied by 1 + growth * log(1 + floor(its position / that length)).
    query_growth: float = 0.0
    short_divisors: tuple[float, ...] = ()  # longrope: [rot_dim / 2] of frequencies, up to the length in training
    long_divisors: tuple[float, ...] = ()  # longrope: [rot_dim / 2], where longer sequences are served
    frequency_divisors: tuple[float, ...] = ()  # [rot_dim / 2], how GGUF stores llama3 scaling; empty: none

    def turned(self, head_dim: int) -> int:
        """Dimensions of a head that positions turn."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_factor)


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Layers that keep a state of fixed size in place of keys and values."""

    sizes: DeltaSizes
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of rotary attention and gated MLPs."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int  # the longest sequence it can be asked for
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int, ...]  # [L]: how many tokens back a layer sees, itself included; 0: all
    activation: Activation = "silu"
    attention_bias: bool = False  # on the projections of Q, K and V
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    style: LayerStyle = LLAMA
    window_rope: RopeConfig | None = None  # of layers with a window; None: as the others
    attention_cap: float = 0.0  # c: scores become c * tanh(score / c); 0: they stay
    logits_cap: float = 0.0  # the same of logits
    tie_word_embeddings: bool = False
    embedding_factor: float = 1.0  # of what the layers begin with
    rounds_embedding_factor: bool = False  # to the dtype of the weights
    residual_factor: float = 1.0  # of what a sublayer adds
    logits_divisor: float = 1.0
    score_scale: float | None = None  # of attention; None: by the size of a head
    sinks: bool = False  # a score per head that takes its share of an attention and gives nothing
    experts: ExpertsConfig | None = None  # in place of some layers' MLP; None: no layer has any
    unrotated_layers: frozenset[int] = frozenset()  # whose attention knows no positions
    attention_gate: bool = False  # what an attention gathers is multiplied by a gate
    recurrent: RecurrentConfig | None = None  # None: every layer has an attention
    quantisation: Quantisation | None = None  # how matrices are stored in codes; None: in numbers
    vision: VisionConfig | None = None  # of a model that sees
    head_padding: int = 0  # zeros at the end of each head, counted in head_dim (padding.py)
    gemma4: Gemma4Config | None = None  # of Gemma 4 alone

    def __post_init__(self) -> None:
        self._check_sizes()
        pairs = self.rotary_dim // 2
        for name in ("short_divisors", "long_divisors"):
            given = len(getattr(self.rope, name))
            if self.rope.kind == "longrope" and given != pairs:
                raise ModelError(f"{self.architecture}: rope {name} are {given} numbers, not {pairs}")
        for name in ("embedding_factor", "residual_factor", "logits_divisor", "attention_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelError(f"{self.architecture}: {name} must be a positive number, not {getattr(self, name)}")
        for name in ("attention_cap", "logits_cap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ModelError(f"{self.architecture}: {name} must not be negative, but is {getattr(self, name)}")

    def _check_sizes(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        for name in (*sizes, "vocab_size", "max_position"):
            if getattr(self, name) < 1:
                raise ModelError(f"{self.architecture}: {name} must be positive, not {getattr(self, name)}")
        if len(self.sliding_windows) != self.num_layers:
            raise ModelError(
                f"{self.architecture}: {len(self.sliding_windows)} layer types for {self.num_layers} layers"
            )
        for layer in range(self.num_layers):
            heads, turned = self.heads_of(layer), self.rotary_dim_of(layer)
            if self.num_heads % heads.count:
                shared = f"{self.num_heads} query heads cannot share {heads.count} KV heads evenly"
                raise ModelError(f"{self.architecture}: {shared}")
            if turned % 2 or not 0 < turned <= heads.size:
                raise ModelError(f"{self.architecture}: cannot rotate {turned} of {heads.size} dimensions of a head")
        if self.vision is not None and self.vision.num_deep >= self.num_layers:
            layers = f"{self.num_layers} layers are too few for rows of images behind {self.vision.num_deep} of them"
            raise ModelError(f"{self.architecture}: {layers}")
        if self.recurrent is not None and len(self.recurrent.layers) == self.num_layers:
            raise ModelError(f"{self.architecture}: at least one layer must have an attention")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope.turned(self.head_dim - self.head_padding)

    def heads_of(self, layer: int) -> KvHeads:
        """Of keys and values."""
        if self.gemma4 is not None and not self.sliding_windows[layer]:
            return self.gemma4.full_heads
        return KvHeads(self.num_kv_heads, self.head_dim)

    @property
    def keeps_by_layer(self) -> bool:
        """Whether layers may keep heads of other sizes than each other, or read what another keeps."""
        return self.gemma4 is not None

    @property
    def looks_tokens_up(self) -> bool:
        """Whether layers need the tokens themselves, beside what they begin with."""
        return self.gemma4 is not None and self.gemma4.input_size > 0

    def rope_of(self, layer: int) -> RopeConfig:
        return self.window_rope or self.rope if self.sliding_windows[layer] else self.rope

    def rotary_dim_of(self, layer: int) -> int:
        return self.rope_of(layer).turned(self.heads_of(layer).size - self.head_padding)

    def keys_of(self, layer: int) -> int:
        """The layer whose keys and values an attention reads: itself, or the last of its type that stores some."""
        num_own = self.num_layers - (0 if self.gemma4 is None else self.gemma4.num_shared)
        if layer < num_own:
            return layer
        window = self.sliding_windows[layer]
        return max(other for other in range(num_own) if self.sliding_windows[other] == window)

    @property
    def attention_scale(self) -> float:
        if self.score_scale is not None:
            return self.score_scale
        return float((self.head_dim - self.head_padding) ** -0.5)

    @property
    def head_norm_eps(self) -> float:
        """Of the norms of query and key heads."""
        return self.rms_norm_eps * (self.head_dim - self.head_padding) / self.head_dim

    @property
    def strips(self) -> Strips:
        """How the layers share the blocks of the cache: one attention plan for each strip."""
        recurrent = () if self.recurrent is None else self.recurrent.layers
        attentions = [layer for layer in range(self.num_layers) if layer not in recurrent]
        own = [layer for layer in attentions if self.keys_of(layer) == layer]
        strips = divide([self.sliding_windows[layer] for layer in own], [self.heads_of(layer) for layer in own])
        of_own = dict(zip(own, strips.places, strict=True))
        return replace(strips, places=tuple(of_own[self.keys_of(layer)] for layer in attentions))

    def place_of(self, layer: int) -> Place:
        """Where the cache has the keys and values of an attention."""
        return self.strips.places[layer - self.state_layer(layer)]

    def state_layer(self, layer: int) -> int:
        """Which of the states' layers a recurrent layer has: how many are before it."""
        return 0 if self.recurrent is None else sum(other < layer for other in self.recurrent.layers)

    @property
    def state_shape(self) -> tuple[int, int]:
        """[LR, E]: the state of a sequence in its recurrent layers; without any, nothing."""
        return (0, 0) if self.recurrent is None else (len(self.recurrent.layers), self.recurrent.sizes.state_size)

    def kv_shape(self, block_size: int) -> tuple[int, ...]:
        """[L, 2, NKV, BS, D]: one block of the cache, as the first strip sees it."""
        return self.strips.shapes(block_size)[0]


def parse_activation(name: str, source: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ModelError(f"{source}: activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def parse_rope_kind(name: str, source: str) -> RopeKind:
    if name not in ROPE_KINDS:
        raise ModelError(f"{source}: rope type {name!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    return name


def extended_max_position(max_position: int, rope: RopeConfig) -> int:
    """What rope scaling makes of a context length that may or may not count it already. Dynamic scaling would change
    the frequencies under the cached keys, so it ends where the unscaled model does."""
    if rope.kind == "linear":
        return int(max_position * rope.factor)
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position
