"""Layers of Llama and of what shares its shape, with experts or without: the names of all are in
engine/models/registry.py."""

from __future__ import annotations

from bequest.engine.layers.parts import HeadNorm, Heads
from bequest.engine.layers.spec import Attention, DeltaNet, Experts, FeedForward, LayerSpec, Sublayer
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.families.delta_net import describe_delta_net
from bequest.engine.models.families.experts import describe_experts
from bequest.engine.models.families.parts import Ropes, optional_norm
from bequest.engine.models.reader import Reader


def describe_layer(config: DecoderConfig, at: Reader, ropes: Ropes, index: int) -> LayerSpec:
    style = config.style
    attention = Sublayer(
        before=optional_norm(config, at, style.before_attention),
        mixer=_token_mixer(config, at, ropes, index),
        behind=optional_norm(config, at, style.behind_attention),
        factor=config.residual_factor,
    )
    mlp = Sublayer(
        before=optional_norm(config, at, style.before_mlp),
        mixer=_mlp(config, at.under("mlp."), index),
        behind=optional_norm(config, at, style.behind_mlp),
        factor=config.residual_factor,
        beside=style.parallel,
    )
    return LayerSpec(index, (attention, mlp))


def _token_mixer(config: DecoderConfig, at: Reader, ropes: Ropes, index: int) -> Attention | DeltaNet:
    recurrent, hidden = config.recurrent, config.hidden_size
    if recurrent is None or index not in recurrent.layers:
        return _attention(config, at.under("self_attn."), ropes, index)
    place = config.state_layer(index)
    return describe_delta_net(recurrent.sizes, at.under("linear_attn."), hidden, config.rms_norm_eps, place)


def _attention(config: DecoderConfig, at: Reader, ropes: Ropes, index: int) -> Attention:
    rows = [config.q_size, config.kv_size, config.kv_size]
    place = config.place_of(index)
    heads = Heads(
        num_heads=config.num_heads,
        scale=config.attention_scale,
        cache_layer=place.layer,
        strip=place.strip,
        window=config.sliding_windows[index],
        norm=_head_norm(config, at) if config.qk_norm else None,
        rope=ropes.of_layer(index),
        query_scales=ropes.query_scales_of(index),
        soft_cap=config.attention_cap,
        sinks=at.placed(at.tensor("sinks", (config.num_heads,))) if config.sinks else None,
        kv_scales=at.kv_scales(),
    )
    hidden, biased = config.hidden_size, config.attention_bias
    return Attention(
        at.stacked(["q_proj", "k_proj", "v_proj"], rows, hidden, [biased] * 3),
        heads,
        at.weight("o_proj", hidden, config.q_size, has_bias=config.attention_output_bias),
        at.weight("gate_proj", config.q_size, hidden, has_bias=biased) if config.attention_gate else None,
    )


def _head_norm(config: DecoderConfig, at: Reader) -> HeadNorm:
    style = config.style
    if style.centred:
        q_weight = at.placed(at.tensor("q_norm.weight", (config.num_heads, config.head_dim)))
        k_weight = at.placed(at.tensor("k_norm.weight", (config.num_kv_heads, config.head_dim)))
        return HeadNorm(q_weight, k_weight, config.head_norm_eps, centred=True)
    sizes = (config.q_size, config.kv_size) if style.qk_norm_over_rows else (config.head_dim, config.head_dim)
    (q_weight, offset), (k_weight, _) = (
        at.offset_vector(f"{name}_norm.weight", size, style.norm_offset)
        for name, size in zip(("q", "k"), sizes, strict=True)
    )
    return HeadNorm(q_weight, k_weight, config.head_norm_eps, offset, style.qk_norm_over_rows)


def _mlp(config: DecoderConfig, at: Reader, index: int) -> FeedForward | Experts:
    if config.experts is not None and index in config.experts.layers:
        return describe_experts(config, config.experts, at)
    hidden, inner, biased = config.hidden_size, config.intermediate_size, config.mlp_bias
    return FeedForward(
        at.stacked(["gate_proj", "up_proj"], [inner, inner], hidden, [biased, biased]),
        config.activation,
        at.weight("down_proj", hidden, inner, has_bias=biased),
        gated=True,
    )
