"""config.json of a model that sees → its text model's config.json, and what it sees with. No torch here.

Sections leave out what is as in the transformers library, so its defaults are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import get_args

from bequest.engine.errors import ModelError
from bequest.engine.models.fields import Fields
from bequest.engine.models.towers.config import (
    GridConfig,
    Place,
    ProjectorConfig,
    TowerActivation,
    VisionConfig,
    VitConfig,
)

_TEXT_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
_TEXT_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "vocab_size": 32000,
        "sliding_window": 4096,
    },
    **{kind: {"rope_theta": 1e6} for kind in ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")},
    "qwen3_vl_text": {"rope_theta": 5e5},
    "qwen3_vl_moe_text": {
        "moe_intermediate_size": 1408,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "rope_theta": 5e5,
    },
}
# What the library does whatever config.json says.
_TEXT_IMPLIED: dict[str, dict[str, object]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}


def text_values(values: Mapping[str, object], source: str) -> dict[str, object]:
    """The config.json that the text model alone would have. Raises ModelError for one of an unknown kind."""
    fields = Fields(values, source)
    text = (
        fields.section("text_config") if fields.has("text_config") else fields
    )  # older files have all beside each other
    kind = text.string("model_type", "llama")
    if kind not in _TEXT_ARCHITECTURES:
        known = ", ".join(_TEXT_ARCHITECTURES)
        raise ModelError(f"{source}: a text model of type {kind!r} behind a vision tower is not supported; {known} are")
    # Of the whole model: it says so last, for its section has the defaults of a text model that stands alone.
    shared = {name: fields.raw(name) for name in ("quantization_config", "tie_word_embeddings") if fields.has(name)}
    given = {name: value for name, value in text.values.items() if value is not None} | _plain_ropes(text)
    implied = {**_TEXT_IMPLIED.get(kind, {}), "architectures": [_TEXT_ARCHITECTURES[kind]]}
    return {**_TEXT_DEFAULTS.get(kind, {}), **given, **shared, **implied}


def _plain_ropes(text: Fields) -> dict[str, object]:
    """Text turns by one number: its three axes are equal."""
    plain: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = {key: value for key, value in text.section(name).values.items() if not key.startswith("mrope_")}
        if given:
            kinds = {key: "default" for key in ("type", "rope_type") if given.get(key) == "mrope"}
            plain[name] = given | kinds
    return plain


def parse_vision(values: Mapping[str, object], source: str, architecture: str, out_size: int) -> VisionConfig:
    """REQUIRES: the architecture is among SEEING"""
    return SEEING[architecture](Fields(values, source), architecture, out_size)


def _llava(fields: Fields, architecture: str, out_size: int) -> VisionConfig:
    section = fields.section("vision_config")
    kind = section.string("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise ModelError(f"{fields.source}: a vision tower of type {kind!r} is not supported; CLIP's and SigLIP's are")
    clip = kind == "clip_vision_model"
    num_layers = section.integer("num_hidden_layers", 12)
    strategy = fields.string("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full") or (strategy == "default" and not clip):
        wanted = "'full' or 'default'" if clip else "'full': this tower has no row to leave out"
        raise ModelError(f"{fields.source}: vision_feature_select_strategy must be {wanted}, not {strategy!r}")
    layers = fields.integers("vision_feature_layer") or (-2,)
    projector = ProjectorConfig(
        layers=tuple(_layer(layer, num_layers, fields.source) for layer in layers),
        keeps_class=strategy == "full",
        activation=_activation(fields, "projector_hidden_act", "gelu"),
        has_bias=fields.boolean("multimodal_projector_bias", True),
    )
    return VisionConfig(
        architecture=architecture,
        tower=_vit(section, _CLIP if clip else _SIGLIP, projector, has_class=clip),
        out_size=out_size,
        image_token_id=fields.integer("image_token_index", fields.integer("image_token_id", 32000)),
    )


def _tiled(fields: Fields, architecture: str, out_size: int) -> VisionConfig:
    """Idefics 3 and SmolVLM."""
    section, shuffle = fields.section("vision_config"), fields.integer("scale_factor", 2)
    last = section.integer("num_hidden_layers", 12)
    projector = ProjectorConfig(layers=(last,), has_bias=False, shuffle=shuffle)
    vit = _vit(section, _IDEFICS, projector, has_class=False, norms_last=True)
    if shuffle < 2 or (vit.image_size // vit.patch_size) % shuffle:
        raise ModelError(f"{fields.source}: scale_factor {shuffle} does not divide the tower's rows of patches")
    return VisionConfig(
        architecture=architecture,
        tower=vit,
        out_size=out_size,
        image_token_id=fields.integer("image_token_id", 128257),
    )


def _gemma3(fields: Fields, architecture: str, out_size: int) -> VisionConfig:
    section, rows = fields.section("vision_config"), fields.integer("mm_tokens_per_image", 256)
    if fields.section("text_config").raw("final_logit_softcapping"):
        raise ModelError(f"{fields.source}: text_config.final_logit_softcapping is not supported with a vision tower")
    vit = _vit(section, _SIGLIP, ProjectorConfig(layers=(0,)), has_class=False, norms_last=True)
    side, wanted = vit.image_size // vit.patch_size, math.isqrt(max(rows, 0))
    if wanted < 1 or wanted * wanted != rows or side % wanted:
        raise ModelError(
            f"{fields.source}: mm_tokens_per_image {rows} does not divide the tower's {side} × {side} patches"
        )
    projector = ProjectorConfig(layers=(vit.num_layers,), has_bias=False, pool=side // wanted)
    begin = fields.integer("boi_token_index", 255999)
    return VisionConfig(
        architecture=architecture,
        tower=replace(vit, projector=projector),
        out_size=out_size,
        image_token_id=fields.integer("image_token_index", fields.integer("image_token_id", 262144)),
        place=Place(token_id=begin, token="<start_of_image>", before="\n\n", behind="<end_of_image>\n\n"),
        together=True,
    )


def _qwen2(fields: Fields, architecture: str, out_size: int) -> VisionConfig:
    section = fields.section("vision_config")
    size = section.integer("embed_dim", 1280)
    _check_out_size(section, "hidden_size", out_size)
    inner = int(size * section.number("mlp_ratio", 4.0))
    return _grid(fields, architecture, out_size, hidden_size=size, inner_size=inner, gated=False, default="quick_gelu")


def _qwen2_5(fields: Fields, architecture: str, out_size: int) -> VisionConfig:
    section = fields.section("vision_config")
    _check_out_size(section, "out_hidden_size", out_size)
    full = frozenset(section.integers("fullatt_block_indexes") or (7, 15, 23, 31))
    merged = section.integer("patch_size", 14) * section.integer("spatial_merge_size", 2)
    vision = _grid(
        fields,
        architecture,
        out_size,
        hidden_size=section.integer("hidden_size", 3584),
        inner_size=section.integer("intermediate_size", 3420),
        gated=True,
        default="silu",
    )
    assert isinstance(vision.tower, GridConfig)
    window = section.integer("window_size", 112) // merged * vision.tower.merge
    if window < 1:
        raise ModelError(f"{section.source}: window_size must be {merged} or more: a window has whole merged patches")
    return replace(vision, tower=replace(vision.tower, window=window, full_layers=full))


def _qwen3(fields: Fields, architecture: str, out_size: int) -> VisionConfig:
    deep = fields.section("vision_config").integers("deepstack_visual_indexes") or (8, 16, 24)
    vision = _qwen3_5(fields, architecture, out_size)
    assert isinstance(vision.tower, GridConfig)
    if list(deep) != sorted(set(deep)) or not 0 <= deep[0] <= deep[-1] < vision.tower.num_layers:
        raise ModelError(f"{fields.source}: deepstack_visual_indexes must be ascending layers, not {list(deep)}")
    return replace(vision, tower=replace(vision.tower, deep_layers=deep))


def _qwen3_5(fields: Fields, architecture: str, out_size: int) -> VisionConfig:
    given = fields.section("vision_config").values
    fields = Fields({**fields.values, "vision_config": {**_QWEN3, **given}}, fields.source)
    section = fields.section("vision_config")
    _check_out_size(section, "out_hidden_size", out_size)
    side = math.isqrt(max(places := section.integer("num_position_embeddings"), 0))
    if side < 1 or side * side != places:
        raise ModelError(f"{fields.source}: num_position_embeddings must be a square number, not {places}")
    size, inner = section.integer("hidden_size"), section.integer("intermediate_size")
    vision = _grid(
        fields,
        architecture,
        out_size,
        hidden_size=size,
        inner_size=inner,
        gated=False,
        default="gelu",
        interleaved=True,
    )
    assert isinstance(vision.tower, GridConfig)
    return replace(vision, tower=replace(vision.tower, table_side=side))


_QWEN3: dict[str, object] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}


def _grid(
    fields: Fields,
    architecture: str,
    out_size: int,
    *,
    hidden_size: int,
    inner_size: int,
    gated: bool,
    default: str,
    interleaved: bool = False,
) -> VisionConfig:
    section = fields.section("vision_config")
    if (channels := section.integer("in_channels", 3)) != 3:
        raise ModelError(f"{section.source}: in_channels must be 3, not {channels}")
    tower = GridConfig(
        hidden_size=hidden_size,
        inner_size=inner_size,
        num_layers=section.integer("depth", 32),
        num_heads=section.integer("num_heads", 16),
        patch_size=section.integer("patch_size", 14),
        num_frames=section.integer("temporal_patch_size", 2),
        merge=section.integer("spatial_merge_size", 2),
        activation=_activation(section, "hidden_act", default),
        gated=gated,
        axes=_axes(fields, interleaved=interleaved),
        theta=_theta(section),
    )
    sizes = (tower.hidden_size, tower.inner_size, tower.num_layers, tower.num_heads, tower.patch_size, tower.merge)
    if min(*sizes, tower.num_frames) < 1 or tower.hidden_size % (4 * tower.num_heads):
        raise ModelError(f"{fields.source}: there is no tower of these sizes: {tower}")
    return VisionConfig(
        architecture=architecture,
        tower=tower,
        out_size=out_size,
        image_token_id=fields.integer("image_token_id", 151655),
    )


def _check_out_size(section: Fields, name: str, out_size: int) -> None:
    if (given := section.integer(name, out_size)) != out_size:
        raise ModelError(f"{section.source}: {name} is {given}, the text model has {out_size}")


def _theta(section: Fields) -> float:
    """Of the tower's own rotation. Older files say nothing of it."""
    rope = section.section("rope_parameters")
    if (kind := rope.string("rope_type", "axial")) not in ("axial", "default"):
        raise ModelError(f"{rope.source}: rope_type {kind!r} is not supported; a tower turns by rows and columns")
    if (theta := rope.number("rope_theta", 10000.0)) <= 0:
        raise ModelError(f"{rope.source}: rope_theta must be positive, not {theta:g}")
    return theta


def _axes(fields: Fields, *, interleaved: bool) -> tuple[int, ...]:
    """Sections of pairs that turn by time, by row and by column. `interleaved`: by turns, which is a matter of the
    architecture, whatever the file says."""
    text = fields.section("text_config") if fields.has("text_config") else fields
    rope = text.section("rope_scaling" if text.raw("rope_scaling", None) else "rope_parameters")
    sections = rope.integers("mrope_section")
    if len(sections) != 3 or min(sections) < 0:
        raise ModelError(f"{rope.source}: mrope_section must be three whole numbers, not {list(sections)}")
    if rope.boolean("mrope_interleaved", interleaved) != interleaved:
        wanted = str(interleaved).lower()
        raise ModelError(f"{rope.source}: mrope_interleaved must be {wanted}: this architecture turns no other way")
    if interleaved:
        return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections)))
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


SEEING: Mapping[str, Callable[[Fields, str, int], VisionConfig]] = {
    "LlavaForConditionalGeneration": _llava,
    "Idefics3ForConditionalGeneration": _tiled,
    "SmolVLMForConditionalGeneration": _tiled,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Qwen2VLForConditionalGeneration": _qwen2,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
}

_CLIP: dict[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP = {**_CLIP, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_IDEFICS = {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


def _vit(
    section: Fields,
    defaults: Mapping[str, object],
    projector: ProjectorConfig,
    *,
    has_class: bool,
    norms_last: bool = False,
) -> VitConfig:
    given = {name: value for name, value in section.values.items() if value is not None}
    fields = Fields({**defaults, **given}, section.source)
    if (channels := fields.integer("num_channels", 3)) != 3:
        raise ModelError(f"{fields.source}: num_channels must be 3, not {channels}")
    vit = VitConfig(
        hidden_size=fields.integer("hidden_size"),
        inner_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=fields.integer("num_attention_heads"),
        image_size=fields.integer("image_size"),
        patch_size=fields.integer("patch_size"),
        norm_eps=fields.number("layer_norm_eps"),
        activation=_activation(fields, "hidden_act", "gelu"),
        has_class=has_class,
        norms_last=norms_last,
        projector=projector,
    )
    sizes = (vit.hidden_size, vit.inner_size, vit.num_layers, vit.num_heads, vit.patch_size)
    if min(sizes) < 1 or vit.hidden_size % vit.num_heads or vit.image_size < vit.patch_size:
        raise ModelError(f"{fields.source}: there is no tower of these sizes: {vit}")
    return vit


def _layer(number: int, num_layers: int, source: str) -> int:
    """In [0, L], of one that may count from the end."""
    if not -num_layers - 1 <= number <= num_layers:
        raise ModelError(f"{source}: vision_feature_layer {number} is not among {num_layers} layers")
    return number % (num_layers + 1)


def _activation(fields: Fields, name: str, default: str) -> TowerActivation:
    given = fields.string(name, default)
    for known in get_args(TowerActivation):
        if given == known:
            found: TowerActivation = known
            return found
    raise ModelError(f"{fields.source}: {name} {given!r} is not supported; {', '.join(get_args(TowerActivation))} are")
