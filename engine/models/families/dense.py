"""Llama and what shares its shape, with experts or without: the names of all are in engine/models/registry.py."""

from __future__ import annotations

from functools import partial

from bequest.engine.layers.parts import HeadNorm, Heads
from bequest.engine.layers.spec import Attention, DeltaNet, Experts, FeedForward, LayerSpec, Sublayer
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.decoder import DecoderParts
from bequest.engine.models.families import gemma4
from bequest.engine.models.families.delta_net import describe_delta_net
from bequest.engine.models.families.experts import describe_experts
from bequest.engine.models.families.parts import Ropes, model_norm, optional_norm
from bequest.engine.models.reader import Lister, Reader, Shape
from bequest.engine.models.weights import WeightSource, check_shapes


def describe(config: DecoderConfig, read: Reader, num_positions: int) -> DecoderParts:
    vocabulary, hidden, factor = config.vocab_size, config.hidden_size, config.embedding_factor
    table = read.weight("model.embed_tokens", vocabulary, hidden)
    ropes = Ropes(config, read, num_positions)
    return DecoderParts(
        table,
        read.each(partial(_numbered_layer, config, read, ropes), config.num_layers),
        model_norm(config, read, "model.norm"),
        table if config.tie_word_embeddings else read.weight("lm_head", vocabulary, hidden),
        start_factor=read.rounded(factor) if config.rounds_embedding_factor else factor,
        scales_overlay=not config.rounds_embedding_factor,  # Gemma's table has the factor, Granite's model
        logits_divisor=config.logits_divisor,
        logits_cap=config.logits_cap,
        turns=ropes.turns,
        inputs=None if config.gemma4 is None else gemma4.describe_inputs(config, config.gemma4, read),
    )


def _numbered_layer(config: DecoderConfig, read: Reader, ropes: Ropes, index: int) -> LayerSpec:
    at = read.under(layer_prefix(index))
    if config.gemma4 is not None:
        return gemma4.describe_layer(config, config.gemma4, at, ropes, index)
    return describe_layer(config, at, ropes, index)


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
    if config.gemma4 is not None and gemma4.is_unread(config, name):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
