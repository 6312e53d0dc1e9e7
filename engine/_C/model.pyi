"""Layers on the CPU in one call: csrc/model, what these hold is in layer_stack.h."""

from collections.abc import Mapping, Sequence
from typing import Final

from .experts import ChosenExperts, PackedExperts, RoutingRule
from .ops import PackedMatrix
from .structs import KvSizes
from .tensors import AttentionPlan

class StackNorm:  # of all three, or of nothing
    def __init__(self, weight: int = ..., bias: int = ..., eps: float = ...) -> None: ...

class StackProduct:
    def __init__(self, weight: int, format: int, bias: int, out_features: int, in_features: int, site: int) -> None: ...

class StackHeads:
    num_heads: int
    scale: float
    cache_layer: int
    strip: int
    q_norm: int
    k_norm: int
    norms_rows: bool
    norm_eps: float
    cos_sin: int
    query_scales: int
    num_positions: int
    rotary_dim: int
    bias: int
    bias_reach: int
    soft_cap: float
    sinks: int
    value_scale: float
    key_factor: float
    value_factor: float

class StackAttention:
    def __init__(self, qkv: StackProduct, heads: StackHeads, output: StackProduct) -> None: ...

class StackCross:
    def __init__(self, q: StackProduct, heads: StackHeads, output: StackProduct) -> None: ...

class StackFeedForward:
    def __init__(self, up: StackProduct, activation: int, down: StackProduct, gated: bool) -> None: ...

class StackExperts:
    def __init__(
        self,
        router: StackProduct,
        routing: RoutingRule,
        up: PackedExperts,
        activation: int,
        down: PackedExperts,
        shared: tuple[StackFeedForward, StackProduct | None] | None,
    ) -> None: ...

StackMixer = StackAttention | StackCross | StackFeedForward | StackExperts

class StackSublayer:
    def __init__(
        self, mixer: StackMixer, norms: tuple[StackNorm, StackNorm, StackNorm], factor: float, beside: bool
    ) -> None: ...

class Adapter:  # parts are a, b, rank, inputs, first column, columns, scale
    def __init__(self, sites: Mapping[int, Sequence[tuple[int, int, int, int, int, int, float]]]) -> None: ...

class StepAdapters:
    def __init__(self, groups: Sequence[tuple[Adapter, Sequence[int]]]) -> None: ...
    def rows_at(self, site: int) -> list[int]: ...
    def is_among(self, first_up: int, first_down: int) -> bool: ...
    def experts(
        self,
        up_and_down: tuple[PackedExperts, PackedExperts],
        chosen: ChosenExperts,
        x: int,
        activation: int,
        out: int,
    ) -> None: ...
    def add(self, site: int, x: int, in_features: int, y: int, out_features: int) -> None: ...
    def add_rows(self, site: int, ids: int, y: int, out_features: int) -> None: ...

class StackStep:
    num_tokens: int
    positions: int
    def set_slots(self, slots: Sequence[int]) -> None: ...  # the address of each strip's
    def set_cache(self, kv_cache: int, kv_dtype: int, kv_sizes: KvSizes) -> None: ...
    # Of each strip.
    def set_plans(self, plans: Sequence[AttentionPlan], cross: AttentionPlan | None) -> None: ...
    def set_read(self, rows: int, num_rows: int, attention: AttentionPlan) -> None: ...
    def set_tap(self, tap: tuple[int, int, int, int]) -> None: ...
    def set_adapters(self, adapters: StepAdapters) -> None: ...

class StackStream:
    def __init__(self, sum: int, added: int, pending: bool, num_rows: int) -> None: ...
    pending: Final[bool]
    num_rows: Final[int]
    num_experts_read: Final[int]

class StackEmbedding:
    def __init__(self, ids: int, table: PackedMatrix, factor: float, rows: int, num_positions: int) -> None: ...

class LayerStack:
    def __init__(self, hidden: int, narrows: bool) -> None: ...
    def add(self, index: int, sublayers: Sequence[StackSublayer]) -> None: ...
    def run(self, step: StackStep, stream: StackStream, embedding: StackEmbedding | None) -> None: ...

def linear_into_cache(x: int, product: StackProduct, out: int, layer: int, step: StackStep) -> None: ...
