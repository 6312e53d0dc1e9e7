"""PEFT directories that are refused: the error names the field or the tensor, and never a path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bequest.engine.adapters.config import parse_config
from bequest.engine.adapters.load import AdapterLoader
from bequest.engine.errors import InvalidAdapter
from bequest.engine.models.load import LoadedModel, load_model
from tests.adapters.tiny_adapters import make_adapter, save_adapter
from tests.tiny_models import make_reference

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def loaded(tiny_model: Callable[[str], Path]) -> LoadedModel:
    return load_model(tiny_model("llama"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_adapter(make_adapter(make_reference("llama"), "files"), tmp_path / "secret-place")


def refusal(directory: Path, loaded: LoadedModel, max_rank: int = 16) -> str:
    with pytest.raises(InvalidAdapter) as caught:
        AdapterLoader(loaded.config, loaded.matrices, max_rank)(directory)
    assert "secret-place" not in caught.value.message
    assert caught.value.code == "invalid_adapter"
    return caught.value.message


def change_config(directory: Path, **fields: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("target_parameters", [7]),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [1]),
        ("use_qalora", True),
        ("peft_type", "IA3"),
        ("init_lora_weights", "pissa"),
        ("something_of_tomorrow", {"on": True}),
        ("r", 0),
        ("r", "four"),
        ("rank_pattern", {"q_proj": -1}),
        ("target_modules", [1]),
    ],
)
def test_a_field_that_is_not_supported_is_named(
    field: str, value: object, directory: Path, loaded: LoadedModel
) -> None:
    change_config(directory, **{field: value})
    assert field in refusal(directory, loaded)


def test_a_broken_expression_is_shown(directory: Path, loaded: LoadedModel) -> None:
    change_config(directory, target_modules="(q_proj")
    assert "(q_proj" in refusal(directory, loaded)


def test_a_field_of_tomorrow_that_is_off_is_none(directory: Path, loaded: LoadedModel) -> None:
    change_config(directory, something_of_tomorrow=False, another=None, third={})
    assert AdapterLoader(loaded.config, loaded.matrices, 16)(directory).rank == 4


def test_a_rank_over_the_limit(directory: Path, loaded: LoadedModel) -> None:
    assert "Its rank is 4, but 3 is the largest" in refusal(directory, loaded, max_rank=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{FIRST}.lora_B.weight"), f"{FIRST}.lora_B.weight is missing"),
        (lambda t: t.update({f"{FIRST}.lora_A.weight": torch.zeros(5, 64)}), f"{FIRST}.lora_A.weight"),
        (lambda t: t.update({f"{FIRST}.lora_A.weight": torch.zeros(4, 7)}), "the adapter is of another one"),
        (lambda t: t.update({f"{FIRST}.lora_B.weight": torch.zeros(9, 4)}), f"{FIRST}.lora_A.weight and lora_B"),
        (lambda t: t.update({f"{FIRST}.lora_B.weight": torch.zeros(64, 4).int()}), "I32"),
        (lambda t: t.update({f"{FIRST}.lora_magnitude_vector": torch.zeros(64)}), "DoRA is not supported"),
        (lambda t: t.update({f"{FIRST}.lora_B.bias": torch.zeros(64)}), f"{FIRST}.lora_B.bias"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    change: Callable[[dict[str, torch.Tensor]], object], said: str, directory: Path, loaded: LoadedModel
) -> None:
    change_tensors(directory, change)
    assert said in refusal(directory, loaded)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("model.layers.9.self_attn.q_proj", "a module that this model does not have"),
        ("lm_head", "embedding or of the output"),
        ("model.layers.0.mlp.experts.3.gate_proj", "a module that this model does not have"),
    ],
)
def test_a_module_that_is_not_adapted_is_named(module: str, said: str, directory: Path, loaded: LoadedModel) -> None:
    pair = {f"base_model.model.{module}.lora_{kind}.weight": torch.zeros(4, 4) for kind in "AB"}
    change_tensors(directory, lambda tensors: tensors.update(pair))
    change_config(directory, target_modules="all-linear")
    message = refusal(directory, loaded)
    assert said in message and module in message


def test_a_tensor_beside_the_targets(directory: Path, loaded: LoadedModel) -> None:
    change_config(directory, target_modules=["k_proj"])
    assert "of no module that adapter_config.json targets" in refusal(directory, loaded)


def test_files_that_are_missing_or_broken(directory: Path, loaded: LoadedModel) -> None:
    assert "no such directory" in refusal(directory / "secret-place", loaded)
    assert "cannot be read" in refusal(directory / ("x" * 5000), loaded)
    weights, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    assert "cut short" in refusal(directory, loaded)
    weights.unlink()
    (directory / "adapter_model.bin").write_bytes(b"")
    assert "save the adapter as safetensors" in refusal(directory, loaded)
    weights.write_bytes(whole)
    config.write_text("{")
    assert "is not JSON" in refusal(directory, loaded)
    config.unlink()
    assert "adapter_config.json cannot be read" in refusal(directory, loaded)


def test_the_digest_is_of_the_content(directory: Path, loaded: LoadedModel) -> None:
    loader = AdapterLoader(loaded.config, loaded.matrices, 16)
    before = loader(directory).digest
    assert loader(directory).digest == before
    change_config(directory, lora_alpha=17)
    assert loader(directory).digest != before


def test_layers_are_counted_from_the_first_number() -> None:
    config = parse_config({"target_modules": ["gate_proj"], "layers_to_transform": [1]})
    assert config.has("model.layers.1.mlp.experts.0.gate_proj") and not config.has("model.layers.0.mlp.gate_proj")


def test_matrices_have_the_same_numbers_in_every_load(tiny_model: Callable[[str], Path], loaded: LoadedModel) -> None:
    """Adapters outlive a runner that sleeps; the model is read again when it wakes."""
    again = load_model(tiny_model("llama"))
    assert again.matrices == loaded.matrices
    assert len({matrix.site for matrix in loaded.matrices.values()}) == 4 * loaded.config.num_layers
