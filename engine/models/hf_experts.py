"""What config.json of a Hugging Face checkpoint says of experts, with the defaults of the transformers library."""

from __future__ import annotations

from bequest.engine.errors import ModelError
from bequest.engine.models.experts_config import ExpertsConfig, WrongExperts
from bequest.engine.models.fields import Fields
from bequest.engine.models.registry import HFExperts

# One number by the names that configurations have for it.
COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
_NAMES = {
    "top_k": "num_experts_per_tok",
    "num_groups": "n_group",
    "top_groups": "topk_group",
    "factor": "routed_scaling_factor",
}


def parse_hf_experts(fields: Fields, implied: HFExperts) -> ExpertsConfig | None:
    """None: every layer is dense."""
    counts = {name: fields.integer(name) for name in COUNT_NAMES if fields.has(name)}
    if len({*counts.values()}) > 1:
        raise ModelError(f"{fields.source}: {', '.join(counts)} are names of one number, and differ")
    count = next(iter(counts.values()), implied.num_experts)
    layers = _layers(fields, implied.dense_first)
    if count == 0 or not layers:
        return None
    inner = fields.integer("moe_intermediate_size", implied.inner_size) if implied.inner_size else None
    inner = fields.integer("intermediate_size") if inner is None else inner
    try:
        return ExpertsConfig(
            num_experts=count,
            top_k=fields.integer("num_experts_per_tok", implied.top_k),
            intermediate_size=inner,
            layers=layers,
            scoring=implied.scoring,
            choice_bias=implied.choice_bias,
            num_groups=fields.integer("n_group", 1) if implied.grouped else 1,
            top_groups=fields.integer("topk_group", 1) if implied.grouped else 1,
            group_best=2 if implied.grouped else 1,
            renormalises=_renormalises(fields, implied),
            factor=fields.number("routed_scaling_factor", 1.0) if implied.grouped else 1.0,
            shared_size=_shared_size(fields, implied, inner),
            shared_gate=implied.shared == "gated",
            router_bias=implied.biased,
            bias=implied.biased,
        )
    except WrongExperts as error:
        names = {"num_experts": next(iter(counts), "num_experts")}
        names["intermediate_size"] = "moe_intermediate_size" if implied.inner_size else "intermediate_size"
        names["shared_size"] = "n_shared_experts" if implied.shared == "counted" else "shared_expert_intermediate_size"
        raise error.named(fields.source, _NAMES | names) from None


def _renormalises(fields: Fields, implied: HFExperts) -> bool:
    if implied.renormalises == "always":
        return True
    return fields.boolean("norm_topk_prob", implied.renormalises == "unless_config")


def _shared_size(fields: Fields, implied: HFExperts, inner: int) -> int:
    if implied.shared == "gated":
        return fields.integer("shared_expert_intermediate_size", implied.shared_size)
    return fields.integer("n_shared_experts", 1) * inner if implied.shared == "counted" else 0


def _layers(fields: Fields, dense_first: int) -> frozenset[int]:
    """Those with experts: every `decoder_sparse_step`-th from `first_k_dense_replace` on, but for `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    if step < 1:
        raise ModelError(f"{fields.source}: decoder_sparse_step must be positive, not {step}")
    dense = frozenset(fields.integers("mlp_only_layers"))
    first = fields.integer("first_k_dense_replace", dense_first)
    return frozenset(range(fields.integer("num_hidden_layers"))[first:][(step - 1 - first) % step :: step]) - dense
