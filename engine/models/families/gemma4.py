"""Gemma 4: layers of two kinds of heads, of which the last may read the keys and values of others; perhaps experts
beside the MLP, and perhaps something of each token for every layer."""

from __future__ import annotations

import torch

from bequest.engine.layers.parts import HeadNorm, Heads, Norm, Routing
from bequest.engine.layers.spec import (
    Attention,
    Branch,
    Branches,
    Experts,
    FeedForward,
    LayerSpec,
    Sublayer,
    TokenInput,
)
from bequest.engine.layers.start import TokenInputs
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.experts_config import ExpertsConfig
from bequest.engine.models.families.parts import Ropes, model_norm
from bequest.engine.models.gemma4_config import Gemma4Config
from bequest.engine.models.reader import Reader


def describe_layer(config: DecoderConfig, at: Reader, ropes: Ropes, index: int) -> LayerSpec:
    gemma4 = _own(config)
    attention = Sublayer(
        before=model_norm(config, at, "input_layernorm"),
        mixer=_attention(config, gemma4, at.under("self_attn."), ropes, index),
        behind=model_norm(config, at, "post_attention_layernorm"),
    )
    sublayers = [attention, _mlp(config, gemma4, at, index)]
    if gemma4.input_size:
        sublayers.append(_token_input(config, gemma4.input_size, at, index))
    return LayerSpec(index, tuple(sublayers), factor=float(at.tensor("layer_scalar", (1,))))


def _own(config: DecoderConfig) -> Gemma4Config:
    assert config.gemma4 is not None, config.architecture
    return config.gemma4


def _attention(config: DecoderConfig, gemma4: Gemma4Config, at: Reader, ropes: Ropes, index: int) -> Attention:
    hidden, biased = config.hidden_size, config.attention_bias
    kept, window = config.heads_of(index), config.sliding_windows[index]
    q_size = config.num_heads * kept.size
    stores = config.keys_of(index) == index
    keys_are_values = stores and gemma4.keys_are_values and not window
    names = ["q_proj"] if not stores else ["q_proj", "k_proj"] if keys_are_values else ["q_proj", "k_proj", "v_proj"]
    rows = [q_size, kept.width, kept.width][: len(names)]
    place = config.place_of(index)
    heads = Heads(
        num_heads=config.num_heads,
        scale=config.attention_scale,
        cache_layer=place.layer,
        strip=place.strip,
        window=window,
        norm=_head_norm(config, at, kept.size, stores=stores),
        rope=ropes.of_layer(index),
        kv_scales=at.kv_scales(),
        stores=stores,
    )
    return Attention(
        at.stacked(names, rows, hidden, [biased] * len(names)),
        heads,
        at.weight("o_proj", hidden, q_size, has_bias=biased),
        keys_are_values=keys_are_values,
    )


def _head_norm(config: DecoderConfig, at: Reader, size: int, *, stores: bool) -> HeadNorm:
    """Values are divided by their root mean square, and multiplied by nothing."""
    return HeadNorm(
        at.vector("q_norm.weight", size),
        at.vector("k_norm.weight", size) if stores else None,
        config.rms_norm_eps,
        v_weight=at.placed(torch.ones(size), as_weight=True) if stores else None,
    )


def _mlp(config: DecoderConfig, gemma4: Gemma4Config, at: Reader, index: int) -> Sublayer:
    before, dense = model_norm(config, at, "pre_feedforward_layernorm"), _dense(config, gemma4, at, index)
    behind = model_norm(config, at, "post_feedforward_layernorm")
    if config.experts is None:
        return Sublayer(before=before, mixer=dense, behind=behind)
    both = (
        Branch(dense, before, model_norm(config, at, "post_feedforward_layernorm_1")),
        Branch(
            _experts(config, config.experts, at),
            model_norm(config, at, "pre_feedforward_layernorm_2"),
            model_norm(config, at, "post_feedforward_layernorm_2"),
        ),
    )
    return Sublayer(mixer=Branches(both), behind=behind)


def _dense(config: DecoderConfig, gemma4: Gemma4Config, at: Reader, index: int) -> FeedForward:
    is_wide = gemma4.wide_shared and config.keys_of(index) != index
    hidden, inner, mlp = config.hidden_size, config.intermediate_size * (2 if is_wide else 1), at.under("mlp.")
    return FeedForward(
        mlp.stacked(["gate_proj", "up_proj"], [inner, inner], hidden, [False, False]),
        config.activation,
        mlp.weight("down_proj", hidden, inner),
        gated=True,
    )


def _experts(config: DecoderConfig, experts: ExpertsConfig, at: Reader) -> Experts:
    hidden, inner, count = config.hidden_size, experts.intermediate_size, experts.num_experts
    router, each = at.under("router."), at.under("experts.")
    scale = router.tensor("scale", (hidden,)).float() * hidden**-0.5
    return Experts(
        router.weight("proj", count, hidden),
        Routing(
            top_k=experts.top_k,
            renormalises=experts.renormalises,
            scales=router.placed(router.tensor("per_expert_scale", (count,)).float()),
        ),
        each.experts(["gate_proj", "up_proj"], [inner, inner], hidden, count),
        config.activation,
        each.experts(["down_proj"], [hidden], inner, count),
        router_norm=Norm(router.placed(scale, as_weight=True), config.rms_norm_eps),
    )


def _token_input(config: DecoderConfig, size: int, at: Reader, index: int) -> Sublayer:
    return Sublayer(
        mixer=TokenInput(
            at.weight("per_layer_input_gate", size, config.hidden_size),
            config.activation,
            at.weight("per_layer_projection", config.hidden_size, size),
            index,
        ),
        behind=model_norm(config, at, "post_per_layer_input_norm"),
    )


def is_unread(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor is of keys or values of a layer that reads another's: some checkpoints hold them."""
    match name.split("."):
        case ["model", "layers", layer, "self_attn", "k_proj" | "v_proj" | "k_norm" | "v_norm", _] if layer.isdigit():
            return int(layer) < config.num_layers and config.keys_of(int(layer)) != int(layer)
    return False


def describe_inputs(config: DecoderConfig, read: Reader) -> TokenInputs | None:
    """What every layer gets of each token; None: nothing."""
    gemma4, at = _own(config), read.under("model.")
    size = gemma4.input_size
    if not size:
        return None
    width = config.num_layers * size
    return TokenInputs(
        at.weight("embed_tokens_per_layer", gemma4.input_vocab, width),
        read.rounded(size**0.5),
        at.weight("per_layer_model_projection", width, config.hidden_size),
        config.hidden_size**-0.5,
        at.norm("per_layer_projection_norm", size, config.rms_norm_eps),
        2**-0.5,
    )
