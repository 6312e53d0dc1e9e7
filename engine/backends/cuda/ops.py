"""Our CUDA kernels as layers call them: states and weights in one dtype."""

from __future__ import annotations

from torch import Tensor

from bequest.engine.backends.cuda import experts
from bequest.engine.kernels import cuda, cuda_attention, cuda_delta_net, cuda_linear, cuda_windows
from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.kernels.centred_heads import centre_heads
from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.layers.parts import Activation, Chosen, DeltaRule, Heads, Norm, Routing
from bequest.engine.layers.step import LayerStep


class CudaOps:
    """Ops."""

    def __init__(self) -> None:
        self.experts_read: Tensor | None = None

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None, tap: LayerTap | None) -> Tensor:
        if norm.bias is None:
            return cuda.rms_norm(x, norm.weight, norm.eps, residual, tap=tap, offset=norm.offset)
        return cuda.layer_norm(x, norm.weight, norm.bias, norm.eps, residual, tap)

    def tap(self, x: Tensor, tap: LayerTap) -> None:
        cuda.tap_rows(x, tap)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return cuda.activate(x, activation)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return cuda.gated_activation(gate_up, activation)

    def attend(self, qkv: Tensor, heads: Heads, step: LayerStep) -> Tensor:
        plan = _plan(step.attention[heads.strip])
        one_launch = plan.single_token and heads.bias is None and not heads.soft_cap and heads.stores
        if one_launch and step.together is None:
            return _attend_token(qkv, heads, step, plan).flatten(1)
        return _attend(_prepared(qkv, heads, step), heads, step, plan)

    def attend_read(self, qkv: Tensor, heads: Heads, step: LayerStep) -> Tensor:
        assert step.read is not None
        if step.read.attention is None:
            return self.attend(qkv, heads, step)[step.read.rows]
        return _attend(_prepared(qkv, heads, step)[step.read.rows], heads, step, _plan(step.read.attention))

    def attend_cross(self, q: Tensor, heads: Heads, step: LayerStep) -> Tensor:
        assert step.cross is not None
        return _attend(q.view(q.shape[0], heads.num_heads, -1), heads, step, _plan(step.cross))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        cuda.rotary(q, k, positions, cos_sin)

    def attend_windows(self, qkv: Tensor, begin: Tensor, longest: int, cos_sin: Tensor) -> Tensor | None:
        if not cuda_windows.has_kernel(qkv.dtype, qkv.shape[3], longest):
            return None
        return cuda_windows.attend_windows(qkv, begin, cos_sin)

    def attend_image(self, qkv: Tensor) -> Tensor | None:
        if not cuda_windows.has_image_kernel(qkv.dtype, qkv.shape[3]):
            return None
        return cuda_windows.attend_image(qkv)

    def delta_net(self, rows: Tensor, rule: DeltaRule, step: LayerStep) -> Tensor:
        assert step.recurrent is not None, "the runner of a model with recurrent layers says where states lie"
        return cuda_delta_net.delta_net(rows, rule, step.recurrent)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return cuda_delta_net.sigmoid_gate(x, gate)

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
        cuda.write_kv(k, v, kv_cache, layer, slots)

    def route(self, logits: Tensor, routing: Routing) -> Chosen:
        return experts.route(logits, routing, self.experts_read)

    def add_weighed(self, total: Tensor, added: Tensor, gates: Tensor) -> Tensor:
        return total.addcmul_(gates.sigmoid(), added)


def _plan(work: AttentionWork) -> cuda_attention.CudaAttentionPlan:
    """The runner of this backend has made it."""
    assert isinstance(work, cuda_attention.CudaAttentionPlan)
    return work


def _prepared(qkv: Tensor, heads: Heads, step: LayerStep) -> Tensor:
    """Queries [T, NQ, D], normed and rotated; keys and values are stored, unless another layer has done it."""
    kv_cache = step.cache_of(heads.strip)
    if not heads.stores:
        return _prepared_queries(qkv.view(-1, heads.num_heads, kv_cache.shape[5]), heads, step)
    _norm_rows(qkv, heads)
    _norm_values(qkv, heads, kv_cache)
    _scale_queries(qkv, heads, step, kv_cache.shape[5])
    return cuda.prepare_qkv(
        qkv,
        heads.num_heads,
        kv_cache,
        heads.cache_layer,
        step.slot_mapping[heads.strip],
        step.positions,
        heads.rope,
        _head_norm(heads),
        heads.kv_scales,
    )


def _prepared_queries(q: Tensor, heads: Heads, step: LayerStep) -> Tensor:
    """The same of queries [T, NQ, D] alone."""
    if (norm := heads.norm) is not None:
        assert not (norm.over_rows or norm.centred or norm.offset), "no model whose layers share keys has these"
        cuda.head_rms_norm(q, norm.q_weight, norm.eps)
    if heads.rope is not None:
        cuda.rotary(q, q[:, :0], step.positions, heads.rope)
    assert heads.query_scales is None, "no model whose layers share keys has these"
    return q


def _scale_queries(qkv: Tensor, heads: Heads, step: LayerStep, head_dim: int) -> None:
    """In place. Before they turn instead of behind it, which is the same: kernels of attention do not have it."""
    if heads.query_scales is None:
        return
    assert heads.norm is None, "a norm would undo it"
    scales = heads.query_scales.index_select(0, step.positions)
    qkv[:, : heads.num_heads * head_dim].mul_(scales[:, None])


def _norm_values(qkv: Tensor, heads: Heads, kv_cache: Tensor) -> None:
    """In place."""
    if heads.norm is None or heads.norm.v_weight is None:
        return
    num_kv_heads, head_dim = kv_cache.shape[3], kv_cache.shape[5]
    values = qkv[:, -num_kv_heads * head_dim :].unflatten(1, (num_kv_heads, head_dim))
    cuda.head_rms_norm(values, heads.norm.v_weight, heads.norm.eps)


def _attend(q: Tensor, heads: Heads, step: LayerStep, plan: cuda_attention.CudaAttentionPlan) -> Tensor:
    return cuda_attention.paged_attention(
        q,
        step.cache_of(heads.strip),
        heads.cache_layer,
        plan,
        heads.scale,
        heads.soft_cap,
        bias=heads.bias,
        scales=heads.kv_scales,
        sinks=heads.sinks,
    ).flatten(1)


def attend_rounded(qkv: Tensor, heads: Heads, step: LayerStep) -> cuda_linear.Float8Rows:
    """CudaOps.attend of more than one token, rounded for a product of rows in float8."""
    return cuda_attention.rounded_attention(
        _prepared(qkv, heads, step),
        step.cache_of(heads.strip),
        heads.cache_layer,
        _plan(step.attention[heads.strip]),
        heads.scale,
        heads.soft_cap,
        bias=heads.bias,
        scales=heads.kv_scales,
        sinks=heads.sinks,
    )


def _attend_token(qkv: Tensor, heads: Heads, step: LayerStep, plan: cuda_attention.CudaAttentionPlan) -> Tensor:
    """The step's only token, [1, NQ, D], in one launch."""
    kv_cache = step.cache_of(heads.strip)
    _norm_rows(qkv, heads)
    _norm_values(qkv, heads, kv_cache)
    _scale_queries(qkv, heads, step, kv_cache.shape[5])
    return cuda_attention.attend_token(
        qkv,
        kv_cache,
        heads.cache_layer,
        plan,
        heads.scale,
        step.slot_mapping[heads.strip],
        step.positions,
        heads.rope,
        _head_norm(heads),
        heads.kv_scales,
        heads.sinks,
    )


def _head_norm(heads: Heads) -> cuda.QkNorm | None:
    """What is left of it when `_norm_rows` is done."""
    norm = heads.norm
    if norm is None or norm.over_rows or norm.centred:
        return None
    assert norm.k_weight is not None, "of a layer that stores keys"
    return cuda.QkNorm(norm.q_weight, norm.k_weight, norm.eps, norm.offset)


def _norm_rows(qkv: Tensor, heads: Heads) -> None:
    """Norms that kernels of attention do not have, in place."""
    norm = heads.norm
    if norm is None or not (norm.over_rows or norm.centred):
        return
    assert norm.k_weight is not None, "of a layer that stores keys"
    q_size, k_size = norm.q_weight.numel(), norm.k_weight.numel()
    for rows, weight in ((qkv[:, :q_size], norm.q_weight), (qkv[:, q_size : q_size + k_size], norm.k_weight)):
        if norm.centred:
            centre_heads(rows, weight, norm.eps)
        else:
            cuda.norm_in_place(rows, weight, norm.eps, norm.offset)
