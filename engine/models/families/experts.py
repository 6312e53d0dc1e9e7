"""Experts in place of a feed-forward layer, as Qwen's checkpoints name their tensors (expert_names.py has others)."""

from __future__ import annotations

from bequest.engine.layers.parts import Routing
from bequest.engine.layers.spec import Experts, FeedForward
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.experts_config import ExpertsConfig
from bequest.engine.models.reader import Reader


def describe_experts(config: DecoderConfig, experts: ExpertsConfig, at: Reader) -> Experts:
    hidden, inner, each = config.hidden_size, experts.intermediate_size, at.under("experts.")
    return Experts(
        at.weight("gate", experts.num_experts, hidden, has_bias=experts.router_bias),
        _routing(experts, at),
        each.experts(["gate_proj", "up_proj"], [inner, inner], hidden, experts.num_experts, has_bias=experts.bias),
        config.activation,
        each.experts(["down_proj"], [hidden], inner, experts.num_experts, has_bias=experts.bias),
        _shared(config, experts.shared_size, at.under("shared_expert.")) if experts.shared_size else None,
        at.weight("shared_expert_gate", 1, hidden) if experts.shared_size and experts.shared_gate else None,
    )


def _routing(experts: ExpertsConfig, at: Reader) -> Routing:
    bias = at.tensor("gate.e_score_correction_bias", (experts.num_experts,)) if experts.choice_bias else None
    return Routing(
        top_k=experts.top_k,
        scoring=experts.scoring,
        bias=None if bias is None else at.placed(bias),
        num_groups=experts.num_groups,
        top_groups=experts.top_groups,
        group_best=experts.group_best,
        renormalises=experts.renormalises,
        factor=experts.factor,
    )


def _shared(config: DecoderConfig, inner: int, at: Reader) -> FeedForward:
    up = at.stacked(["gate_proj", "up_proj"], [inner, inner], config.hidden_size, [False, False])
    return FeedForward(up, config.activation, at.weight("down_proj", config.hidden_size, inner), gated=True)
