"""The CPU's kernels as layers call them: states in float32."""

from __future__ import annotations

from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels import cpu_delta_net, cpu_experts
from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.kernels.centred_heads import centre_heads
from bequest.engine.kernels.cpu_lora import LoraRows
from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.layers.parts import Activation, Chosen, DeltaRule, Heads, Norm, Routing
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.step_adapters import StepAdapters


class CpuOps:
    """Ops."""

    def __init__(self) -> None:
        self.experts_read: Tensor | None = None

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None, tap: LayerTap | None) -> Tensor:
        assert norm.offset == 0.0, "the backend adds it when it loads a weight"
        if norm.bias is None:
            return kernels.rms_norm(x, norm.weight, norm.eps, residual, tap=tap)
        return kernels.layer_norm(x, norm.weight, norm.bias, norm.eps, residual, tap)

    def tap(self, x: Tensor, tap: LayerTap) -> None:
        kernels.tap_rows(x, tap)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return kernels.activate(x, activation)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return kernels.gated_activation(gate_up, activation)

    def attend(self, qkv: Tensor, heads: Heads, step: LayerStep) -> Tensor:
        return _attend(_prepared(qkv, heads, step), heads, step, step.attention[heads.strip])

    def attend_read(self, qkv: Tensor, heads: Heads, step: LayerStep) -> Tensor:
        assert step.read is not None and step.read.attention is not None
        return _attend(_prepared(qkv, heads, step)[step.read.rows], heads, step, step.read.attention)

    def attend_cross(self, q: Tensor, heads: Heads, step: LayerStep) -> Tensor:
        assert step.cross is not None
        return _attend(q.view(q.shape[0], heads.num_heads, -1), heads, step, step.cross)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        kernels.rotary(q, k, positions, cos_sin)

    def attend_windows(self, qkv: Tensor, begin: Tensor, longest: int, cos_sin: Tensor) -> Tensor | None:
        return None

    def attend_image(self, qkv: Tensor) -> Tensor | None:
        return None

    def delta_net(self, rows: Tensor, rule: DeltaRule, step: LayerStep) -> Tensor:
        assert step.recurrent is not None, "the runner of a model with recurrent layers says where states lie"
        return cpu_delta_net.delta_net(rows, rule, step.recurrent)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return cpu_delta_net.sigmoid_gate(x, gate)

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
        kernels.write_kv(k, v, kv_cache, layer, slots)

    def route(self, logits: Tensor, routing: Routing) -> Chosen:
        chosen = Chosen(*cpu_experts.route(logits, rule_of(routing)))
        if self.experts_read is not None:
            self.experts_read += chosen.ids.flatten().bincount().count_nonzero()
        return chosen

    def add_weighed(self, total: Tensor, added: Tensor, gates: Tensor) -> Tensor:
        return cpu_experts.add_gated_rows(total, added, gates)


def rule_of(routing: Routing) -> cpu_experts.RoutingRule:
    """The routing's bias must outlive it."""
    groups = (routing.num_groups, routing.top_groups, routing.group_best)
    return cpu_experts.routing_rule(
        routing.top_k, routing.scoring, routing.bias, groups, routing.renormalises, routing.factor
    )


def plan_of(work: AttentionWork) -> kernels.AttentionPlan:
    """The runner of this backend has made it."""
    assert isinstance(work, kernels.AttentionPlan)
    return work


def lora_rows_of(adapters: StepAdapters) -> LoraRows:
    """The runner of this backend has made them."""
    assert isinstance(adapters.rows, LoraRows)
    return adapters.rows


def _prepared(qkv: Tensor, heads: Heads, step: LayerStep) -> Tensor:
    """Queries [T, NQ, D], normed and rotated; keys and values are stored, unless another layer has done it."""
    kv_cache = step.cache_of(heads.strip)
    num_heads, num_kv_heads, head_dim = heads.num_heads, kv_cache.shape[3] if heads.stores else 0, kv_cache.shape[5]
    rows = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = rows[:, :num_heads], rows[:, num_heads : num_heads + num_kv_heads], rows[:, num_heads + num_kv_heads :]
    if (norm := heads.norm) is not None:
        assert norm.offset == 0.0, "the backend adds it when it loads a weight"
        for part, weight in ((q, norm.q_weight), (k, norm.k_weight), (v, norm.v_weight)):
            if weight is None:
                continue
            if norm.centred:
                centre_heads(part.flatten(1), weight, norm.eps)
            else:
                kernels.head_rms_norm(_as_one_head(part) if norm.over_rows else part, weight, norm.eps)
    if heads.rope is not None:
        kernels.rotary(q, k, step.positions, heads.rope, heads.query_scales)
    if heads.stores:
        kernels.write_kv(k, v, kv_cache, heads.cache_layer, step.slot_mapping[heads.strip], heads.kv_scales)
    return q


def _as_one_head(heads: Tensor) -> Tensor:
    """[T, heads, D] → [T, 1, heads D], in the same memory"""
    num_tokens, num_heads, head_dim = heads.shape
    width = num_heads * head_dim
    return heads.as_strided((num_tokens, 1, width), (heads.stride(0), width, 1))


def _attend(q: Tensor, heads: Heads, step: LayerStep, work: AttentionWork) -> Tensor:
    return kernels.paged_attention(
        q,
        step.cache_of(heads.strip),
        heads.cache_layer,
        plan_of(work),
        heads.scale,
        heads.soft_cap,
        bias=heads.bias,
        scales=heads.kv_scales,
        sinks=heads.sinks,
    ).flatten(1)
