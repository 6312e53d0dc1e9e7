"""What config.json alone says of a model for transformers, before anything is imported. No torch here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from bequest.engine.errors import ModelError
from bequest.engine.models.towers.hf_towers import SEEING

INSTALL_COMMAND = "pip install 'bequest[transformers]'"

# Parts beside a decoder of text, by the field of config.json that describes them.
_OTHER_PARTS = {
    "vision_config": "images",
    "visual": "images",
    "img_processor": "images",
    "audio_config": "sound",
    "audio_processor": "sound",
    "speech_config": "sound",
}
# Kinds of layers that keep keys and values of each token, or of the last ones.
_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "attention"})


def check_described(values: Mapping[str, object], source: str, *, trust_remote_code: bool) -> None:
    """Raises ModelError for a model that transformers may know but that cannot be served this way, and where
    transformers is not installed."""
    if values.get("is_encoder_decoder"):
        raise refusal(source, "it is an encoder-decoder model, and only Bequest's own families of these are served")
    if found := [name for name in _OTHER_PARTS if values.get(name)]:
        raise refusal(source, _of_part(found[0], values))
    if values.get("quantization_config"):
        raise refusal(source, "its weights are quantised (quantization_config); take the model's original weights")
    _check_layer_kinds(values, source)
    if remote_code(values) and not trust_remote_code and importlib.util.find_spec("transformers") is None:
        raise needs_trust(source)
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(f"{source}: this architecture needs the transformers library: {INSTALL_COMMAND}")


def _of_part(field: str, values: Mapping[str, object]) -> str:
    """By the name of the architecture, with those that see."""
    names = values.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else "it"
    said = f"{named} has a part for {_OTHER_PARTS[field]} ({field}), and only text is served"
    return f"{said}. Images are seen by {', '.join(SEEING)}" if _OTHER_PARTS[field] == "images" else said


def refusal(source: str, reason: str) -> ModelError:
    """That names the part that is missing."""
    return ModelError(f"{source}: transformers cannot run this model over the paged cache: {reason}")


def needs_trust(source: str) -> ModelError:
    return ModelError(
        f"{source}: the model brings Python code of its own (auto_map), which runs with all rights of this process; "
        "read it, and allow it with trust_remote_code="
    )


def remote_code(values: Mapping[str, object]) -> bool:
    """Whether the checkpoint brings code for its model."""
    named = values.get("auto_map")
    return isinstance(named, Mapping) and "AutoModelForCausalLM" in named


def _check_layer_kinds(values: Mapping[str, object], source: str) -> None:
    kinds = values.get("layer_types")
    if not isinstance(kinds, list):
        return
    if others := sorted({str(kind) for kind in kinds} - _ATTENTION_KINDS):
        raise refusal(source, f"layer_types has {', '.join(others)}, and only full and sliding attention are served")
