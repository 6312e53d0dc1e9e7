"""What the experts of a decoder are, whichever file described it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bequest.engine.errors import ModelError
from bequest.engine.types.scoring import Scoring


class WrongExperts(ModelError):
    """Of a number that cannot be."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self._field, self._why = field, why

    def named(self, source: str, names: Mapping[str, str]) -> ModelError:
        """`names`: what the file calls our fields."""
        return ModelError(f"{source}: {names.get(self._field, self._field)} {self._why}")


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
                raise WrongExperts(name, f"must be positive, not {getattr(self, name)}")
        if self.num_experts % self.num_groups or self.group_best > self.num_experts // self.num_groups:
            raise WrongExperts(
                "num_groups", f"= {self.num_groups}: {self.num_experts} experts cannot form so many groups"
            )
        if self.top_groups > self.num_groups:
            raise WrongExperts("top_groups", f"= {self.top_groups}: there are {self.num_groups} groups of experts")
        most = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > most:
            of_groups = "" if self.num_groups == 1 else f" of {self.top_groups} groups"
            raise WrongExperts("top_k", f"= {self.top_k}: a token can take {most} experts{of_groups} at most")
        if self.shared_size < 0:
            raise WrongExperts("shared_size", "must not be negative")
        if self.factor <= 0:
            raise WrongExperts("factor", f"must be positive, not {self.factor}")

    def num_idle(self, hidden_size: int) -> int:
        """Parameters of experts that a token does not take."""
        biases = 2 * self.intermediate_size + hidden_size if self.bias else 0
        of_one = 3 * self.intermediate_size * hidden_size + biases
        return len(self.layers) * (self.num_experts - self.top_k) * of_one
