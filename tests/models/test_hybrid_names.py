"""Checkpoints of hybrids as they are published: deeper names, joined matrices, parts that are not loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bequest.engine.errors import ModelError
from bequest.engine.models.load import load_model
from tests.models.paged import PagedSequences

TOKENS = list(range(20, 33))


def rewritten(directory: Path, to: Path, **changes: object) -> Path:
    """The same model as one that sees pictures, too, has it."""
    to.mkdir()
    tensors = load_file(directory / "model.safetensors")
    deeper = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    extra = {"mtp.norm.weight": torch.ones(8), "model.visual.patch_embed.proj.weight": torch.ones(8, 8)}
    save_file({**deeper, **extra}, to / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text())
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    tied = text.pop("tie_word_embeddings")
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": tied,
        "text_config": text | changes,
        "vision_config": {"depth": 1},
    }
    (to / "config.json").write_text(json.dumps(outer))
    (to / "generation_config.json").write_text((directory / "generation_config.json").read_text())
    return to


def test_the_text_of_a_model_that_sees_pictures(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    plain, whole = load_model(tiny_model("qwen3.5")), load_model(rewritten(tiny_model("qwen3.5"), tmp_path / "vl"))
    logits = [PagedSequences(loaded.model, 1, 20).run(0, TOKENS, chunk=13) for loaded in (plain, whole)]
    assert torch.equal(*logits)
    assert plain.num_parameters == whole.num_parameters
    assert any("mtp.*" in note for note in whole.notes) and any("visual" in note for note in whole.notes)
    assert not any("not loaded" in note for note in plain.notes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["linear_attention", "full_attention", "mamba"]),
        ("layer_types", ["linear_attention"] * 3),
        ("linear_num_value_heads", 3),
        ("linear_key_head_dim", 0),
        ("hidden_act", "gelu"),
    ],
)
def test_what_is_not_supported_is_named(
    field: str, value: object, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = rewritten(tiny_model("qwen3.5"), tmp_path / "vl", **{field: value})
    with pytest.raises(ModelError) as error:
        load_model(directory)
    assert field in str(error.value) or "at least one layer must have an attention" in str(error.value)
