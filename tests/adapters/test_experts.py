"""Adapters of experts against PEFT: parameters of all experts of a layer, and tensors of single experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from bequest.engine.errors import InvalidAdapter
from bequest.engine.kernels.cpu_lora import LoraMatrices
from bequest.engine.models.load import LoadedModel, load_model
from tests.adapters.test_models import assert_near, load, logits_of
from tests.adapters.tiny_adapters import make_adapter, save_adapter
from tests.models.paged import PagedSequences
from tests.tiny_models import VOCAB_SIZE, make_reference

LENGTH = 21
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Turned matrices with biases and rows in turns (gpt-oss), shared experts, recurrent layers, groups of experts.
FAMILIES = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "qwen3-next", "qwen3.5-moe", "glm4-moe"]
TOKENS = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()


def fused(name: str, seed: str, **options: object) -> PeftModel:
    given = {"target_modules": ["q_proj", "o_proj"], "target_parameters": BOTH, **options}
    return make_adapter(make_reference(name), seed, **given)


def run(loaded: LoadedModel, matrices: LoraMatrices | None, chunk: int = LENGTH) -> torch.Tensor:
    sequences = PagedSequences(loaded.model, 1, LENGTH)
    sequences.adapters = {} if matrices is None else {0: matrices}
    return sequences.run(0, TOKENS, chunk)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_peft(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    adapted, loaded = fused(name, "one"), load_model(tiny_model(name))
    expected = logits_of(adapted, TOKENS)
    matrices = load(save_adapter(adapted, tmp_path / "one"), loaded)
    result = run(loaded, matrices)
    assert_near(result, expected)
    assert torch.equal(run(loaded, matrices, chunk=4), result)
    assert_near(result, logits_of(adapted.merge_and_unload(), TOKENS), 1e-4)
    attention = make_adapter(make_reference(name), "one", target_modules=["q_proj", "o_proj"])
    assert (expected - logits_of(attention, TOKENS)).abs().max() > 1e-2 * expected.abs().max()  # experts show


@pytest.mark.filterwarnings("ignore:The following")  # PEFT looks for names of patterns among modules alone
@pytest.mark.parametrize(
    "options",
    [
        {"target_parameters": BOTH[1:], "target_modules": []},
        {"target_parameters": ["experts.gate_up_proj"], "use_rslora": True},
        {"rank_pattern": {"gate_up_proj": 8}, "alpha_pattern": {"down_proj": 3}},
        {"target_parameters": [*BOTH, "mlp.gate.weight"], "target_modules": ["k_proj"]},
        {"target_parameters": ["layers.1.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]},
    ],
    ids=["down alone", "up alone", "patterns", "with the router", "by layers"],
)
def test_settings_mean_what_peft_means_by_them(
    options: dict[str, object], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    adapted, loaded = fused("qwen3-moe", "settings", **options), load_model(tiny_model("qwen3-moe"))
    assert_near(run(loaded, load(save_adapter(adapted, tmp_path / "a"), loaded)), logits_of(adapted, TOKENS))


def single_experts(directory: Path, names: dict[str, tuple[int, int]], of: str, count: int) -> Path:
    """As PEFT saved it where each expert was a module: `names` have their inputs and outputs."""
    random = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(3):
        for expert in range(count):
            for matrix, (depth, width) in names.items():
                for kind, shape in (("A", (4, depth)), ("B", (width, 4))):
                    name = f"base_model.model.model.layers.{layer}.{of}.experts.{expert}.{matrix}.lora_{kind}.weight"
                    tensors[name] = 0.12 * torch.randn(shape, generator=random)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": list(names), "task_type": "CAUSAL_LM"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.filterwarnings("ignore:The following")
@pytest.mark.parametrize(
    ("name", "names", "of", "count"),
    [
        ("mixtral", {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}, "block_sparse_moe", 4),
        ("olmoe", {"gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64)}, "mlp", 8),
    ],
)
def test_tensors_of_single_experts(
    name: str,
    names: dict[str, tuple[int, int]],
    of: str,
    count: int,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """PEFT itself makes parameters of all experts of them."""
    directory, loaded = single_experts(tmp_path / "a", names, of, count), load_model(tiny_model(name))
    expected = logits_of(PeftModel.from_pretrained(make_reference(name), str(directory)).eval(), TOKENS)
    assert_near(run(loaded, load(directory, loaded)), expected)
    # One expert alone may have an adapter.
    file = directory / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if ".experts.1." in key}, file)
    some = run(loaded, load(directory, loaded))
    assert not torch.equal(some, run(loaded, None)) and (some - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "qwen3.5-moe"])
def test_a_crowd_changes_nothing(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Adapters of experts, of attention alone, and none, in one step: every row has the bits that it has alone."""
    loaded = load_model(tiny_model(name))
    adapters: dict[int, LoraMatrices] = {}
    for number, options in enumerate([{}, {"r": 2}, {"target_parameters": None}, {"target_parameters": BOTH[:1]}]):
        directory = save_adapter(fused(name, f"{number}", **options), tmp_path / f"{number}")
        adapters[number] = load(directory, loaded)
    crowd = PagedSequences(loaded.model, 6, LENGTH)
    crowd.adapters = adapters | {5: adapters[0]}
    crowd.step({s: TOKENS[: s + 1] for s in range(6)})
    mixed = crowd.step({s: TOKENS[s + 1 :] for s in (3, 0, 4, 2, 5, 1)})
    for sequence in range(6):
        alone = run(loaded, crowd.adapters.get(sequence))
        assert torch.equal(mixed[sequence], alone[sequence + 1 :])


def test_an_adapter_of_other_experts_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load_model(tiny_model("olmoe"))
    directory = save_adapter(fused("mixtral", "other"), tmp_path / "a")
    with pytest.raises(InvalidAdapter, match=r"experts.*the adapter is of another one"):
        load(directory, loaded)
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("experts.lora_A.weight"))
    save_file({**tensors, name: tensors[name][:-1].clone()}, file)
    with pytest.raises(InvalidAdapter, match="not of rank 4 for each expert of"):
        load(directory, loaded)
