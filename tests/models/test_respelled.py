"""Joined matrices: a checkpoint that lacks one, or has one of another size, is refused by our names for its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bequest.engine.errors import ModelError
from bequest.engine.models.load import load_model

JOINED = "model.layers.1.mlp.gate_up_proj.weight"


@pytest.fixture
def change(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], Path]:
    def changed(edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        source = tiny_model("phi3")
        tensors = load_file(source / "model.safetensors")
        edit(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
        return tmp_path

    return changed


def test_a_missing_joined_matrix_is_named_as_the_file_would(change: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"configured: model\.layers\.1\.mlp\.gate_up_proj\.weight is missing$"):
        load_model(change(lambda tensors: tensors.pop(JOINED)))


@pytest.mark.parametrize(
    ("rows", "named"),
    [(191, r"up_proj\.weight\) has shape \[95, 64\]"), (50, r"gate_proj\.weight\) has shape \[50, 64\]")],
)
def test_a_joined_matrix_of_another_size_is_refused(change: Callable[..., Path], rows: int, named: str) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors[JOINED] = tensors[JOINED][:rows].contiguous()

    with pytest.raises(ModelError, match=named):
        load_model(change(shorten))


def test_the_length_that_is_served_chooses_the_rotation(tiny_model: Callable[[str], Path]) -> None:
    def rope(max_model_len: int) -> torch.Tensor:
        (layer, *_) = load_model(tiny_model("phi3-long"), max_model_len=max_model_len).model.layers
        table = layer.sublayers[0].mixer.heads.rope  # type: ignore[union-attr]
        assert table is not None
        return table[:16]

    assert torch.equal(rope(16)[:8], rope(8))
    assert torch.equal(rope(17), rope(64)[:16])
    assert not torch.allclose(rope(16), rope(17))
