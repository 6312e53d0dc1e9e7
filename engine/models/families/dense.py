"""Llama, Mistral, Qwen, SmolLM3, Phi-3 and 4, GLM-4, Granite and what shares their shape, with experts or without."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from bequest.engine.layers.parts import HeadNorm, Heads
from bequest.engine.layers.spec import Attention, DeltaNet, Experts, FeedForward, LayerSpec, Sublayer
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.decoder import DecoderParts
from bequest.engine.models.families.delta_net import describe_delta_net
from bequest.engine.models.families.experts import describe_experts
from bequest.engine.models.reader import Lister, Reader, Shape
from bequest.engine.models.rope import cos_sin_table
from bequest.engine.models.weights import WeightSource, check_shapes


def describe(config: DecoderConfig, read: Reader, num_positions: int) -> DecoderParts:
    vocabulary, hidden = config.vocab_size, config.hidden_size
    rope = read.placed(cos_sin_table(config.rope, config.rotary_dim, num_positions))  # [P, R]
    table = read.weight("model.embed_tokens", vocabulary, hidden)
    return DecoderParts(
        table,
        read.each(partial(_layer, config, read, rope), config.num_layers),
        read.norm("model.norm", hidden, config.rms_norm_eps),
        table if config.tie_word_embeddings else read.weight("lm_head", vocabulary, hidden),
        start_factor=config.embedding_factor,
        logits_divisor=config.logits_divisor,
    )


def _layer(config: DecoderConfig, read: Reader, rope: Tensor, index: int) -> LayerSpec:
    at = read.under(layer_prefix(index))
    hidden, eps = config.hidden_size, config.rms_norm_eps
    behind = {
        name: at.norm(name, hidden, eps) if config.norms_behind else None
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
    }
    attention = Sublayer(
        before=at.norm("input_layernorm", hidden, eps),
        mixer=_token_mixer(config, at, rope, index),
        behind=behind["post_self_attn_layernorm"],
        factor=config.residual_factor,
    )
    mlp = Sublayer(
        before=at.norm("post_attention_layernorm", hidden, eps),
        mixer=_mlp(config, at.under("mlp."), index),
        behind=behind["post_mlp_layernorm"],
        factor=config.residual_factor,
    )
    return LayerSpec(index, (attention, mlp))


def _token_mixer(config: DecoderConfig, at: Reader, rope: Tensor, index: int) -> Attention | DeltaNet:
    recurrent, hidden = config.recurrent, config.hidden_size
    if recurrent is None or index not in recurrent.layers:
        return _attention(config, at.under("self_attn."), rope, index)
    place = config.state_layer(index)
    return describe_delta_net(recurrent.sizes, at.under("linear_attn."), hidden, config.rms_norm_eps, place)


def _attention(config: DecoderConfig, at: Reader, rope: Tensor, index: int) -> Attention:
    rows = [config.q_size, config.kv_size, config.kv_size]
    heads = Heads(
        num_heads=config.num_heads,
        scale=config.attention_scale,
        cache_layer=config.cache_layer(index),
        window=config.sliding_windows[index],
        norm=_head_norm(config, at) if config.qk_norm else None,
        rope=None if index in config.unrotated_layers else rope,
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
    q_weight, k_weight = (at.vector(f"{name}_norm.weight", config.head_dim) for name in ("q", "k"))
    return HeadNorm(q_weight, k_weight, config.head_norm_eps)


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


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Every tensor of the model and its shape."""
    lister = Lister()
    describe(config, lister, num_positions=1)
    return lister.shapes


def check_tensors(source: WeightSource, config: DecoderConfig) -> None:
    """Refuses a checkpoint as `check_shapes` does."""
    present = [name for name in source.names() if not _is_harmless(name, config)]
    check_shapes(source, present, expected_tensors(config), config.architecture)


# What checkpoints call the scales of an fp8 cache (engine.models.kv_scales) and of products that stay in float here.
_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "k_proj.output_scale", "v_proj.output_scale")


def _is_harmless(name: str, config: DecoderConfig) -> bool:
    """Old checkpoints hold buffers that we compute; some hold the tied output matrix a second time; some have scales
    for a cache that may be one of another dtype."""
    if ".self_attn." in name and name.endswith(tuple(f".{scale}" for scale in _SCALES)):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
