"""What the experts of a decoder are, whichever file described it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.errors import ModelError
from bequest.engine.types.scoring import Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Engine.layers.parts.Routing says what the fields of the choice mean."""

    num_experts: int  # of a layer
    top_k: int  # that a token takes
    intermediate_size: int  # of one expert
    layers: frozenset[int]  # that have experts; the others have one feed-forward layer for all tokens
    scoring: Scoring = "softmax"
    choice_bias: bool = False  # a tensor of the checkpoint: on scores while experts are chosen
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    renormalises: bool = False
    factor: float = 1.0
    shared_size: int = 0  # inner size of the one that all tokens take; 0: there is none
    shared_gate: bool = False  # a token decides what that one counts
    router_bias: bool = False
    bias: bool = False  # of the experts' matrices

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "intermediate_size", "num_groups", "top_groups"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} of experts must be positive, not {getattr(self, name)}")
        if self.num_experts % self.num_groups or self.group_best > self.num_experts // self.num_groups:
            raise ModelError(f"{self.num_experts} experts cannot form {self.num_groups} groups")
        if self.top_groups > self.num_groups:
            raise ModelError(f"a token cannot take {self.top_groups} of {self.num_groups} groups of experts")
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ModelError(f"a token cannot take {self.top_k} of the {self.num_experts} experts")
        if self.shared_size < 0 or self.factor <= 0:
            raise ModelError("the size of shared experts and the factor of experts must be positive")

    def num_idle(self, hidden_size: int) -> int:
        """Parameters of experts that a token does not take."""
        biases = 2 * self.intermediate_size + hidden_size if self.bias else 0
        of_one = 3 * self.intermediate_size * hidden_size + biases
        return len(self.layers) * (self.num_experts - self.top_k) * of_one
