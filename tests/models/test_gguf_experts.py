"""Experts of GGUF files: all of a layer in one tensor or one by one, shared ones, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from bequest.engine.errors import ModelError
from bequest.engine.formats.gguf_file import GGUFFile, GGUFTensor
from bequest.engine.models.gguf_config import parse_gguf_config
from bequest.engine.models.gguf_experts import expert_tensors
from bequest.engine.models.gguf_loader import GGUFSource
from bequest.engine.models.load import open_checkpoint
from tests.models.test_gguf_loader import assert_same_logits
from tests.models.tiny_gguf import write_tiny_gguf

F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0


def test_shared_experts_and_dense_layers(tmp_path: Path) -> None:
    reference = write_tiny_gguf("qwen2-moe", tmp_path / "model.gguf")
    reference.config.layer_types = ["full_attention"] * 3
    config = open_checkpoint(tmp_path / "model.gguf").config
    assert config.experts is not None and config.experts.layers == {0, 2}  # type: ignore[union-attr]
    assert config.experts.shared_size == 72 and config.experts.shared_gate  # type: ignore[union-attr]
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_metadata_says_what_experts_count(tmp_path: Path) -> None:
    """A factor scales what they add, and what they count may stay as it is scored."""
    metadata = {"expert_weights_scale": 2.0, "expert_gating_func": 2}
    write_tiny_gguf("qwen3-moe", tmp_path / "model.gguf", metadata=metadata)
    experts = parse_gguf_config(GGUFFile(tmp_path / "model.gguf")).experts
    assert experts is not None
    assert (experts.factor, experts.scoring, experts.renormalises) == (2.0, "sigmoid", True)
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (16, 4, 32)


def test_older_files_name_experts_one_by_one(tmp_path: Path) -> None:
    write_tiny_gguf("mixtral", tmp_path / "model.gguf", Q8_0)
    file = GGUFFile(tmp_path / "model.gguf")
    source = GGUFSource(file, parse_gguf_config(file))
    whole = file.tensors["blk.1.ffn_up_exps.weight"]
    alone = GGUFTensor("blk.1.ffn_up.2.weight", whole.shape[1:], whole.type, whole.data.reshape(4, -1)[2])
    ((name, tensor),) = expert_tensors("model.layers.1.", "ffn_up.2", "weight", alone)
    assert name == "model.layers.1.mlp.experts.2.up_proj.weight"
    assert torch.equal(source.load(name), torch.from_numpy(tensor.load()))
    codes = source.load_codes(name)
    assert codes is not None and torch.equal(codes.rows, torch.from_numpy(tensor.packed().copy()))
    assert torch.equal(torch.from_numpy(whole.load()[2]), source.load(name))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"expert_gating_func": 7}, "expert_gating_func 7 is not supported"),
        ({"expert_group_count": 4}, "expert_group_count = 4"),
        ({"expert_weights_scale": -1.0}, "expert_weights_scale must be positive, not -1.0"),
    ],
)
def test_what_is_not_supported_is_named(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_tiny_gguf("qwen3-moe", tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(tmp_path / "model.gguf")


def test_an_architecture_without_experts_refuses_them(tmp_path: Path) -> None:
    write_tiny_gguf("qwen3", tmp_path / "model.gguf", metadata={"expert_count": 4})
    with pytest.raises(ModelError, match="expert_count = 4"):
        open_checkpoint(tmp_path / "model.gguf")
