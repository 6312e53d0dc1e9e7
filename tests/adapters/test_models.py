"""Adapters against PEFT on tiny models of every family: logits, in every way of cutting and mixing the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from bequest.engine.adapters.load import AdapterLoader
from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.kernels.cpu_lora import LoraMatrices
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.load import LoadedModel, load_model
from tests.adapters.tiny_adapters import DENSE, make_adapter, make_adapters, save_adapter
from tests.models.paged import PagedSequences
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import TINY_MODELS, VOCAB_SIZE, make_reference

LENGTH = 23
# Joined matrices (phi3, glm4), turned rows (cohere), norms behind (olmo2), shared experts, recurrent layers.
FAMILIES = [
    *("llama", "qwen2", "qwen3", "phi3", "glm4", "gemma3", "cohere", "olmo2", "granite", "qwen2-moe", "qwen3.5"),
    "gemma4-keys",
]
TARGETS = {
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3-moe": ["q_proj", "v_proj"],
    "gemma4-shared": ["q_proj", "k_proj", "down_proj", "per_layer_input_gate", "per_layer_projection"],
    "gemma4-experts": ["k_proj", "o_proj", "gate_proj", "down_proj"],
}
NUM_ADAPTERS = 16


def load(directory: Path, loaded: LoadedModel) -> LoraMatrices:
    weights = AdapterLoader(loaded.config, loaded.matrices, max_rank=64)(directory)
    assert isinstance(weights.matrices, LoraMatrices) and weights.num_bytes > 0
    return weights.matrices


def logits_of(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def assert_near(actual: Tensor, expected: Tensor, relative: float = 4e-5) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < relative, f"relative error {error:.2e}"


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", [*FAMILIES, *TARGETS])
def test_logits_are_those_of_peft(
    name: str, tiny_model: Callable[[str], Path], tokens: list[int], tmp_path: Path
) -> None:
    adapted = make_adapter(make_reference(name), "one", target_modules=TARGETS.get(name, "all-linear"))
    loaded, expected = load_model(tiny_model(name)), logits_of(adapted, tokens)
    matrices = load(save_adapter(adapted, tmp_path / "one"), loaded)
    whole, chunked = (PagedSequences(loaded.model, 1, LENGTH) for _ in range(2))
    whole.adapters = chunked.adapters = {0: matrices}
    result = whole.run(0, tokens, chunk=LENGTH)
    assert_near(result, expected)
    assert torch.equal(chunked.run(0, tokens, chunk=5), result)
    assert_near(result, logits_of(adapted.merge_and_unload(), tokens), 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True, "r": 8},
        {"rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.up_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"target_modules": r".*\.(q_proj|down_proj)"},
        {"target_modules": DENSE, "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["model.layers.0.mlp.down_proj", "o_proj"]},
        {"target_modules": "all-linear", "exclude_modules": ["k_proj"], "init_lora_weights": "gaussian"},
    ],
    ids=["rslora", "patterns", "expression", "layers", "paths", "exclude"],
)
def test_settings_mean_what_peft_means_by_them(
    options: dict[str, object], tiny_model: Callable[[str], Path], tokens: list[int], tmp_path: Path
) -> None:
    adapted = make_adapter(make_reference("llama"), "settings", **options)
    loaded = load_model(tiny_model("llama"))
    sequences = PagedSequences(loaded.model, 1, LENGTH)
    sequences.adapters = {0: load(save_adapter(adapted, tmp_path / "a"), loaded)}
    assert_near(sequences.run(0, tokens, chunk=LENGTH), logits_of(adapted, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_of_half_precision(
    dtype: torch.dtype, tiny_model: Callable[[str], Path], tokens: list[int], tmp_path: Path
) -> None:
    adapted = make_adapter(make_reference("llama"), "half")
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = parameter.data.to(dtype)
    directory = save_adapter(adapted, tmp_path / "a")
    loaded = load_model(tiny_model("llama"))
    sequences = PagedSequences(loaded.model, 1, LENGTH)
    sequences.adapters = {0: load(directory, loaded)}
    assert_near(sequences.run(0, tokens, chunk=LENGTH), logits_of(adapted.float(), tokens))


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3.5"])
def test_a_crowd_of_sixteen_adapters_and_none_changes_nothing(
    name: str, tiny_model: Callable[[str], Path], tokens: list[int], tmp_path: Path
) -> None:
    """Prompts, chunks and decodes of seventeen sequences in each step: every row has the bits that it has alone."""
    loaded = load_model(tiny_model(name))
    ranks = {f"{number}": (1, 2, 4, 8)[number % 4] for number in range(NUM_ADAPTERS)}
    made = make_adapters(lambda: make_reference(name), ranks)
    adapters = {int(number): load(save_adapter(adapted, tmp_path / number), loaded) for number, adapted in made}
    crowd = PagedSequences(loaded.model, NUM_ADAPTERS + 2, LENGTH)
    crowd.adapters = adapters
    done = {number: number % 5 for number in range(NUM_ADAPTERS + 2)}
    crowd.step({s: tokens[:count] for s, count in done.items() if count})
    order = sorted(done, key=lambda s: (s * 7) % 18)
    mixed = crowd.step({s: tokens[done[s] : LENGTH - s % 3] for s in order})
    base = PagedSequences(loaded.model, 1, LENGTH).run(0, tokens, chunk=LENGTH)
    for sequence, count in done.items():
        end = LENGTH - sequence % 3
        alone = PagedSequences(loaded.model, 1, LENGTH)
        alone.adapters = {0: adapters[sequence]} if sequence in adapters else {}
        expected = alone.run(0, tokens[:end], chunk=LENGTH)[count:]
        assert torch.equal(mixed[sequence], expected)
        assert torch.equal(mixed[sequence], base[count:end]) == (sequence not in adapters)


# Turned rows, joined matrices, a gate beside queries, experts.
@pytest.mark.parametrize("name", ["llama", "cohere", "phi3", "qwen3.5", "gpt-oss"])
def test_heads_that_are_padded(
    name: str, tiny_model: Callable[[str], Path], tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU's kernels have them: an adapter is of the heads of the checkpoint."""
    adapted = make_adapter(make_reference(name), "padded")
    monkeypatch.setattr(CpuBackend, "head_sizes", lambda self, dtype: (64,))
    loaded = load_model(tiny_model(name))
    assert isinstance(loaded.config, DecoderConfig) and loaded.config.head_padding
    sequences = PagedSequences(loaded.model, 1, LENGTH)
    sequences.adapters = {0: load(save_adapter(adapted, tmp_path / "a"), loaded)}
    assert_near(sequences.run(0, tokens, chunk=LENGTH), logits_of(adapted, tokens))


def test_rows_that_nobody_reads_change_nothing(
    tiny_model: Callable[[str], Path], tokens: list[int], tmp_path: Path
) -> None:
    """The last layer goes on with the rows that are read, and each keeps its adapter."""
    loaded = load_model(tiny_model("llama"))
    adapters = {
        s: load(save_adapter(make_adapter(make_reference("llama"), f"{s}"), tmp_path / f"{s}"), loaded) for s in (0, 2)
    }
    prompts, read = {0: tokens[:13], 1: tokens[:1], 2: tokens[3:20], 3: tokens[:7]}, {0: 1, 1: 1, 2: 0, 3: 2}
    whole, partial = (PagedSequences(loaded.model, 4, LENGTH) for _ in range(2))
    whole.adapters = partial.adapters = adapters
    expected, result = whole.step(prompts), partial.step(prompts, read)
    for sequence, count in read.items():
        assert torch.equal(result[sequence], expected[sequence][len(prompts[sequence]) - count :])


def test_a_quantised_model_takes_the_adapter_of_its_checkpoint(tmp_path: Path, tokens: list[int]) -> None:
    """Codes stay codes: the delta is added to their product."""
    adapted = make_adapter(write_tiny_gguf("llama-head-64", tmp_path / "model.gguf", GGMLQuantizationType.Q8_0), "gguf")
    loaded = load_model(tmp_path / "model.gguf")
    sequences = PagedSequences(loaded.model, 2, LENGTH)
    sequences.adapters = {0: load(save_adapter(adapted, tmp_path / "a"), loaded)}
    results = sequences.step({0: tokens, 1: tokens})
    assert_near(results[0], logits_of(adapted, tokens))
    assert not torch.equal(results[0], results[1])


def test_every_tiny_model_that_is_listed_is_there() -> None:
    assert {*FAMILIES, *TARGETS} <= set(TINY_MODELS)
