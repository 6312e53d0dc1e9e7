"""The text model of a checkpoint that sees pictures too: the same states as that of its own checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PreTrainedConfig,
)

from bequest.engine.errors import ModelError
from bequest.engine.models.load import load_model
from tests.models import tiny_quantised
from tests.models.paged import PagedSequences
from tests.tiny_models import TINY_MODELS, randomised

TOKENS = [5, 9, 14, 3, 77, 31, 200, 8, 19]
LONGER = [*TOKENS, *TOKENS[::-1], *TOKENS]
# Names of the text model, before transformers 5 and since.
SPELLINGS = {"old": "language_model.model.", "new": "model.language_model."}


def write(source: Path, directory: Path, spelling: str, **other_tensors: torch.Tensor) -> Path:
    config = json.loads((source / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (directory / "config.json").write_text(json.dumps(outer))
    shutil.copy(source / "generation_config.json", directory)
    tensors = load_file(source / "model.safetensors")
    head = "language_model.lm_head." if spelling == "old" else "lm_head."
    renamed = {
        name.replace("lm_head.", head)
        if name.startswith("lm_head.")
        else SPELLINGS[spelling] + name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
    }
    vision = "vision_tower.x.weight" if spelling == "old" else "model.vision_tower.x.weight"
    save_file(renamed | {vision: torch.ones(3)} | other_tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_text_is_read_and_the_rest_left(spelling: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    whole = load_model(tiny_model("gemma3"))
    part = load_model(write(tiny_model("gemma3"), tmp_path, spelling))
    one, other = (PagedSequences(loaded.model, 1, 16).run(0, TOKENS, chunk=16) for loaded in (whole, part))
    assert torch.equal(one, other)
    assert part.num_parameters == whole.num_parameters


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("gemma3", "Gemma3TextModel"), ("gemma4-shared", "Gemma4TextModel"), ("qwen3.5", "Qwen3_5TextModel")],
)
def test_a_text_model_that_was_saved_without_its_head(
    name: str, architecture: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whose plain name is that of the model that sees, too."""
    config = json.loads((tiny_model(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    tensors = load_file(tiny_model(name) / "model.safetensors")
    bare = {key.removeprefix("model."): tensor for key, tensor in tensors.items() if not key.startswith("lm_head.")}
    save_file(bare, tmp_path / "model.safetensors")
    whole, alone = (load_model(directory) for directory in (tiny_model(name), tmp_path))
    one, other = (PagedSequences(loaded.model, 1, 16).run(0, TOKENS, chunk=16) for loaded in (whole, alone))
    assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "text"), [("mistral", MistralConfig), ("ministral3", Ministral3Config)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_text_of_mistral_3(name: str, text: type[PreTrainedConfig], tied: bool, tmp_path: Path) -> None:
    """Beside a tower: as transformers writes it, whose section says nothing of a head that is its embedding."""
    fields = {**TINY_MODELS[name][1].to_dict(), "tie_word_embeddings": False}
    eye = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = Mistral3Config(
        text_config=text(**fields), vision_config={**eye, "num_attention_heads": 4}, tie_word_embeddings=tied
    )
    reference = Mistral3ForConditionalGeneration(config).eval()
    randomised(reference.model.language_model, name)
    reference.save_pretrained(tmp_path)
    logits = PagedSequences(load_model(tmp_path).model, 1, 32).run(0, LONGER, chunk=5)
    with torch.inference_mode():
        torch.testing.assert_close(logits, reference(torch.tensor([LONGER])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_text_of_ministral_3_in_float8(spelling: str, tmp_path: Path) -> None:
    """As it is published: the whole model says how it is quantised, and has scales of activations."""
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    described = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    left = {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}
    store = tiny_quantised.fp8(None, None, "weight_scale_inv", extra="activation_scale")
    alone.mkdir(), whole.mkdir()
    reference = tiny_quantised.write("ministral3", alone, tiny_quantised.Tool(described | left, store))
    write(alone, whole, spelling)
    config = json.loads((alone / "config.json").read_text())
    names = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    outer = names | {"quantization_config": config.pop("quantization_config"), "tie_word_embeddings": False}
    (whole / "config.json").write_text(json.dumps(outer | {"text_config": config}))
    logits = PagedSequences(load_model(whole).model, 1, 32).run(0, LONGER, chunk=5)
    with torch.inference_mode():
        torch.testing.assert_close(logits, reference(torch.tensor([LONGER])).logits[0], rtol=1e-4, atol=1e-4)


def test_a_tensor_of_no_part_is_named(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    directory = write(tiny_model("gemma3"), tmp_path, "old", **{"adapter.weight": torch.ones(2)})
    with pytest.raises(ModelError, match=r"adapter\.weight is not a tensor of this architecture"):
        load_model(directory)


@pytest.mark.parametrize("name", ["qwen3", "qwen2-moe", "qwen3.5"])
def test_a_model_that_was_saved_without_its_head(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """As most that embed are published: transformers' inner model, whose names have no prefix."""
    source = tiny_model(name)
    config = json.loads((source / "config.json").read_text())
    inner = [architecture.replace("ForCausalLM", "Model") for architecture in config["architectures"]]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": inner}))
    tensors = load_file(source / "model.safetensors")
    save_file({key.removeprefix("model."): tensor for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    one, other = (
        PagedSequences(load_model(directory).model, 1, 16).run(0, TOKENS, chunk=16) for directory in (source, tmp_path)
    )
    assert torch.equal(one, other)
