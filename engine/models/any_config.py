"""config.json of whichever kind of model, as its description. No torch here: a start reads it first of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bequest.engine.errors import ModelError
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.fields import Fields
from bequest.engine.models.generation import read_json
from bequest.engine.models.hf_config import parse_hf_config
from bequest.engine.models.hf_encoder_decoder import PARSERS
from bequest.engine.models.registry import HF_ARCHITECTURES
from bequest.engine.models.towers.hf_towers import SEEING, parse_vision, text_values
from bequest.engine.models.transformers_impl.shape import TransformersConfig

OwnConfig = DecoderConfig | EncoderDecoderConfig  # of our own families
ModelConfig = OwnConfig | TransformersConfig

# What save_pretrained calls a model without its output matrix, where that is tied.
_HEADLESS = {"BartModel": "BartForConditionalGeneration", "MBartModel": "MBartForConditionalGeneration"}


def read_config(directory: Path) -> dict[str, object]:
    """The values of a directory's config.json, with the name of the whole model where only its stacks were saved."""
    path = directory / "config.json"
    if not path.exists():
        raise _no_model(directory)
    values = read_json(path)
    names = values.get("architectures")
    if isinstance(names, list):
        values["architectures"] = [_whole(name) if isinstance(name, str) else name for name in names]
    return values | _quantisation_beside(directory, values)


def _whole(architecture: str) -> str:
    for ending in ("TextModel", "Model"):  # the former where a model that sees, too, has the plain name
        decoder = f"{architecture.removesuffix(ending)}ForCausalLM"
        if decoder in HF_ARCHITECTURES:
            return decoder
    return _HEADLESS.get(architecture, architecture)


def _quantisation_beside(directory: Path, values: Mapping[str, object]) -> dict[str, object]:
    """ModelOpt may describe what it has quantised in a file of its own."""
    path = directory / "hf_quant_config.json"
    if values.get("quantization_config") is not None or not path.exists():
        return {}
    described = Fields(read_json(path), str(path)).section("quantization")
    return {"quantization_config": {"quant_method": "modelopt", **described.values}}


def _no_model(directory: Path) -> ModelError:
    """Says what a directory without a config.json is instead."""
    adapter = directory / "adapter_config.json"
    if adapter.exists():
        base = read_json(adapter).get("base_model_name_or_path") or "its base model"
        return ModelError(
            f"{directory} is an adapter (LoRA) of {base}, not a model: merge it into its base, for example with "
            "merge_and_unload() of peft, save the result, and name that directory"
        )
    files = [file.name for file in sorted(directory.glob("*.gguf"))]
    hint = f"; name the file itself: {', '.join(files)}" if files else ""
    return ModelError(f"{directory} holds no config.json, so it is not a Hugging Face model{hint}")


def parse_config(values: Mapping[str, object], source: str, *, sees: bool = True) -> OwnConfig:
    """Raises ModelError for an architecture that is not supported, or for a field that is wrong. `sees`: False where
    nothing says how images are prepared; then some models that see are read as their text models."""
    names = _names(values.get("architectures"))
    seeing = next((name for name in names if name in SEEING), None)
    if seeing is not None and (sees or seeing not in HF_ARCHITECTURES):
        text = parse_hf_config(text_values(values, source), f"{source}: text_config")
        return replace(text, vision=parse_vision(values, source, seeing, text.hidden_size))
    architecture = _encoder_decoder(names)
    if architecture is None:
        return parse_hf_config(values, source, others=(*PARSERS, *SEEING))
    return PARSERS[architecture](Fields(values, source), architecture)


def _names(architectures: object) -> list[str]:
    """config.json's list."""
    return [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []


def _encoder_decoder(names: Sequence[str]) -> str | None:
    """The first encoder-decoder architecture. Raises ModelError for one without a decoder."""
    if alone := next((name for name in names if name.endswith("EncoderModel")), None):
        raise ModelError(
            f"architecture {alone} is an encoder without a decoder, which is not supported; "
            f"supported are whole models: {', '.join(PARSERS)}"
        )
    return next((name for name in names if name in PARSERS), None)
